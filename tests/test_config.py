"""Settings: every one typed, later ones win, and what is written into a run folder reads back the same."""

import dataclasses
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import yaml

from tezo.methods import METHODS, Count, Rate
from tezo.models.kinds import ModelConfig
from tezo.system.errors import RequestError
from tezo.tasks.row_files import DataConfig
from tezo.training.settings import Config, TrainConfig, dump_config, parse_config, parse_setting, read_config

LEAST = {"model": {"name": "m"}, "data": {"train": "d"}}
SECTIONS = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
FIELDS = [(name, key, kind) for name, cls in SECTIONS.items() for key, kind in get_type_hints(cls).items()]
OPTIONS = [(name, key, kind) for name, method in METHODS.items() for key, kind in method.options().items()]


def plain(kind: Any) -> Any:
    """The type without `| None`, and a string where a value of our own may stand for one."""
    if isinstance(kind, types.UnionType) and str in get_args(kind):
        return str
    return next(a for a in get_args(kind) if a is not type(None)) if type(None) in get_args(kind) else kind


def samples(kind: Any) -> tuple[list[Any], list[Any]]:
    """Values of a type, and values that are not of it."""
    kind = plain(kind)
    if kind == Rate:
        return [0.25, "auto"], samples(float)[1]
    if kind == Count:
        return [3, "auto"], samples(int)[1]
    if get_origin(kind) is Literal:
        return list(get_args(kind)), ["no such choice", 7, ["auto"]]
    if get_origin(kind) is dict:
        return [{"good": "fine", "bad": "poor"}], [3, [1, 2], {"good": ["fine"]}]
    if get_origin(kind) is tuple:
        return [(0.5, 0.25)], [0.9, [0.9], [0.9, 0.9, 0.9], ["a", "b"], {"a": 1}]
    if get_origin(kind) is not None:  # a sequence of strings
        return [["all-linear", "!q_proj"]], [3, {"a": 1}, [["a"]]]
    return {
        int: ([3, 40], [2.5, True, "three", [3], {"a": 1}]),
        float: ([0.25, 0.5], [True, "half", [0.5], {"a": 1}]),
        bool: ([True, False], [1, 0.5, "perhaps", [True]]),
        str: (["some words", "x"], [["x"], {"a": 1}]),
    }[kind]


def tree_with(section: str, key: str, value: Any) -> dict[str, Any]:
    tree = {name: dict(content) for name, content in LEAST.items()}
    tree.setdefault(section, {})[key] = value
    return tree


@pytest.mark.parametrize(("section", "key", "kind"), FIELDS, ids=[f"{s}.{k}" for s, k, _ in FIELDS])
def test_every_setting_takes_its_type_and_no_other(section, key, kind):
    right, wrong = samples(kind)
    if (section, key) == ("data", "max_length"):
        right = [30, 40]
    adapter = {"lora_rank": "lora", "lora_alpha": "lora", "prefix_length": "prefix"}.get(key)
    for value in right:
        tree = tree_with(section, key, value)
        tree["model"] |= {"peft": adapter} if adapter else {}
        assert getattr(getattr(parse_config(tree), section), key) == value
    for value in wrong:
        with pytest.raises(RequestError, match=rf"^{section}\.{key}\b.* is "):
            parse_config(tree_with(section, key, value))
    if (section, key) == ("data", "train"):
        assert parse_config({**LEAST, "data": {"task": "rte"}}).data.train is None
    elif plain(kind) is not kind:
        assert getattr(getattr(parse_config(tree_with(section, key, None)), section), key) is None
    else:
        with pytest.raises(RequestError, match=rf"{section}\.{key} is None"):
            parse_config(tree_with(section, key, None))


