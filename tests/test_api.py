"""`tezo.train` and `tezo.open_run`: objects or names, one run; the model afterwards; what is refused."""

import copy
import gc
import importlib.util
import inspect
import json
import pickle
import tempfile
import types
from typing import Union, get_args, get_origin, get_type_hints

import pytest
import torch
from cases import tuples_mostly_slow
from datasets import Dataset, DatasetDict
from folders import completion_rows, label_rows, model_folder, tiny_model, tokenizer_for, write_rows
from folders import tezo as command_line
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DefaultFlowCallback

import tezo
from tezo.methods import BASELINES, BUILT_IN, METHODS, method
from tezo.models.kinds import ModelConfig
from tezo.runs.text_logs import value_of
from tezo.system.errors import RequestError, RunError
from tezo.tasks.row_files import DataConfig
from tezo.training.listeners import Listener
from tezo.training.settings import PARAMETERS, Options, TrainConfig

ROWS = {"train": label_rows(20), "dev": label_rows(8, seed=1), "test": label_rows(12, seed=2)}
SETTINGS = {"steps": 4, "batch_size": 4, "lr": 0.05, "rank": 4, "keep_best": False, "log_every": 2, "eval_every": 2}
RATES = {"head-feedback": {}, "tezo-adam": {"lr": 0.02}, "mezo": {"lr": 0.01, "rank": None}, "adam": {"rank": None}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "bert", "roberta"):
        model_folder(root, family)
    for name, rows in ROWS.items():
        write_rows(root / f"{name}.jsonl", rows)
    return root


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where temporary run folders go; nothing may be left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    gc.collect()
    assert list(folder.iterdir()) == []


def in_memory(family="opt"):
    tokenizer = tokenizer_for(family)
    return {"model": tiny_model(family, len(tokenizer)), "tokenizer": tokenizer}


def options(method="head-feedback", **changes):
    found = SETTINGS | {"method": method} | RATES.get(method, {}) | changes
    return {name: value for name, value in found.items() if value is not None}


def trained(base=None, rows=ROWS, **changes):
    parts = {"data": rows["train"], "dev": rows["dev"], "test": rows["test"]}
    return tezo.train(**parts, **(base or in_memory()), **options(**changes))


def outputs(model):
    ids = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(input_ids=ids)
    return output.logits if "logits" in output else output.last_hidden_state


def result_tensors(run):
    return load_file(next(run.folder.glob("*/*.safetensors")))


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# Objects and names


@pytest.mark.parametrize(
    ("family", "method"),
    tuples_mostly_slow(
        [*(("opt", name) for name in RATES), ("bert", "head-feedback"), ("roberta", "head-feedback")],
        ("opt", "head-feedback"),
        ("opt", "mezo"),
        ("bert", "head-feedback"),
    ),
)
def test_objects_and_names_are_the_same_run(home, family, method):
    named, training = {"model": str(home / family)}, in_memory(family)
    training["model"].train()  # dropout and all
    files = {part: home / f"{part}.jsonl" for part in ROWS}
    data_sets = {part: Dataset.from_list(rows) for part, rows in ROWS.items()}
    run, *others = (
        trained(named, files, method=method),
        trained(named, ROWS, method=method),
        trained(training, files, method=method),
        trained(in_memory(family), data_sets, method=method),
    )
    assert run.summary["after"] != run.summary["before"]
    for other in others:
        assert same_tensors(result_tensors(run), result_tensors(other))
        assert run.summary["after"] == other.summary["after"]


@pytest.mark.thinned
@pytest.mark.parametrize("sizes", [{"num_train": 9, "num_dev": 5, "num_test": 7}, {"per_class": 3}])
@pytest.mark.parametrize("parts", [("train",), ("train", "dev"), ("train", "test"), ("train", "dev", "test")])
def test_rows_in_memory_are_divided_as_those_of_a_file(home, parts, sizes):
    sizes = {key: size for key, size in sizes.items() if key.removeprefix("num_") in (*parts, "per_class")}
    runs = []
    for rows in (ROWS, {part: home / f"{part}.jsonl" for part in ROWS}):
        given = {"data" if part == "train" else part: rows[part] for part in parts}
        runs.append(tezo.train(**given, **in_memory(), **options(**sizes)))
    one, other = runs
    assert one.summary["rows"] == other.summary["rows"]
    assert one.summary["after"] == other.summary["after"] == one.evaluate() == other.evaluate()


