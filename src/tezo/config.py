"""What a run is asked to do: YAML and `key=value` settings to frozen dataclasses, each checked once.

A recipe has four sections (model, data, method, train). `model: NAME`, `data: FILE` and `method: NAME` are
short for their first key. The resolved configuration is written into the run folder and reads back the same.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from tezo.coerce import coerce
from tezo.errors import RequestError, nearest
from tezo.methods import method


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base model."""

    name: str
    """A folder, a hub name, or embedded:all-minilm-l6-v2."""
    kind: Literal["auto", "causal", "masked", "encoder"] = "auto"
    """How it answers; auto goes by its architecture."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the weights; auto is as stored."""
    device: str = "auto"
    """auto is the first GPU, else the CPU."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    peft: Literal["none", "lora", "prefix"] = "none"
    """Tune an adapter of PEFT instead of the model: LoRA in PEFT's choice of layers, or a prefix."""
    lora_rank: int = 8
    """Rank of LoRA. MeZO: 8."""
    lora_alpha: int = 16
    """Scale of LoRA, times its rank. MeZO: 16."""
    prefix_length: int = 5
    """Virtual tokens of a prefix. MeZO: 5."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The rows."""

    train: str | None = None
    """A JSONL, CSV, TSV or Parquet file, or a hub data set."""
    task: str | None = None
    """Instead of train: one of the paper's data sets, see `tezo tasks`."""
    dir: str | None = None
    """Folder with a task's rows, TASK/train.jsonl and TASK/validation.jsonl; None: the hub."""
    dev: str | None = None
    """Rows that choose the checkpoint, evaluated during the run: a file, or a split of the hub data set."""
    test: str | None = None
    """Rows for the figures before and after: a file, or a split of the hub data set. None: the dev rows."""
    hold_out: float = 0.1
    """Share of the training rows used as dev rows where neither dev nor test is given."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    train_split: str = "train"
    """Split of a hub data set to train on."""
    shape: Literal["auto", "completion", "messages", "label"] = "auto"
    """What a row is; auto goes by the fields of the first."""
    text: str = "text"
    """Field of a labelled text."""
    label: str = "label"
    """Field of its label."""
    prompt: str = "prompt"
    """Field of a prompt."""
    completion: str = "completion"
    """Field of its completion."""
    messages: str = "messages"
    """Field of a conversation."""
    template: str | None = None
    """Of labelled rows: {field} stands for a field, {mask} for the mask of a masked model."""
    label_words: dict[str, str] | None = None
    """Label -> word, or description for an encoder; None: the labels found, as they are."""
    num_train: int | None = None
    """Training rows; None: all, of a task 1000."""
    num_dev: int | None = None
    """Dev rows; None: all that are given; of a task 500 (cb and copa 100), taken from the training rows."""
    num_test: int | None = None
    """Test rows, the same for every seed; None: all, of a task at most 1000."""
    per_class: int | None = None
    """Training rows of each label (k-shot), and of a task as many dev rows; None: num_train in all."""
    allow_fewer: bool = False
    """Take what there is where there are fewer rows than num_train or per_class says."""
    seed: int | None = None
    """Of the choice of rows; None: train.seed."""
    max_length: int | None = None
    """Longest input in tokens; None: the model's."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method and its options; the ones not named keep the defaults of `tezo.methods`."""

    name: str = "tezo-cadam"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Steps; one is two forward passes for each direction."""
    batch_size: int = 16
    """Rows a step. The paper: 16 for LLMs, 64 for RoBERTa."""
    objective: str = "loss"
    """What is minimised: the loss, or minus a metric of the evaluation such as accuracy, f1 or exact_match."""
    seed: int = 0
    """Of directions, data order and sampling."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, down to zero for linear and cosine. ZO papers keep it constant."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    eval_every: int | None = None
    """Steps between evaluations on the dev rows; None: ten a run; 0: none."""
    eval_batch_size: int = 64
    """Rows a batch in evaluation."""
    keep_best: bool = True
    """End with the parameters of the lowest dev loss rather than the last."""
    patience: int | None = None
    """Stop after so many evaluations without a lower dev loss; None: never."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    sync_every: int = 10
    """Steps between forced writes of steps.log to disk: a power cut loses at most so many; 0: the system decides."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: ten a run; 0: none."""
    keep_checkpoints: int = 2
    """The newest so many are kept until the run has ended."""
    parallel: Literal["rows", "directions"] = "rows"
    """What the processes that torchrun starts share out: the rows of each batch, or the directions of each step."""
    compare_every: int = 100
    """Steps between comparisons of the processes' parameters."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run."""

    model: ModelConfig
    data: DataConfig
    method: MethodConfig = field(default_factory=MethodConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


_SHORT = {"model": "name", "data": "train", "method": "name"}


def read_config(path: Path | None, settings: Sequence[tuple[str, Any]]) -> Config:
    """The configuration of a recipe file with settings laid over it.

    Args:
        path: YAML file; None starts from nothing.
        settings: (dotted key, value) pairs; later ones win.

    Raises:
        RequestError: no such file, an unknown key, a value of the wrong type or out of range.
    """
    tree = _read_yaml(path) if path is not None else {}
    return parse_config(overlay(tree, settings))


def overlay(tree: dict[str, Any], settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Nested mappings with (dotted key, value) pairs laid over them; later ones win."""
    for key, value in settings:
        _set(tree, key, value)
    return tree


def parse_config(tree: Mapping[str, Any]) -> Config:
    """A configuration from nested mappings."""
    _known_keys(tree, {"model", "data", "method", "train"}, "")
    sections = {key: _long(key, value) for key, value in tree.items()}
    if "name" not in sections.get("model", {}):
        raise RequestError("model.name is not set; give --model or a recipe that has it.")
    config = Config(
        model=_build(ModelConfig, sections["model"], "model"),
        data=_build(DataConfig, sections.get("data", {}), "data"),
        method=_method(sections.get("method", {})),
        train=_build(TrainConfig, sections.get("train", {}), "train"),
    )
    _check(config)
    return config


def to_tree(config: Config) -> dict[str, Any]:
    """Nested mappings that `parse_config` reads back to the same configuration."""
    tree = {section.name: dataclasses.asdict(getattr(config, section.name)) for section in dataclasses.fields(config)}
    tree["method"] = {"name": config.method.name, **config.method.options}
    return tree


def dump_config(config: Config) -> str:
    """The configuration as YAML."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


def parse_setting(text: str) -> tuple[str, str]:
    """("a.b", "value") of "a.b=value"."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RequestError(f"--set {text!r} is not key=value; write for example --set method.lr=1e-4.")
    return key, value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"there is no recipe {path}; check the path.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"{path} cannot be read as YAML ({' '.join(str(error).split())[:200]}).") from None
    if not isinstance(tree, dict):
        raise RequestError(f"{path} is not a recipe; it needs the sections model, data, method, train.")
    return tree


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, rest = key.partition(".")
    if not rest:
        tree[section] = {**_long(section, tree.get(section, {})), _SHORT.get(section, "name"): value}
        return
    parent: dict[str, Any] = _long(section, tree.get(section, {}))
    tree[section] = parent
    *middle, last = rest.split(".")
    for name in middle:
        if not isinstance(parent.get(name, {}), Mapping):
            raise RequestError(f"{key}: there is no such key, since {name} has a value of its own.")
        parent[name] = dict(parent.get(name, {}))
        parent = parent[name]
    parent[last] = value


def _long(section: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str) and section in _SHORT:
        return {_SHORT[section]: value}
    if not isinstance(value, Mapping):
        raise RequestError(f"{section} is {value!r}; it must be a section of key: value lines.")
    return dict(value)


def _known_keys(tree: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for key in tree:
        if key not in known:
            raise RequestError(f"{prefix}{key}: there is no such key. {nearest(str(key), sorted(known))}")


def _build(cls: type[Any], tree: Mapping[str, Any], section: str) -> Any:
    hints = get_type_hints(cls)
    _known_keys(tree, set(hints), f"{section}.")
    return cls(**{key: coerce(f"{section}.{key}", value, hints[key]) for key, value in tree.items()})


def _method(tree: Mapping[str, Any]) -> MethodConfig:
    name = str(tree.get("name", MethodConfig().name))
    types_of = method(name).options()
    options = {key: value for key, value in tree.items() if key != "name"}
    for key in options:
        if key not in types_of:
            raise RequestError(f"method.{key}: {name} has no such option. {nearest(str(key), types_of)}")
    return MethodConfig(name=name, options={k: coerce(f"method.{k}", v, types_of[k]) for k, v in options.items()})


def _check(config: Config) -> None:
    train, data = config.train, config.data
    for key, value, least in (
        ("model.lora_rank", config.model.lora_rank, 1),
        ("model.lora_alpha", config.model.lora_alpha, 1),
        ("model.prefix_length", config.model.prefix_length, 1),
        ("train.steps", train.steps, 1),
        ("train.batch_size", train.batch_size, 1),
        ("train.eval_batch_size", train.eval_batch_size, 1),
        ("train.log_every", train.log_every, 1),
        ("train.warmup_steps", train.warmup_steps, 0),
        ("train.eval_every", train.eval_every, 0),
        ("train.patience", train.patience, 1),
        ("train.sync_every", train.sync_every, 0),
        ("train.checkpoint_every", train.checkpoint_every, 0),
        ("train.keep_checkpoints", train.keep_checkpoints, 1),
        ("train.compare_every", train.compare_every, 1),
        ("data.num_train", data.num_train, 1),
        ("data.num_dev", data.num_dev, 1),
        ("data.num_test", data.num_test, 1),
        ("data.per_class", data.per_class, 1),
        ("data.max_length", data.max_length, 4),
    ):
        if value is not None and value < least:
            raise RequestError(f"{key} is {value}; it must be at least {least}.")
    if data.train is None and data.task is None:
        raise RequestError("data.train is not set; give --data, or --task for one of `tezo tasks`.")
    if not 0 < data.hold_out < 1:
        raise RequestError(f"data.hold_out is {data.hold_out}; it must lie between 0 and 1.")
