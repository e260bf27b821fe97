"""Settings of a run: their names and types, read from files, flags and Python, checked, and written."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

import yaml

from tezo.directions.bases.basis import Basis
from tezo.methods import AUTO, BASELINES, METHODS, Method, options_by
from tezo.models.kinds import ModelConfig, engine_kind
from tezo.models.local_names import absolute_name
from tezo.runs.files import check_manifest
from tezo.system.errors import RequestError, nearest
from tezo.system.files import MOST_YAML, UntrustedError, parse_yaml, read_bytes
from tezo.system.values import coerce
from tezo.tasks.row_files import DataConfig
from tezo.tasks.scoring import REWARD as REWARD

LOSS = "loss"
"""The objective that batches have of themselves; any other is a metric."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method and the options that are set; the other options keep the defaults of `tezo.methods`.

    "auto" is the method that a run of these rows has by default; see `tezo.training.choices.choose_method`. Beside it
    stands any option of a zeroth-order method; one that the default does not have is refused when it is chosen.
    """

    name: str = AUTO
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The section `train`: settings of the training loop."""

    steps: int | None = None
    """Number of steps. Default: 20 epochs, at least 200 and at most 1000; gauss-newton has 6 rounds, 3 of free text
    and 1 where labelled rows are few and none of them are dev rows; es 30 steps, policy-gradient 7."""
    epochs: float | None = None
    """Passes over the training rows, instead of steps."""
    feedback_first: int | None = None
    """Feedback steps at the start. Default: 15 for head-feedback if the objective is the loss, at most 5 %; else 0."""
    feedback_last: int | None = None
    """Feedback steps at the end. Default: 60 in the same case, at most 20 %. Below 100 steps both default to 0."""
    batch_size: int | None = None
    """Rows per step, each at most once. Default: 16, the paper's for LLMs; 128 for gauss-newton (32 for free text) and
    probe, 64 for policy-gradient."""
    objective: str = LOSS
    """What is minimised: the loss, or the negative of the reward or a metric such as accuracy, f1 or exact_match."""
    reward: str | None = None
    """Scorer of completions that is maximised, FILE.py:FUNCTION; train.objective is then reward. Default: none."""
    max_new_tokens: int = 64
    """Longest completion that a reward scores, in tokens; each takes a forward pass."""
    temperature: float = 0.0
    """Temperature that a reward's completions are sampled at, with the same random numbers at both points of a step;
    0: greedy."""
    reward_workers: int = 0
    """Processes in which the scorer of a file is called; 0: it is called in the process of the run, and with
    train.serve in 16."""
    reward_seconds: float | None = None
    """Limit of the time for a score in such a process; what takes longer is missing. Default: 60, or 600 with
    train.serve."""
    serve: bool = False
    """Whether the scorer asks the model itself, by its name on an OpenAI-compatible server; see docs/rewards.md."""
    serve_port: int = 0
    """Port of 127.0.0.1 where tezo answers; 0: any that is free. With a vLLM server, only policy-gradient opens it."""
    seed: int = 0
    """Seed of directions, data order and sampling."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning-rate schedule; linear and cosine decay to zero. Default: constant, as papers have; linear for es
    and policy-gradient."""
    eval_every: int | None = None
    """Steps between evaluations on the dev rows; 0: none. Default: a tenth of the steps."""
    eval_batch_size: int = 64
    """Rows per batch in evaluation."""
    keep_best: bool = True
    """Keep the parameters with the lowest dev loss instead of the last ones."""
    guard: bool | None = None
    """Return to the best state when the loss has risen or stagnates, or feedback steps at the start raised it. Default:
    true for head-feedback, es, policy-gradient, and, unless rows are too few to hold some out, gauss-newton and probe;
    else false."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl. Methods with measurements beside the loss write a line at each step."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; 0: none. Default: a tenth of the steps."""
    parallel: Literal["rows", "directions"] = "rows"
    """What is divided among the processes that torchrun starts: the rows of a batch, or the directions of a step."""

    @property
    def minimises_loss(self) -> bool:
        """Whether the objective is the loss rather than a metric, which has no gradient."""
        return self.objective == LOSS

    @property
    def chooses_by_dev_rows(self) -> bool:
        """Whether dev rows measure what steps minimise, so that a guard can go by them: a loss, or a reward."""
        return self.objective in (LOSS, REWARD)

    @property
    def most_rows(self) -> int:
        """Rows of a forward pass, at most: the batch of a step may be many times as large as that of an evaluation."""
        return max(self.eval_batch_size, 64)

    @property
    def num_steps(self) -> int:
        """`steps` of a run whose settings are resolved."""
        assert self.steps is not None
        return self.steps

    @property
    def rows_per_step(self) -> int:
        """`batch_size` of a run whose settings are resolved."""
        assert self.batch_size is not None
        return self.batch_size


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run: the four sections of a recipe."""

    model: ModelConfig
    data: DataConfig
    method: MethodConfig = field(default_factory=MethodConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def with_options(self, **options: object) -> "Config":
        """The configuration with these options of the method."""
        return replace(self, method=replace(self.method, options={**self.method.options, **options}))

    def with_setting(self, key: str, value: Any) -> "Config":
        """The configuration with another value of a setting, by its dotted key."""
        section, _, name = key.partition(".")
        if section == "method" and name != "name":
            return self.with_options(**{name: value})
        changed: Any = {section: replace(getattr(self, section), **{name: value})}
        return replace(self, **changed)


def recipe_folder() -> Path:
    """The folder of the recipes, NAME.yaml for each method."""
    return Path(str(files("tezo.training"))) / "recipes"


def recipe_names() -> list[str]:
    """Names of all recipes, such as "lozo"."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def find_recipe(given: Path) -> Path:
    """The file that the user gives, or the recipe of the library with that name (with or without .yaml).

    Raises:
        RequestError: there is neither.
    """
    if given.exists():
        return given
    name, names = given.as_posix().removesuffix(".yaml"), recipe_names()
    if name in names:
        return recipe_folder() / f"{name}.yaml"
    raise RequestError(
        f"there is no recipe {given}, neither a file nor one that comes with tezo. {nearest(name, names)}"
    )