def test_a_file_may_go_with_rows_in_memory(home):
    run = trained(rows=ROWS | {"dev": str(home / "dev.jsonl")})
    assert run.config.data.dev == str(home / "dev.jsonl") and run.config.data.train == "in memory"
    assert run.evaluate() == run.summary["after"]


def test_settings_by_name_and_by_key_are_those_of_the_command_line(home, tmp_path):
    run = tezo.train(home / "opt", home / "train.jsonl", output=tmp_path / "one", lr="2e-3", steps=2, seed=3,
                     method="head-feedback", settings={"data.seed": 5, "method.betas": (0.8, 0.9)})  # fmt: skip
    done = command_line("train", "--model", home / "opt", "--data", home / "train.jsonl", "--lr", "2e-3", "--steps", 2,
                        "--seed", 3, "--set", "data.seed=5", "--set", "method.betas=[0.8, 0.9]",
                        "--method", "head-feedback", "--output", tmp_path / "other")  # fmt: skip
    assert done.code == 0, done.err
    assert (tmp_path / "one/config.yaml").read_text() == (tmp_path / "other/config.yaml").read_text()
    assert (
        run.config.method.options == {"lr": 2e-3, "betas": (0.8, 0.9), "directions": "per-example", "rho": 1e-3}
        and run.config.data.seed == 5
    )


def kinds_of(hint):
    return set(get_args(hint)) if isinstance(hint, types.UnionType) or get_origin(hint) is Union else {hint}


def test_every_setting_has_one_typed_name_or_a_parameter():
    sections = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
    expected = {f"{part}.{name}": kinds_of(hint) for part, cls in sections.items()
                for name, hint in get_type_hints(cls).items()}  # fmt: skip
    for known in (*METHODS.values(), *BASELINES.values()):
        for name, hint in known.options().items():
            expected[f"method.{name}"] = expected.get(f"method.{name}", set()) | kinds_of(hint)
    del expected["data.seed"]  # by its dotted key: seed is train.seed
    named = expected.keys() - PARAMETERS.keys()
    assert len({key.partition(".")[2] for key in named}) == len(named)
    hints = get_type_hints(Options)
    assert {key.partition(".")[2]: kinds for key, kinds in expected.items() if key not in PARAMETERS} == {
        name: kinds_of(hint) for name, hint in hints.items()
    }
    parameters = set(inspect.signature(tezo.train).parameters)
    assert not parameters & hints.keys() and set(PARAMETERS.values()) <= parameters


def test_an_output_that_is_no_path_is_refused():
    with pytest.raises(RequestError, match="output is 3; give a path"):
        trained(output=3)


# Figures, evaluation, prediction


def test_the_metrics_are_the_lines_of_the_run(tmp_path):
    run = trained(output=tmp_path / "run")
    lines = [value_of(line, checked=True) for line in (tmp_path / "run/metrics.jsonl").read_bytes().splitlines()]
    assert run.metrics == lines
    evaluations = {(line["split"], line["step"]): line for line in run.metrics if "split" in line}
    untuned = {("bias", 0), ("probe", 0)}
    assert set(evaluations) == {("dev", 0), ("dev", 2), ("dev", 4), ("test", 0), ("test", 4)} | untuned
    assert evaluations["probe", 0] == {"step": 0, "split": "probe", **run.summary["untuned"]["probe"]}
    assert evaluations["test", 4] == {"step": 4, "split": "test", **run.summary["after"]}
    assert [line["step"] for line in run.metrics if "split" not in line] == [2, 4]
    assert run.summary == json.loads((tmp_path / "run/summary.json").read_text())
    assert "head-feedback, 4 steps" in repr(run) and str(tmp_path / "run") in repr(run)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": ')
    with pytest.raises(RequestError, match=r"metrics\.jsonl is not the file that was saved"):
        print(run.metrics)


