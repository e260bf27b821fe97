"""What a run is of: enough of model, rows and settings to refuse to go on with others."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tezo.errors import RequestError
from tezo.models.model_config import ModelConfig
from tezo.optim.methods import AUTO, Tuner
from tezo.runs.environment import versions
from tezo.tasks.data_config import DataConfig
from tezo.tasks.objectives import Encoded
from tezo.training.config import to_tree, without_removed
from tezo.training.job import Job
from tezo.training.recipe import Config

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "train.compare_every",
        "train.sync_every",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "model.device",
        "model.placement",
    }
)
"""Settings that may change while a run is under way: they don't change what it computes on one device."""

RESOLVED_AT_START = {
    "data.shape": "auto",
    "data.template": None,
    "data.label_words": None,
    "method.lr": AUTO,
    "train.feedback_first": None,
    "train.feedback_last": None,
}
"""What a run settles by itself, and how it is left open."""

LEGACY_DEFAULTS = {"train.feedback_first": 0, "train.feedback_last": 0}
"""Settings whose default is not what was done before there were any, and what that was."""


def log_header(job: Job) -> dict[str, Any]:
    """JSON for the head of a step log: with the base model, all that its steps are taken again from."""
    return {
        "directions": job.optimizer.num_directions,
        "config": json.loads(json.dumps(to_tree(job.config))),  # as it reads back: lists, not tuples
        "untrained": list(job.untrained),
        "model": job.loaded.fingerprint,
        "rows": _hash([row.sequences for row in job.train]),
        "answers": _hash([_answer(row) for row in job.train]),
        "held_rows": _hash([(row.sequences, _answer(row)) for part in (job.dev, job.test) for row in part]),
        "device": job.loaded.device.type,
        "versions": versions(("tezo", "torch")),
    }


_KEYS = {
    "directions": int,
    "config": dict,
    "untrained": list,
    "model": str,
    "rows": str,
    "device": str,
    "versions": dict,
}


def check_complete(header: Mapping[str, Any]) -> None:
    """An error where a log's header has not all that `log_header` writes."""
    if not all(isinstance(header.get(key), kind) for key, kind in _KEYS.items()):
        raise RequestError("steps.log: its header is not that of a run; give the folder of a run.")


def _answer(row: Encoded) -> tuple[Any, ...]:
    example = row.example
    return example.answer, example.options, example.label, example.right, example.references


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def check_same(found: Mapping[str, Any], own: Mapping[str, Any], optimizer: Tuner) -> list[str]:
    """What the user should know before a run goes on; an error where it would be another run.

    Args:
        found: header of the run's log.
        own: header of what is to go on.
        optimizer: of what is to go on.
    """
    check_complete(found)
    _check_settings(_defaults() | _flat(without_removed(found["config"])), _flat(own["config"]))
    parts = {"rows": "training rows", "answers": "answers of its training rows", "held_rows": "dev and test rows"}
    for key, what in parts.items():
        if found.get(key, own[key]) != own[key]:  # a run of an earlier version has but the first
            raise RequestError(f"data: the {what} are not those that the run began with; put them back.")
    check_model(found, own["model"])
    return check_place(found, own, optimizer)


def check_unchanged(ended: Config, asked: Config) -> None:
    """An error where a run that has ended, with its settings resolved, is not the one that is asked for."""
    before, now = _flat(to_tree(ended)), _flat(to_tree(asked))
    settled = {key: before.get(key) for key, left_open in RESOLVED_AT_START.items() if now.get(key) == left_open}
    _check_settings(before, now | settled)


def _check_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise RequestError(
                f"{key} is {now.get(key)!r}, and the run began with {before.get(key)!r}; give what it began with, "
                "or another --output."
            )


def _defaults() -> dict[str, Any]:
    """What a setting was before there was one: its default, but where `LEGACY_DEFAULTS` says."""
    return _flat(to_tree(Config(model=ModelConfig(name=""), data=DataConfig()))) | LEGACY_DEFAULTS


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat = {f"{section}.{key}": value for section, values in tree.items() for key, value in dict(values).items()}
    return {key: value for key, value in flat.items() if key not in MAY_CHANGE_ON_RESUME}


def check_model(found: Mapping[str, Any], own: str) -> None:
    """An error where the weights are not those that the run began with."""
    if found["model"] != own:
        raise RequestError("model.name: its weights are not those that the run began with; put them back.")


def check_place(found: Mapping[str, Any], own: Mapping[str, Any], optimizer: Tuner) -> list[str]:
    """The same for device and versions: an error where steps cannot be taken again on this device."""
    notices = []
    if found["device"] != own["device"]:
        name = optimizer.drawn_on_the_device()
        if name is not None:
            raise RequestError(
                f"model.device is {own['device']}, and the run drew noise for {name} on {found['device']}, which no "
                f"other device draws; set model.device={found['device']}."
            )
        notices.append(f"the run began on {found['device']}: on {own['device']} steps may differ in rounding.")
    for package, version in own["versions"].items():
        if found["versions"].get(package) != version:
            then = found["versions"].get(package)
            notices.append(f"the run began with {package} {then}: with {version} steps may differ in rounding.")
    return notices