_SHORT = {"model": "name", "data": "train", "method": "name"}

ONLY_FROM_THE_USER = frozenset({"model.trust_remote_code", "train.reward"})
"""Settings that count from the command line, Python and a recipe that the user names, never from a run folder.

A run folder may come from a stranger, and these let code run: that of a model, and that of a scorer.
"""


PATHS = ("model.name", "data.train", "data.dev", "data.test", "data.dir", "train.reward")
"""Settings that may be a path; of a hub data set or a task dev and test rows are splits of it."""


def read_config(path: Path | None, settings: Sequence[tuple[str, Any]]) -> Config:
    """Reads a recipe file and applies settings to it.

    Args:
        path: YAML file; None: an empty recipe.
        settings: (dotted key, value) pairs; later pairs override earlier ones and the file.

    Raises:
        RequestError: no such file, an unknown key, a value of the wrong type or out of range.
    """
    tree = _read_yaml(path) if path is not None else {}
    return parse_config(overlay(tree, settings))


def read_run_config(path: Path, settings: Sequence[tuple[str, Any]]) -> Config:
    """Reads the config.yaml of a run folder, which may come from a stranger, and applies settings to it.

    Args:
        path: the file.
        settings: (dotted key, value) pairs of the user's.

    Raises:
        RequestError: as `read_config`, or the file is not the one that the run wrote.
    """
    check_manifest(path.parent, [path.name])
    try:
        data = read_bytes(path, MOST_YAML)
    except UntrustedError as error:
        raise RequestError(f"{path.parent}: {error}; put an intact copy of that file in its place.") from None
    tree = untrusted_tree(_tree_of(path, data))
    engine = dict(settings).get("model.engine")
    if engine not in (None, tree.get("model", {}).get("engine")):  # each has its way to choose one
        tree.get("model", {}).pop("dtype", None)
    return parse_config(overlay(tree, settings))


def untrusted_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that a run folder has, without the keys of `ONLY_FROM_THE_USER`."""
    sections = {section: _long(section, values) for section, values in tree.items()}
    for key in ONLY_FROM_THE_USER:
        section, _, name = key.partition(".")
        sections.get(section, {}).pop(name, None)
    model = sections.get("model", {})
    if isinstance(model.get("engine"), str):  # a stranger's folder does not say where a key is sent
        model["engine"] = engine_kind(model["engine"])
    return sections


def overlay(tree: dict[str, Any], settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Sets (dotted key, value) pairs in the nested mappings `tree`, in order, and returns it."""
    for key, value in settings:
        _set(tree, key, value)
    return tree