def test_evaluation_and_prediction_are_those_of_the_command_line(home, tmp_path):
    run = trained({"model": home / "opt"}, output=tmp_path / "run")
    done = command_line("eval", tmp_path / "run", "--data", home / "dev.jsonl", "--json")
    metrics = {key: value for key, value in json.loads(done.out).items() if key not in ("rows", "notices")}
    asked = [{"text": row["text"]} for row in ROWS["test"]]
    flags = ("--input", write_rows(tmp_path / "asked.jsonl", asked), "--output", tmp_path / "answers.jsonl")
    assert command_line("predict", tmp_path / "run", *flags).code == 0
    answers = [json.loads(line)["prediction"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    for same in (run, tezo.open_run(tmp_path / "run")):
        for data in (ROWS["dev"], Dataset.from_list(ROWS["dev"]), home / "dev.jsonl"):
            assert same.evaluate(data) == pytest.approx(metrics)
        assert same.predict(asked) == same.predict(ROWS["test"]) == same.predict(tmp_path / "asked.jsonl") == answers
    right = sum(row["label"] == answer for row, answer in zip(ROWS["test"], answers, strict=True))
    assert right / len(answers) == pytest.approx(run.summary["after"]["accuracy"])


def test_answers_in_free_text_have_at_most_so_many_tokens():
    run = tezo.train(data=completion_rows(8), **in_memory(), **options(steps=1))
    rows = [{"prompt": row["prompt"], "completion": ""} for row in completion_rows(3, seed=1)]
    with pytest.warns(UserWarning, match="of 3 answers were cut at"):
        short, long = (run.predict(rows, max_new_tokens=count) for count in (1, 4))
    assert [answer.split()[:1] for answer in long] == [answer.split() for answer in short]
    with pytest.raises(RequestError, match="max_new_tokens is 0"):
        run.predict(rows, max_new_tokens=0)
    with pytest.raises(RequestError, match="max_new_tokens is 'few'; it must be a whole number"):
        run.predict(rows, max_new_tokens="few")


def test_what_is_to_be_known_of_an_evaluation_is_warned_of():
    run = trained()
    with pytest.warns(UserWarning, match="cut"):
        run.evaluate([{"text": "good " * 400, "label": "good"}, *ROWS["test"]])


# The model afterwards


@pytest.mark.thinned
@pytest.mark.parametrize("form", ["lora", "merged"])
@pytest.mark.parametrize("when", ["live", "opened", "merged", "by name", "opened by name"])
def test_what_is_exported_is_the_tuned_model_and_the_model_stays_as_it_is(home, tmp_path, form, when):
    base = {"model": str(home / "opt")} if "name" in when else in_memory()
    run = trained(base, output=tmp_path / "run")
    expected = outputs(run.model)
    if when == "opened":
        run = tezo.open_run(tmp_path / "run", **in_memory())
    elif when == "opened by name":
        run = tezo.open_run(tmp_path / "run")
    elif when == "merged":
        run.merge()
    before = outputs(run.model) if when != "opened by name" else None
    weights = {name: value.clone() for name, value in run.model.state_dict().items()} if before is not None else None
    assert run.export(tmp_path / "export", form) == tmp_path / "export"
    if before is not None:
        assert torch.equal(outputs(run.model), before) and same_tensors(run.model.state_dict(), weights)
    if form == "lora":
        loaded = PeftModel.from_pretrained(in_memory()["model"], tmp_path / "export").eval()
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert AutoTokenizer.from_pretrained(tmp_path / "export").get_vocab() == run.tokenizer.get_vocab()
    close(outputs(loaded), expected)


@pytest.mark.parametrize("method", RATES)
def test_the_model_is_the_very_one_that_was_given_and_opens_again(home, tmp_path, method):
    base = in_memory()
    untouched = outputs(base["model"])
    run = trained(base, method=method, output=tmp_path / "run")
    tuned = outputs(run.model)
    assert run.model is base["model"] and run.tokenizer is base["tokenizer"]
    assert (tuned - untouched).abs().max() > 1e-3
    assert torch.equal(outputs(base["model"]), tuned)
    for again in (
        tezo.open_run(tmp_path / "run", **in_memory()),
        tezo.open_run(tmp_path / "run", model=home / "opt"),
        tezo.open_run(tmp_path / "run", model=str(home / "opt")),
    ):
        close(outputs(again.model), tuned)
        assert again.summary == run.summary and again.config.method == run.config.method


def test_hooks_stay_until_the_run_is_merged_or_closed(tmp_path):
    base = in_memory()
    model, untouched = base["model"], outputs(base["model"])
    run = trained(base, output=tmp_path / "run")
    tuned = outputs(model)
    model.save_pretrained(tmp_path / "saved")
    close(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), tuned)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RequestError, match=r"copy or pickle: .*merge\(\) or close\(\)"):
            copying(model)
    for ask in (trained, lambda base: tezo.open_run(tmp_path / "run", **base)):
        with pytest.raises(RequestError, match=r"tuned by another run.*merge\(\).*close\(\)"):
            ask(base)
    run.close()
    assert torch.equal(outputs(model), untouched)
    with pytest.raises(RequestError, match="closed"):
        run.predict(ROWS["test"])
    with pytest.raises(RequestError, match="closed"):
        run.export(tmp_path / "export")
    again = tezo.open_run(tmp_path / "run", **base)
    close(outputs(again.model), tuned)
    with pytest.raises(RequestError, match="adapter attached"):
        trained(base)
    again.close()
    assert torch.equal(outputs(model), untouched)
    assert outputs(trained(base).model).shape == tuned.shape