@pytest.mark.parametrize(("name", "key", "kind"), OPTIONS, ids=[f"{m}.{k}" for m, k, _ in OPTIONS])
def test_every_option_of_a_method_takes_its_type_and_no_other(name, key, kind):
    right, wrong = samples(kind)
    for value in right:
        config = parse_config(LEAST | {"method": {"name": name, key: value}})
        assert config.method.options == {key: value}
    for value in wrong:
        with pytest.raises(RequestError, match=rf"^method\.{key} is "):
            parse_config(LEAST | {"method": {"name": name, key: value}})


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", ".1e-4"])
def test_a_number_is_a_number_however_it_is_written(text, tmp_path):
    assert read_config(None, [("model", "m"), ("data", "d"), ("method.lr", text)]).method.options == {"lr": 1e-5}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: m\ndata: d\nmethod:\n  lr: {text}\n")
    assert read_config(recipe, []).method.options == {"lr": 1e-5}


NUMPY = [("steps", np.int64(2), 2), ("epochs", np.float32(0.5), 0.5), ("keep_best", np.bool_(False), False)]


@pytest.mark.parametrize(("key", "given", "same"), NUMPY)
def test_a_number_of_numpy_is_pythons(key, given, same):
    read = getattr(parse_config(tree_with("train", key, given)).train, key)
    assert read == same and type(read) is type(same)
    rate = parse_config(tree_with("method", "lr", np.float32(0.25))).method.options["lr"]
    assert rate == 0.25 and type(rate) is float
    with pytest.raises(RequestError, match=r"train\.steps is True; it must be a whole number"):
        parse_config(tree_with("train", "steps", np.bool_(True)))