def parse_config(tree: Mapping[str, Any]) -> Config:
    """The configuration that nested mappings describe; `RequestError` if a key or value is wrong."""
    _known_keys(tree, {"model", "data", "method", "train"}, "")
    sections = {key: _long(key, value) for key, value in tree.items()}
    if "name" not in sections.get("model", {}):
        raise RequestError("model.name is not set; give --model or a recipe that has it.")
    config = Config(
        model=_build(ModelConfig, sections["model"], "model"),
        data=_build(DataConfig, sections.get("data", {}), "data"),
        method=_method(sections.get("method", {})),
        train=_with_reward(_build(TrainConfig, sections.get("train", {}), "train")),
    )
    _check(config)
    _check_lr(config)
    return config


def _with_reward(train: TrainConfig) -> TrainConfig:
    """The settings with the objective that a scorer implies."""
    if train.reward is None:
        return train
    if train.objective not in (LOSS, REWARD):
        raise RequestError(
            f"train.reward is {train.reward}, and train.objective is {train.objective}; leave one of them out."
        )
    return dataclasses.replace(train, objective=REWARD)


def to_tree(config: Config) -> dict[str, Any]:
    """The configuration as nested mappings, the inverse of `parse_config`."""
    tree = {section.name: dataclasses.asdict(getattr(config, section.name)) for section in dataclasses.fields(config)}
    given = config.method.options
    tree["method"] = {"name": config.method.name, **{name: given[name] for name in _ordered(config.method.name, given)}}
    return tree


def _ordered(name: str, options: Mapping[str, Any]) -> list[str]:
    """The options in the order of the method's: what a run chose may have been given or read from its log."""
    places = {option: place for place, option in enumerate(options_by(name))}
    return sorted(options, key=lambda option: places.get(option, len(places)))


def with_absolute_paths(config: Config) -> Config:
    """The configuration with the whole path of each file and folder here, so that it means the same elsewhere."""
    sections: dict[str, dict[str, Any]] = {}
    for key in PATHS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        is_split = config.data.task is not None and key in ("data.dev", "data.test")
        if value is not None and not is_split:
            sections.setdefault(section, {})[name] = absolute_setting(key, value)
    changed: Any = {section: dataclasses.replace(getattr(config, section), **new) for section, new in sections.items()}
    return dataclasses.replace(config, **changed)


def absolute_setting(key: str, value: Any) -> Any:
    """The value of one of `PATHS` with its whole path, where it is a path here; other values as they are."""
    if not isinstance(value, str):
        return value
    if key != "train.reward":
        return absolute_name(value)
    file, colon, function = value.rpartition(":")
    return f"{absolute_name(file)}{colon}{function}"


def dump_config(config: Config) -> str:
    """The configuration as YAML."""
    tree = to_tree(config)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    # YAML reads an unescaped \x85 as a line break
    return yaml.safe_dump(tree, sort_keys=False) if "\x85" in text else text