@pytest.mark.parametrize("opened", [False, True])
def test_a_merged_model_is_an_ordinary_one(tmp_path, opened):
    run = trained(output=tmp_path / "run")
    tuned = outputs(run.model)
    if opened:
        run = tezo.open_run(tmp_path / "run", **in_memory())
    model = run.merge()
    assert model is run.model is run.merge()
    close(outputs(model), tuned)
    merged = outputs(model)
    assert run.evaluate(ROWS["test"]) == pytest.approx(run.summary["after"])
    run.close()
    assert torch.equal(outputs(model), merged)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), merged)
    assert torch.equal(outputs(pickle.loads(pickle.dumps(model))), merged)
    second = trained({"model": model, "tokenizer": tokenizer_for("opt")})
    assert second.summary["before"] == pytest.approx(run.summary["after"])


def test_an_adapter_of_peft_goes_into_the_model(home, tmp_path):
    base = in_memory()
    run = trained(base, method="mezo", peft="lora", output=tmp_path / "run")
    tuned = outputs(run.model)
    assert isinstance(run.model, PeftModel)
    with pytest.raises(RequestError, match="layers of PEFT"):
        trained(base)
    run.export(tmp_path / "lora")
    run.export(tmp_path / "merged", "merged")
    assert torch.equal(outputs(run.model), tuned) and run.merge() is run.model
    run.export(tmp_path / "merged again", "merged")
    close(outputs(PeftModel.from_pretrained(in_memory()["model"], tmp_path / "lora").eval()), tuned)
    for name in ("merged", "merged again"):
        close(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / name)), tuned)
    close(outputs(tezo.open_run(tmp_path / "run", model=home / "opt").model), tuned)


def test_a_packed_model_is_tuned_and_not_merged(home, tmp_path):
    packed = AutoModelForCausalLM.from_pretrained(
        home / "opt", quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
    )
    run = trained({"model": packed, "tokenizer": tokenizer_for("opt")})
    assert run.summary["after"] != run.summary["before"]
    for ask in (lambda: run.export(tmp_path / "merged", "merged"), run.merge):
        with pytest.raises(RequestError, match="packed and takes no change"):
            ask()
    run.export(tmp_path / "lora")
    assert not (tmp_path / "merged").exists() and (tmp_path / "lora/adapter_model.safetensors").is_file()