def test_names_that_look_like_numbers_stay_names(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\ndata: {train: d, label: 1, label_words: {0: 5, 1: nine}}\n")
    config = read_config(recipe, [("data.text", "12"), ("data.template", "no")])
    assert (config.data.label, config.data.text, config.data.template) == ("1", "12", "no")
    assert config.data.label_words == {"0": "5", "1": "nine"}


@pytest.mark.parametrize("words", ["{0: no, 1: fine}", "{no: bad, fine: good}"])
def test_words_that_yaml_reads_as_true_or_false_are_to_be_quoted(words, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: m\ndata: {{train: d, label_words: {words}}}\n")
    with pytest.raises(RequestError, match=r"data\.label_words.*quote"):
        read_config(recipe, [])
    recipe.write_text(recipe.read_text().replace("no", "'no'"))
    assert "no" in str(read_config(recipe, []).data.label_words)


def test_short_forms_are_the_first_key_of_their_section(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\ndata: d\nmethod: mezo\n")
    long = parse_config({"model": {"name": "m"}, "data": {"train": "d"}, "method": {"name": "mezo"}})
    assert read_config(recipe, []) == long
    assert read_config(None, [("model", "m"), ("data", "d"), ("method", "mezo")]) == long
    assert read_config(recipe, [("model.dtype", "float32")]).model == ModelConfig(name="m", dtype="float32")


def test_settings_are_laid_over_the_recipe_and_later_ones_win(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\ndata: {train: d, test: t}\nmethod: {name: tezo, lr: 1, rank: 3}\ntrain: {steps: 5}\n")
    config = read_config(
        recipe, [("train.steps", "7"), ("method.lr", 2.0), ("train.steps", "9"), ("data.train", "e"), ("train.seed", 1)]
    )
    assert config.train == TrainConfig(steps=9, seed=1)
    assert config.data == DataConfig(train="e", test="t")
    assert config.method.options == {"lr": 2.0, "rank": 3}
    assert yaml.safe_load(recipe.read_text())["train"] == {"steps": 5}


def test_label_words_can_be_set_one_by_one():
    named = [("model", "m"), ("data", "d"), ("data.label_words.a", "good"), ("data.label_words.b", "bad")]
    assert read_config(None, named).data.label_words == {"a": "good", "b": "bad"}
    with pytest.raises(RequestError, match=r"data\.label_words has 'a:good'.*space behind the colon"):
        read_config(None, [("model", "m"), ("data", "d"), ("data.label_words", "{a:good, b:bad}")])


def test_a_value_can_be_taken_back(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\ndata: {train: d, per_class: 5, max_length: 20}\nmethod: {name: tezo-cadam, rank: 3}\n")
    config = read_config(recipe, [("data.per_class", "null"), ("method.rank", "null")])
    assert (config.data.per_class, config.data.max_length) == (None, 20)
    assert config.method.options == {"rank": None}, "no rank is the layer-wise rule, not the default"


FULL = Config(
    model=ModelConfig(name="a/b", kind="masked", dtype="bfloat16", device="cpu", trust_remote_code=True),
    data=DataConfig(
        train="t.jsonl",
        dev="d.csv",
        test="e.parquet",
        hold_out=0.25,
        subset="s",
        shape="label",
        template="{a}: {mask} # ümläut",
        label_words={"1": "no", "0": "yes", "null": "on", "wait\x85": "é\x85"},
        per_class=3,
        max_length=99,
    ),
    train=TrainConfig(steps=3, schedule="cosine", eval_every=1, keep_best=False, seed=4),
)
ONE_OF_EACH = {"lr": 1e-7, "betas": (0.5, 0.25), "targets": ["all", "!lm_head"], "in_forward": False, "rank": None}


@pytest.mark.parametrize("text", ["[all,!x]", "[all, !x]", "['all', x"])
def test_a_list_that_yaml_cannot_read_is_no_pattern(text, tmp_path):
    given = [("model.name", "m"), ("data.train", "d"), ("method.targets", text)]
    with pytest.raises(RequestError, match=r"method\.targets is .*\[all, '!lm_head'\]"):
        read_config(None, given)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: m\ndata: d\nmethod: {{name: tezo, targets: {text}}}\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"recipe\.yaml .*needs quotes: \[all, '!lm_head'\]"):
        read_config(recipe, [])
    quoted = read_config(None, [*given[:2], ("method.targets", "[all,'!x']")])
    assert quoted.method.options["targets"] == ["all", "!x"]


@pytest.mark.parametrize("name", METHODS)
def test_what_is_written_reads_back_the_same(name, tmp_path):
    types = METHODS[name].options()
    options = {key: value for key, value in ONE_OF_EACH.items() if key in types}
    if "rank" in options and type(None) not in get_args(types["rank"]):
        options["rank"] = 4
    tree = {"name": name, **options}
    method = parse_config(LEAST | {"method": tree}).method
    assert method.options == options
    for config in (Config(model=ModelConfig(name="m"), data=DataConfig(train="d"), method=method),
                   dataclasses.replace(FULL, method=method)):  # fmt: skip
        path = tmp_path / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        assert read_config(path, []) == config
        assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_what_is_not_set_has_its_default_and_what_must_be_set_is_named():
    config = parse_config(LEAST)
    assert config.train == TrainConfig()
    assert config.method.name == "auto"
    for section, flag in (("model", "--model"), ("data", "--data")):
        with pytest.raises(RequestError, match=rf"{section}\..* is not set.*{flag}"):
            parse_config({key: value for key, value in LEAST.items() if key != section})


def test_a_configuration_cannot_be_changed_under_way():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_config(LEAST).train.steps = 3


@pytest.mark.parametrize("key", ["model", "model.name.first", "trian.steps", "train.stepz", "method.lrr", "data.x.y"])
def test_a_key_that_is_not_there_is_refused(key):
    named = [("model.name", "m"), ("data.train", "d"), (key, "[1, 2]")]
    if key == "model":
        assert read_config(None, named).model.name == "[1, 2]"
    else:
        with pytest.raises(RequestError, match=key.split(".")[0]):
            read_config(None, named)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train.temperature", "nan", "at least 0"),
        ("train.reward_seconds", "nan", "must be positive"),
        ("model.workers", "-1", "at least 0"),
        ("model.lora_rank", "4", r"model\.peft is none; set model\.peft=lora"),
        ("model.prefix_length", "3", "set model.peft=prefix or prompt"),
    ],
)
def test_a_value_without_a_meaning_is_refused(key, value, said):
    with pytest.raises(RequestError, match=rf"{key} is .*{said}"):
        read_config(None, [("model.name", "m"), ("data.train", "d"), (key, value)])


def test_a_setting_is_split_at_its_first_equals_sign():
    assert parse_setting("data.template={text} = {label}") == ("data.template", "{text} = {label}")
    assert parse_setting("data.label=") == ("data.label", "")
