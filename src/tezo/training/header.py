"""The header of a run's step log, and whether a run that goes on, or has ended, is the one that is asked for."""

import json
from collections.abc import Mapping
from typing import Any

from tezo.directions.random import NOISE_VERSION
from tezo.models.identity import check_model
from tezo.models.local_names import is_gone
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.methods import AUTO, method
from tezo.runs.environment import versions
from tezo.runs.files import check_complete, check_place, check_rows, check_settings, hash_of
from tezo.system.errors import RequestError
from tezo.tasks.objectives.objective import Encoded
from tezo.training.config import PATHS, absolute_setting, to_tree
from tezo.training.job import Job
from tezo.training.recipe import Config
from tezo.training.resolution import RESOLVED_AT_START

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "train.compare_every",
        "train.sync_every",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "model.device",
        "model.placement",
        "model.trust_remote_code",
        "train.reward",
    }
)
"""Settings that may change between the parts of a run: they don't change what it computes on one device."""


def log_header(job: Job) -> dict[str, Any]:
    """JSON for the head of a step log: with the base model, all that its steps are taken again from."""
    reward = {} if job.reward is None else {"reward": job.reward.digest}
    return {
        **reward,
        "directions": job.optimizer.num_directions,
        "kinds": list(job.optimizer.rules),
        "config": json.loads(json.dumps(to_tree(job.config))),  # tuples become lists, as JSON has them
        "untrained": list(job.untrained),
        "model": dict(job.loaded.fingerprint),
        "rows": hash_of([row.sequences for row in job.train]),
        "answers": hash_of([_answer(row) for row in job.train]),
        "held_rows": hash_of([(row.sequences, _answer(row)) for part in (job.dev, job.test) for row in part]),
        "device": job.loaded.device.type,
        "noise": NOISE_VERSION,
        "versions": versions(("tezo", "torch")),
    }


def _answer(row: Encoded) -> tuple[Any, ...]:
    example = row.example
    answer = example.answer, example.options, example.label, example.right, example.references
    return (*answer, tuple(sorted(example.fields.items()))) if example.fields else answer


def check_same(found: Mapping[str, Any], own: Mapping[str, Any], optimizer: BaseOptimizer) -> list[str]:
    """What the user should know before a run goes on; an error where it would be another run.

    Args:
        found: header of the run's log.
        own: header of the run that is asked for.
        optimizer: of the run that is asked for.
    """
    check_complete(found)
    before, now = _flat(found["config"]), _flat(own["config"])
    for key in PATHS:  # one that is gone was moved: weights and rows are compared themselves
        if is_gone(str(before.get(key))):
            now[key] = before[key]
    check_settings(before, now)
    check_rows(found, own)
    if found.get("reward") != own.get("reward"):
        raise RequestError("train.reward: the scorer is not the one that the run began with; restore it.")
    check_model(found["model"], own["model"])
    return check_place(found, own, optimizer.drawn_on_the_device)


def with_choices_of(begun: Mapping[str, Any], asked: Config) -> Config:
    """The configuration with what a run that has begun measured for itself, so that it need not be measured again.

    Args:
        begun: header of the run's log.
        asked: configuration of the run that is to go on.
    """
    before = begun.get("config", {}).get("method", {})
    chosen = method(asked.method.name)
    if before.get("name") != asked.method.name:
        return asked  # another run, which `check_same` will refuse
    open_ = [name for name in chosen.chosen if asked.method.options.get(name, AUTO) == AUTO]
    return asked.with_options(**{name: before[name] for name in open_ if isinstance(before.get(name), float)})


def check_unchanged(ended: Config, asked: Config) -> None:
    """An error where a run that has ended, with its settings resolved, is not the one that is asked for."""
    before, now = _flat(to_tree(ended)), _flat(to_tree(asked))
    resolved = {key: before.get(key) for key, left_open in RESOLVED_AT_START.items() if now.get(key) == left_open}
    check_settings(before, now | resolved)


def request_of(config: Config) -> dict[str, Any]:
    """All settings by dotted key, which ranks that share a run must have in common, but for their device."""
    return {key: value for key, value in _settings(to_tree(config)).items() if key != "model.device"}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, paths in full, but for those that may change."""
    settings = {key: value for key, value in _settings(tree).items() if key not in MAY_CHANGE_ON_RESUME}
    return settings | {key: absolute_setting(key, settings[key]) for key in PATHS if key in settings}


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, those of the method that are not given at their defaults; lists, as JSON has them."""
    options = method(tree["method"]["name"]).defaults()
    tree = json.loads(json.dumps({**tree, "method": {**options, **tree["method"]}}))
    return {f"{section}.{key}": value for section, values in tree.items() for key, value in dict(values).items()}