def test_a_temporary_folder_lives_as_long_as_its_run(temporary):
    run, other = trained(), trained()
    assert run.folder.parent == temporary and (run.folder / "summary.json").is_file()
    run.close()
    assert [folder.name for folder in temporary.iterdir()] == [other.folder.name]
    with pytest.raises(RequestError, match="temporary folder is gone"):
        print(run.model)
    del other
    gc.collect()
    assert list(temporary.iterdir()) == []


# An adapter


def test_an_exported_adapter_is_attached_and_taken_off(tmp_path):
    run = trained()
    run.export(tmp_path / "adapter")
    model = in_memory()["model"]
    untouched = outputs(model)
    handles = tezo.load_adapter(model, str(tmp_path / "adapter"))
    close(outputs(model), outputs(run.model))
    with pytest.raises(RequestError, match="adapter attached"):
        trained({"model": model, "tokenizer": tokenizer_for("opt")})
    for handle in handles:
        handle.remove()
    assert torch.equal(outputs(model), untouched)
    with pytest.raises(RequestError, match=r"its weights are not those .*Without base.json"):
        tezo.load_adapter(tiny_model("llama", 100), tmp_path / "adapter")
    with pytest.raises(RequestError, match="not an adapter that can be read"):
        tezo.load_adapter(model, tmp_path)


# Interrupted runs


class Stops(Listener):
    """Fails after so many steps."""

    def __init__(self, steps):
        self.steps = steps

    def stepped(self, progress):
        if progress.record.step + 1 == self.steps:
            raise RunError("stopped here")


def test_an_interrupted_run_goes_on_with_the_same_objects(tmp_path):
    whole = trained(output=tmp_path / "whole", checkpoint_every=2)
    base = in_memory()
    untouched = outputs(base["model"])
    with pytest.raises(RunError, match="stopped here"):
        trained(base, output=tmp_path / "run", checkpoint_every=2, listeners=[Stops(3)])
    assert torch.equal(outputs(base["model"]), untouched), "the model is the base model again"
    with pytest.raises(RequestError, match="has not ended"):
        tezo.open_run(tmp_path / "run")
    asked = {"output": tmp_path / "run", "checkpoint_every": 2, "resume": True}
    with pytest.raises(RequestError, match="training rows"):
        trained(base, ROWS | {"train": label_rows(20, seed=9)}, **asked)
    with pytest.raises(RequestError, match="weights are not those"):
        trained({"model": tiny_model("opt", len(base["tokenizer"]), seed=1), "tokenizer": base["tokenizer"]}, **asked)
    run = trained(base, **asked)
    assert same_tensors(result_tensors(run), result_tensors(whole))
    assert run.summary["after"] == whole.summary["after"]
    assert torch.equal(outputs(run.model), outputs(whole.model))


def test_a_run_that_has_ended_is_opened_by_resuming_it(tmp_path):
    run = trained(output=tmp_path / "run")
    again = trained(output=tmp_path / "run", resume=True)
    assert again.summary == run.summary
    close(outputs(again.model), outputs(run.model))
    assert again.evaluate() == pytest.approx(run.summary["after"])
    other = in_memory()
    with torch.no_grad():
        next(other["model"].parameters()).add_(0.1)
    with pytest.raises(RequestError, match="weights are not those"):
        trained(other, output=tmp_path / "run", resume=True)
    with pytest.raises(RequestError, match="rows are not those"):
        trained(rows=ROWS | {"test": ROWS["test"][1:]}, output=tmp_path / "run", resume=True)


def test_a_model_that_a_method_writes_is_not_taken_for_its_base(tmp_path):
    base = in_memory()
    with pytest.raises(RunError, match="stopped here"):
        trained(base, method="mezo", output=tmp_path / "run", listeners=[Stops(2)])
    with pytest.raises(RequestError, match="weights are not those"):
        trained(base, method="mezo", output=tmp_path / "run", resume=True)
    assert trained(method="mezo", output=tmp_path / "run", resume=True).summary["steps"] == 4


# Other processes


