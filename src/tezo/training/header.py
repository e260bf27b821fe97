"""The header of a run's step log, and whether a run that goes on, or has ended, is the one that is asked for."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tezo.directions.random import NOISE_VERSION
from tezo.models.identity import check_model
from tezo.models.kinds import engine_kind
from tezo.models.loading import DTYPES, LoadedModel
from tezo.models.local_names import is_gone
from tezo.optim.base_optimizer import SOURCES, BaseOptimizer, Setting, Settings
from tezo.optim.methods import AUTO, method
from tezo.runs.environment import versions
from tezo.runs.files import check_complete, check_place, check_rows, check_settings
from tezo.system.digests import hash_of
from tezo.system.errors import RequestError
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.scoring import Score, scorer_digest
from tezo.tasks.splits import Splits
from tezo.training.config import PATHS, absolute_setting, to_tree
from tezo.training.job import Job
from tezo.training.recipe import Config
from tezo.training.resolution import RESOLVED_AT_START

MAY_CHANGE_ON_RESUME = (
    "train.checkpoint_every",
    "model.device",
    "model.placement",
    "model.workers",
    "model.trust_remote_code",
    "train.reward",
)
"""Settings that may change between the parts of a run: they don't change what it computes on one device."""


BACK = "put it back, or give another output"


def log_header(job: Job) -> dict[str, Any]:
    """Returns JSON for the head of a step log: with the base model, all that its steps are taken again from."""
    reward = {} if job.reward is None else {"reward": job.reward.digest}
    return {
        **reward,
        "directions": job.optimizer.num_directions,
        "kinds": list(job.optimizer.rules),
        "config": json.loads(json.dumps(to_tree(job.config))),  # tuples become lists, as JSON has them
        "sources": {name: setting.source for name, setting in job.optimizer.settings.items()},
        "untrained": list(job.untrained),
        "model": dict(job.loaded.fingerprint),
        "rows": hash_of([row.sequences for row in job.train]),
        "answers": hash_of([_answer(row) for row in job.train]),
        "held_rows": hash_of([(row.sequences, _answer(row)) for part in (job.dev, job.test) for row in part]),
        "stepped_rows": len(job.stepped),
        "read_rows": job.read_rows,
        "reported_rows": job.reported_rows,
        "device": job.loaded.device.type,
        "noise": NOISE_VERSION,
        "versions": versions(("tezo", "torch")),
    }


def _answer(row: Encoded) -> tuple[Any, ...]:
    example = row.example
    answer = example.answer, example.options, example.label, example.right, example.references
    return (*answer, tuple(sorted(example.fields.items()))) if example.fields else answer


def check_same(found: Mapping[str, Any], own: Mapping[str, Any], optimizer: BaseOptimizer) -> list[str]:
    """Returns what the user should know before a run goes on.

    Args:
        found: header of the run's log.
        own: header of the run that is asked for.
        optimizer: of the run that is asked for.

    Raises:
        RequestError: it is another run that is asked for.
    """
    check_complete(found)
    before, now = _fixed(found["config"]), _fixed(own["config"])
    if before.get("model.dtype") == "auto":  # of an earlier version, which left it open
        before["model.dtype"] = now["model.dtype"]
    check_settings(before, _with_moved(before, now))
    check_rows(found, own)
    _check_function(*(header["config"]["train"].get("reward") for header in (found, own)))
    _check_scorer(found.get("reward"), own.get("reward"))
    check_model(found["model"], own["model"], saved=True)
    return check_place(found, own, optimizer.drawn_on_the_device)


def with_choices_of(begun: Mapping[str, Any], asked: Config) -> Config:
    """Returns the configuration with what the run of the header `begun` chose or measured, and does not again."""
    check_complete(begun)
    asked = with_dtype_of(begun, asked)
    before = begun["config"].get("method", {})
    asked = _with_name_of(str(before.get("name")), asked)
    if before.get("name") != asked.method.name:
        return asked  # another run, which `check_same` will refuse
    asked_for = method(asked.method.name).defaults() | asked.method.options
    open_ = [name for name in ("lr", "rho") if asked_for.get(name) == AUTO]
    return asked.with_options(**{name: before[name] for name in open_ if isinstance(before.get(name), float)})