def parse_setting(text: str) -> tuple[str, str]:
    """Splits "a.b=value" at the first "=" into ("a.b", "value")."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RequestError(f"--set {text!r} is not key=value; write for example --set method.lr=1e-4.")
    return key, value


def check_settings_agree(settings: Sequence[tuple[str, Any]]) -> None:
    """Raises a `RequestError` where a key, in its short form or its long one, is given two values."""
    values: dict[str, Any] = {}
    for given, value in settings:
        key = f"{given}.{_SHORT[given]}" if given in _SHORT else given
        first = values.setdefault(key, value)
        if str(first) != str(value):
            raise RequestError(f"{key} is given twice, as {first} and as {value}; leave one of them out.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RequestError(f"there is no recipe {path}; check the path.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give another file.") from None
    return _tree_of(path, data)


def _tree_of(path: Path, data: bytes) -> dict[str, Any]:
    try:
        tree = parse_yaml(data)
    except UntrustedError as error:
        raise RequestError(
            f"{path} {error}; correct that file (what begins with ! needs quotes: [all, '!lm_head'])."
        ) from None
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
            raise RequestError(f"{key}: there is no such key, because {name} is a value, not a section.")
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
            raise RequestError(f"{prefix}{key}: there is no such key. {suggestion(prefix + str(key), sorted(known))}")


def _build(cls: type[Any], tree: Mapping[str, Any], section: str) -> Any:
    hints = get_type_hints(cls)
    _known_keys(tree, set(hints), f"{section}.")
    return cls(**{key: coerce(f"{section}.{key}", value, hints[key]) for key, value in tree.items()})


def _method(tree: Mapping[str, Any]) -> MethodConfig:
    name = str(tree.get("name", MethodConfig().name))
    types_of = options_by(name)
    options = {key: value for key, value in tree.items() if key != "name"}
    for key in options:
        if key not in types_of:
            who = "no method has such an option" if name == AUTO else f"{name} has no such option"
            raise RequestError(f"method.{key}: {who}. {suggestion(f'method.{key}', types_of)}")
    return MethodConfig(name=name, options={k: coerce(f"method.{k}", v, types_of[k]) for k, v in options.items()})


_LEAST = {
    "model.workers": 0,
    "model.lora_rank": 1,
    "model.lora_alpha": 1,
    "model.prefix_length": 1,
    "train.steps": 1,
    "train.batch_size": 1,
    "train.max_new_tokens": 1,
    "train.temperature": 0,
    "train.reward_workers": 0,
    "train.serve_port": 0,
    "train.eval_batch_size": 1,
    "train.log_every": 1,
    "train.feedback_first": 0,
    "train.feedback_last": 0,
    "train.eval_every": 0,
    "train.seed": 0,
    "data.seed": 0,
    "train.checkpoint_every": 0,
    "data.num_train": 1,
    "data.num_dev": 1,
    "data.num_test": 1,
    "data.per_class": 1,
    "data.max_length": 4,
}
"""Settings -> the smallest value; None is allowed where it is the default. Seeds are below 2^63, others below 2^31."""


_OF_ADAPTERS = {"lora_rank": ("lora",), "lora_alpha": ("lora",), "prefix_length": ("prefix", "prompt")}
"""Settings of section model -> the adapters that have them."""


def _check(config: Config) -> None:
    for key, least in _LEAST.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not value >= least:  # NaN is not
            raise RequestError(f"{key} is {value}; it must be at least {least}.")
        bits = 63 if name == "seed" else 31
        if value is not None and value >= 2**bits:
            raise RequestError(f"{key} is {value}; it must be below 2^{bits}.")
    model, train, data = config.model, config.train, config.data
    for name, adapters in _OF_ADAPTERS.items():
        value = getattr(model, name)
        if model.peft not in adapters and value != getattr(ModelConfig, name):
            raise RequestError(
                f"model.{name} is {value}, and model.peft is {model.peft}; set model.peft={' or '.join(adapters)}, or "
                f"leave {name} out."
            )
    if train.epochs is not None and not 0 < train.epochs < math.inf:
        raise RequestError(f"train.epochs is {train.epochs}; it must be positive and finite.")
    if train.reward_seconds is not None and not train.reward_seconds > 0:
        raise RequestError(f"train.reward_seconds is {train.reward_seconds:g}; it must be positive.")
    if data.train is None and data.task is None:
        raise RequestError("data.train is not set; give --data, or --task for one of `tezo tasks`.")
    if data.per_class is not None and data.num_train is not None:
        raise RequestError("data.per_class and data.num_train both set the training rows; leave one of them out.")
    if data.hold_out is not None and not 0 <= data.hold_out < 1:
        raise RequestError(f"data.hold_out is {data.hold_out}; it must be at least 0 and below 1.")


def _check_lr(config: Config) -> None:
    lr, objective = config.method.options.get("lr"), config.train.objective
    if lr != AUTO:
        return
    if objective != TrainConfig().objective:
        raise RequestError(
            f"method.lr is auto, which needs train.objective loss, not {objective}; set method.lr to a number."
        )


class Options(TypedDict, total=False):
    """The settings that `tezo.train` takes by the last part of their keys; docs/settings.md says what each means."""

    # section model
    engine: str
    workers: int
    kind: Literal["auto", "causal", "masked", "encoder", "classifier"]
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"]
    device: str
    quantization: Literal["none", "nf4", "int8", "int8wo"]
    placement: Literal["device", "spread", "cpu", "disk", "shards"]
    trust_remote_code: bool
    untie_head: bool
    peft: Literal["none", "lora", "prefix", "prompt"]
    lora_rank: int
    lora_alpha: int
    prefix_length: int
    # section data
    task: str | None
    dir: str | None
    hold_out: float | None
    subset: str | None
    train_split: str
    streaming: bool
    shape: Literal["auto", "completion", "messages", "instruction", "label", "text"]
    text: str
    label: str
    prompt: str
    completion: str
    messages: str
    template: str | None
    label_words: dict[str, str] | None
    num_train: int | None
    num_dev: int | None
    num_test: int | None
    per_class: int | None
    allow_fewer: bool
    max_length: int | None
    # section method
    lr: float | Literal["auto"]
    rho: float | Literal["auto"]
    directions: Literal["auto", "shared", "per-example"]
    antithetic: bool
    num_directions: int
    targets: Sequence[str]
    rank: int | Literal["auto"] | None
    rank_rule: Literal["ratio", "energy"]
    rank_threshold: float
    max_rank: int
    basis: str | Basis
    lazy_update_interval: int | None
    scale: Literal["unit", "raw"]
    betas: tuple[float, float]
    beta: float
    eps: float
    weight_decay: float
    feedback_scale: float
    frozen_rank: int | None
    in_forward: bool
    sparsity: float
    anneal_start: int
    anneal_stop: int
    master_weights: bool
    # section train
    seed: int
    steps: int | None
    epochs: float | None
    feedback_first: int | None
    feedback_last: int | None
    batch_size: int | None
    reward_workers: int
    reward_seconds: float | None
    serve: bool
    serve_port: int
    objective: str
    max_new_tokens: int
    temperature: float
    schedule: Literal["constant", "linear", "cosine"] | None
    eval_every: int | None
    eval_batch_size: int
    keep_best: bool
    guard: bool | None
    log_every: int
    checkpoint_every: int | None
    parallel: Literal["rows", "directions"]


PARAMETERS = {
    "model.name": "model",
    "data.train": "data",
    "data.dev": "dev",
    "data.test": "test",
    "method.name": "method",
    "train.reward": "reward",
}
"""Keys that `tezo.train` has a parameter for, which takes objects too."""

PREFERRED = {"seed": "train.seed"}
"""What a name means that two sections have: data.seed follows train.seed unless it is set."""


OF_TRANSFORMERS = {
    "learning_rate": "lr",
    "logging_steps": "log_every",
    "eval_steps": "eval_every",
    "save_steps": "checkpoint_every",
}
"""Names of transformers' training arguments -> the names here, where these are not the end of those."""