def test_a_run_of_objects_says_elsewhere_what_it_lacks(home, tmp_path):
    trained(output=tmp_path / "run")
    with pytest.raises(RequestError, match=r"object in memory.*open_run\(\.\.\., model=FOLDER\)"):
        print(tezo.open_run(tmp_path / "run").model)
    opened = tezo.open_run(tmp_path / "run", model=home / "opt")
    with pytest.raises(RequestError, match="rows of this run were objects in memory"):
        opened.evaluate()
    moved = ("--set", f"model.name={home / 'opt'}")
    for flags, said in (
        (("eval", tmp_path / "run"), "rows of this run were objects"),
        (("eval", tmp_path / "run", "--data", home / "dev.jsonl"), "--set model.name=FOLDER"),
        (("train", "--output", tmp_path / "run2", "--model", home / "opt", "--data", "in memory"), "rows of this run"),
    ):
        done = command_line(*flags)
        assert done.code == 2 and done.says(said), done.err
    done = command_line("eval", tmp_path / "run", "--data", home / "test.jsonl", "--json", *moved)
    assert json.loads(done.out)["loss"] == pytest.approx(opened.summary["after"]["loss"])


def test_a_model_that_was_loaded_by_a_name_is_found_by_it(home, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(home / "opt", dtype=torch.float64)
    run = trained({"model": model, "tokenizer": tokenizer_for("opt")}, output=tmp_path / "run")
    assert run.config.model.name == str(home / "opt") and run.config.model.dtype == "float64"
    again = tezo.open_run(tmp_path / "run")
    assert again.model.dtype == torch.float64
    close(outputs(again.model), outputs(run.model))


# Refusals

OBJECT = {"data": ROWS["train"], "method": "head-feedback", "steps": 1, "lr": 0.05}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": None}, r"tokenizer is not set"),
        ({"tokenizer": "facebook/opt-125m"}, r"tokenizer is 'facebook/opt-125m'.*AutoTokenizer"),
        ({"tokenizer": tokenizer_for("opt").backend_tokenizer}, r"tokenizer is Tokenizer, .*of a processor"),
        ({"model": nn.Linear(2, 2)}, r"model is Linear"),
        ({"model": 3}, r"model is int"),
        ({"dtype": "bfloat16"}, r"model\.dtype is 'bfloat16'"),
        ({"quantization": "nf4"}, r"model\.quantization is 'nf4'"),
        ({"placement": "cpu"}, r"model\.placement is 'cpu'"),
        ({"data": None}, r"data is not set"),
        ({"data": []}, r"data has no rows"),
        ({"data": ["text"]}, r"data, row 1, is str"),
        ({"data": 3}, r"data is int"),
        ({"data": DatasetDict(train=Dataset.from_list(ROWS["train"]))}, r"DatasetDict of train.*one split"),
        ({"dev": [{"stars": 1, "label": "good"}]}, r"dev, row 1: there is no field 'text', but 'stars'"),
        ({"test": [{"text": "a", "label": "bd"}]}, r"test, row 1: the label 'bd'.*'bad'"),
        ({"task": "rte"}, r"data\.task is rte, and data are rows in memory"),
        ({"data": None, "task": "rte", "dev": ROWS["dev"]}, r"data\.task is rte, and dev are rows"),
        ({"subset": "x"}, r"data\.subset is 'x'"),
        ({"dir": "x"}, r"data\.dir is 'x'"),
        ({"stepps": 3}, r"stepps: there is no such setting\. Did you mean 'steps'"),
        ({"steps": "many"}, r"train\.steps is 'many'"),
        ({"method": "head-fedback"}, r"no method 'head-fedback'.*'head-feedback'"),
        ({"method": "mezo", "rank": 3}, r"method\.rank: mezo has no such option"),
        ({"settings": {"model.name": "x"}}, r"model\.name is the parameter model"),
        ({"settings": {"lr": 1e-4}}, r"lr has no section"),
        ({"settings": {"train.steps": 3}}, r"train\.steps is given by its name too"),
        ({"settings": {"data.textt": "x"}}, r"data\.textt.*'text'"),
        ({"resume": True}, r"resume is set, and output is not"),
        ({"dev": "validation"}, r"data\.dev is 'validation', .*split of a hub data set"),
        ({"settings": [1]}, r"settings is \[1\]; give a dictionary"),
        ({"settings": {"train": {"steps": 3}}}, r"train is a section; .*'train\.steps'"),
        ({"listeners": Stops(1)}, r"listeners is a Stops; give a list"),
        ({"listeners": [DefaultFlowCallback()]}, r"listeners has .*TrainerCallbacks"),
    ],
)
def test_a_request_that_cannot_work_is_a_sentence_and_leaves_nothing(changes, said):
    base = in_memory()
    untouched = outputs(base["model"])
    with pytest.raises(RequestError, match=said):
        tezo.train(**(OBJECT | base | changes))
    assert torch.equal(outputs(base["model"]), untouched)


