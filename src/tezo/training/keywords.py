"""Settings as keyword arguments: `lr=1e-4` for method.lr, `steps=200` for train.steps."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from tezo.directions.bases.basis import Basis
from tezo.methods import BASELINES, METHODS, Method
from tezo.models.kinds import ModelConfig
from tezo.system.errors import RequestError, nearest
from tezo.tasks.row_files import DataConfig
from tezo.training.recipe import TrainConfig


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
    rank: int | None
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
    reward_seconds: float
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
    elsewhere = [own for own in keys_by_name().get(name, []) if own != key]
    return f"Did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(name, known)


def _own_name(name: str, known: Iterable[str]) -> str:
    """Returns the name here of what transformers calls `name`: the longest that ends it; else `name` itself."""
    ends = [own for own in known if name.endswith(f"_{own}")]
    return OF_TRANSFORMERS.get(name) or max(ends, key=len, default=name)


def dotted_settings(named: Mapping[str, Any], dotted: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns (dotted key, value) pairs of both ways to give settings.

    Args:
        named: by the names of `Options`.
        dotted: by dotted keys.

    Raises:
        RequestError: a name is unknown, a key is given twice, or has a parameter of its own.
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