def keys_by_name() -> dict[str, list[str]]:
    """Name -> the dotted keys that end in it, of all sections and of the options of all methods."""
    sections = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
    keys = [f"{section}.{field.name}" for section, cls in sections.items() for field in dataclasses.fields(cls)]
    methods: list[Method[Any]] = [*METHODS.values(), *BASELINES.values()]
    options = {"name", *(name for method in methods for name in method.options())}
    found: dict[str, list[str]] = {}
    for key in [*keys, *(f"method.{name}" for name in sorted(options))]:
        found.setdefault(key.partition(".")[2], []).append(key)
    return found


def suggestion(key: str, known: Iterable[str]) -> str:
    """Says what may be meant by an unknown key: the keys of other sections that end in its name, else the nearest name.

    Args:
        key: as it was given.
        known: names that are known in its place.
    """
    name = _own_name(key.rpartition(".")[2], known)
    elsewhere = [other for other in keys_by_name().get(name, []) if other != key]
    return f"Did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(name, known)


def _own_name(name: str, known: Iterable[str]) -> str:
    """Returns the name here of what transformers calls `name`: the longest that ends it; else `name` itself."""
    ends = [one for one in known if name.endswith(f"_{one}")]
    return OF_TRANSFORMERS.get(name) or max(ends, key=len, default=name)


def dotted_settings(named: Mapping[str, Any], dotted: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns (dotted key, value) pairs of both ways to give settings.

    Args:
        named: by the names of `Options`.
        dotted: by dotted keys.

    Raises:
        RequestError: a name is unknown, a key is given twice, or there is a parameter for it.
    """
    known = keys_by_name()
    pairs = []
    for name, value in named.items():
        if name not in Options.__annotations__:
            names = [*Options.__annotations__, *PARAMETERS.values()]
            raise RequestError(f"{name}: there is no such setting. {nearest(_own_name(name, names), names)}")
        pairs.append((PREFERRED.get(name, known[name][0]), value))
    for key, value in dotted.items():
        if not isinstance(key, str):
            raise RequestError(f"settings: {key!r} is no name of a setting; give names such as 'data.seed'.")
        if key in PARAMETERS:
            raise RequestError(f"settings: {key} is the parameter {PARAMETERS[key]}; give it by that.")
        if isinstance(value, Mapping) and key in ("model", "data", "method", "train"):
            first = next(iter(value), "...")
            raise RequestError(f"settings: {key} is a section; write its settings as {{'{key}.{first}': ...}}.")
        if "." not in key:
            raise RequestError(f"settings: {key} has no section; give it by its name, {key}=..., or by a dotted key.")
        if key in dict(pairs):
            raise RequestError(f"settings: {key} is given by its name too; leave one of them out.")
        pairs.append((key, value))
    return pairs