def with_dtype_of(begun: Mapping[str, Any], asked: Config) -> Config:
    """Returns the configuration with the data type that the base has in the run of the header `begun`.

    An earlier version of tezo left it open in the settings; its fingerprint of the base has it.
    """
    before, form = begun["config"].get("model", {}), str(begun["model"].get("form"))
    known = [dtype for dtype in (before.get("dtype"), form.partition(",")[0]) if dtype in DTYPES]
    same_engine = engine_kind(str(before.get("engine"))) == engine_kind(asked.model.engine)
    if asked.model.dtype != "auto" or not known or not same_engine:
        return asked
    chosen: Any = known[0]
    return replace(asked, model=replace(asked.model, dtype=chosen))


def with_sources_of(begun: Mapping[str, Any], settings: Mapping[str, Setting]) -> Settings:
    """Returns the settings of a run that goes on with the sources that they had when it began."""
    check_complete(begun)
    sources = begun["sources"]
    return Settings(
        {name: replace(own, source=sources[name]) if sources.get(name) in SOURCES else own
         for name, own in settings.items()}
    )  # fmt: skip


def _with_name_of(name: str, asked: Config) -> Config:
    """Returns the configuration with the method that a run chose by itself, which cannot have options of another."""
    if asked.method.name != AUTO or not asked.method.options.keys() <= method(name).options().keys():
        return asked
    return replace(asked, method=replace(asked.method, name=name))


def check_unchanged(ended: Config, asked: Config, stepped: int | None = None) -> None:
    """Raises a `RequestError` if a run that has ended, with its settings resolved, has others than are asked for.

    `stepped` is the number of rows that its steps were taken on, which no batch has more of.
    """
    asked = _with_name_of(ended.method.name, asked)
    size = asked.train.batch_size
    if size is not None and stepped is not None:
        asked = replace(asked, train=replace(asked.train, batch_size=min(size, stepped)))
    _check_function(ended.train.reward, asked.train.reward)
    before = _fixed(to_tree(ended))
    now = _with_moved(before, _fixed(to_tree(asked)))
    resolved = {key: before.get(key) for key, left_open in RESOLVED_AT_START.items() if now.get(key) == left_open}
    check_settings(before, now | resolved)


def check_given(
    header: Mapping[str, Any], rows: Splits, scorer: Score | str | None, loaded: LoadedModel | None
) -> None:
    """Raises a `RequestError` if a run that has ended had other rows, another scorer or another model.

    Args:
        header: of its log.
        rows: all that are read.
        scorer: an object, or the name of one; None: it is not compared.
        loaded: the model, where it is in memory; one that has a name is not loaded for this.
    """
    check_complete(header)
    if header["read_rows"] != rows.digest:
        raise RequestError(f"data: the rows are not those that the run began with; {BACK}.")
    if scorer is not None:
        _check_scorer(header.get("reward"), scorer_digest(scorer))
    if loaded is not None:
        check_model(header["model"], loaded.fingerprint)


def _check_scorer(before: str | None, now: str | None) -> None:
    if before != now:
        raise RequestError(f"train.reward: the scorer is not the one that the run began with; {BACK}.")


def _check_function(before: str | None, now: str | None) -> None:
    """Raises a `RequestError` if two scorers are not of one name; their files, which may move, are told by digests."""
    names = [str(scorer).rpartition(":")[2] for scorer in (before, now)]
    if now is not None and names[0] != names[1]:
        raise RequestError(
            f"train.reward is {names[1]}, and the run began with {names[0]}; give that, or another output."
        )


def request_of(config: Config) -> dict[str, Any]:
    """Returns all settings by dotted key, which ranks that share a run must have in common, but for their device."""
    return {key: value for key, value in _settings(to_tree(config)).items() if key != "model.device"}


def _fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that may not change, by dotted key, with paths in full."""
    settings = {key: value for key, value in _settings(tree).items() if key not in MAY_CHANGE_ON_RESUME}
    if "model.engine" in settings:  # a server may move
        settings["model.engine"] = engine_kind(str(settings["model.engine"]))
    return settings | {key: absolute_setting(key, settings[key]) for key in PATHS if key in settings}


def _with_moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the earlier paths that are gone: files that were moved are compared by their content."""
    return {**now, **{key: before[key] for key in PATHS if is_gone(str(before.get(key)))}}


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted key, those of the method with their defaults; tuples are lists, as JSON has them."""
    options = method(tree["method"]["name"]).defaults()
    tree = json.loads(json.dumps({**tree, "method": {**options, **tree["method"]}}))
    return {f"{section}.{key}": value for section, values in tree.items() for key, value in dict(values).items()}