def test_a_refused_request_can_be_mended():
    base = in_memory()
    for changes, said in (({"feedback_last": 2}, "feedback_last is 2"), ({"objective": "f2"}, "no metric 'f2'")):
        with pytest.raises(RequestError, match=said):
            tezo.train(**(OBJECT | base | changes))
    assert tezo.train(**(OBJECT | base)).model is base["model"]


@pytest.mark.parametrize(
    ("closures", "said"),
    [
        (lambda: 1, "give a function of a step"),
        ([1], "give a function of a step"),
        (lambda _: None, r"closures\(0\) is NoneType"),
    ],
)
def test_a_loop_of_ones_own_is_prepared_by_a_function_of_a_step(closures, said):
    with pytest.raises(RequestError, match=said):
        tezo.prepare(in_memory()["model"], closures, steps=1)


def test_an_adapter_is_attached_once(tmp_path):
    run = trained(output=tmp_path / "run")
    base = in_memory()["model"]
    handles = tezo.load_adapter(base, run.folder / "adapter")
    with pytest.raises(RequestError, match="an adapter attached already"):
        tezo.load_adapter(base, run.folder / "adapter")
    for handle in handles:
        handle.remove()
    tezo.load_adapter(base, run.folder / "adapter")
    close(outputs(base), outputs(run.model))
    for folder in (lambda: tezo.open_run(None), lambda: tezo.load_adapter(in_memory()["model"], None)):
        with pytest.raises(RequestError, match="folder is None; give a path"):
            folder()


def test_other_requests_that_cannot_work(home, tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="tokenizer is given, and model is the name"):
        tezo.train(home / "opt", ROWS["train"], tokenizer=tokenizer_for("opt"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match="several processes need one folder"):
        tezo.train(home / "opt", ROWS["train"])
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(RequestError, match="not a run folder"):
        tezo.open_run(home / "opt")
    with pytest.raises(RequestError, match="give the base model itself"):
        tezo.load_adapter(str(home / "opt"), tmp_path)
    run = trained(output=tmp_path / "run")
    with pytest.raises(RequestError, match="exists already"):
        trained(output=tmp_path / "run")
    with pytest.raises(RequestError, match="exists already"):
        run.export(tmp_path / "run")
    with pytest.raises(RequestError, match="format is 'onnx'"):
        run.export(tmp_path / "export", "onnx")
    with pytest.raises(RequestError, match="has no adapter"):
        trained(method="mezo").export(tmp_path / "export")
    (tmp_path / "run/summary.json").write_text("{")
    with pytest.raises(RequestError, match=r"summary\.json"):
        tezo.open_run(tmp_path / "run")


# The package


def test_every_method_is_given_by_its_name():
    rows = [method(name) for name in BUILT_IN]
    assert all(getattr(tezo, row.name.replace("-", "_")) is row.build for row in rows)
    assert {"train", "open_run", "Run", "load_adapter", "export_adapter", "METHODS", "ZerothOrderOptimizer",
            "FirstOrderOptimizer", "RequestError", "__version__"} <= set(dir(tezo))  # fmt: skip


def test_train_is_a_function_and_no_module():
    assert inspect.isfunction(tezo.train) and importlib.util.find_spec("tezo.train") is None
