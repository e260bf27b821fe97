"""A run that goes on: whether it is the one that is asked for, and its steps again from its log."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from tezo.directions.bases.basis import KIND
from tezo.directions.random import NOISE_VERSION
from tezo.methods import AUTO, defaults_by, method
from tezo.models.identity import check_model
from tezo.models.kinds import engine_kind
from tezo.models.loading import DTYPES, LoadedModel
from tezo.models.local_names import is_gone
from tezo.models.saving import save_result
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.settings import RESOLVED, SOURCES, Setting, Settings
from tezo.runs.environment import versions
from tezo.runs.files import FactorFiles, check_complete, check_manifest, check_place, check_rows, check_settings
from tezo.runs.folder import LOG, ResumeState, RunFolder
from tezo.runs.replayed import complete
from tezo.runs.step_log import LogContents, NewTotal, ScorerChange, read_log
from tezo.runs.words import left_out_text
from tezo.system.digests import hash_of
from tezo.system.errors import RequestError
from tezo.system.files import check_free, new_folder, remove
from tezo.system.progress import SAVING, SCORING, STEPS, current, tracked
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.paired import kept_losses
from tezo.tasks.rewards import Reward, RewardRows, sample_of
from tezo.tasks.scorer_identity import difference
from tezo.tasks.scoring import REWARD, Sample
from tezo.tasks.splits import Splits
from tezo.training.choices import RANDOM, RESOLVED_AT_START, Choices, check_options, choose_size
from tezo.training.job import Job, load_for_tuning, make_optimizer
from tezo.training.settings import (
    PATHS,
    Config,
    MethodConfig,
    absolute_setting,
    dump_config,
    overlay,
    parse_config,
    to_tree,
    untrusted_tree,
    with_absolute_paths,
)

MAY_CHANGE_ON_RESUME = (
    "train.checkpoint_every",
    "model.device",
    "model.placement",
    "model.workers",
    "model.trust_remote_code",
    "train.reward",
    "train.reward_workers",
    "train.reward_seconds",
    "train.serve_port",
)
"""Settings that may change between the parts of a run: they don't change what it computes on one device."""
NUM_STEPS = ("train.steps", "train.epochs")
"""They may change too: the log has each change, see `tezo.runs.step_log.NewTotal`."""


BACK = "put it back, or give another output"
TEXT = "data.text"
"""Key of the field with the text, in the sources of a log's header too."""


def log_header(job: Job) -> dict[str, Any]:
    """Returns JSON for the head of a step log: with the base model, all that its steps are taken again from."""
    reward = {} if job.reward is None else {"reward": job.reward.identity.to_json()}
    sources = {name: setting.source for name, setting in job.optimizer.settings.items()}
    return {
        **reward,
        "directions": job.optimizer.num_directions,
        "kinds": list(job.optimizer.rules),
        "config": json.loads(json.dumps(to_tree(job.config))),  # tuples become lists, as JSON has them
        "sources": sources | ({TEXT: RESOLVED} if job.text_found else {}),
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
        "checksums": True,
    }


def shared_header(job: Job) -> dict[str, Any]:
    """Returns those values of `log_header` that ranks which share a run have in common, with the model's one by one.

    Paths are not among them: ranks may have the same files in other places.
    """
    header = log_header(job)
    settings = {key: value for key, value in _settings(header["config"]).items() if key not in PATHS}
    model = {f"model.{part}": digest for part, digest in header["model"].items()}
    return header | {"config": settings, "model": None} | model


def _answer(row: Encoded) -> tuple[Any, ...]:
    example = row.example
    answer = example.answer, example.options, example.label, example.right, example.references
    return (*answer, tuple(sorted(example.fields.items()))) if example.fields else answer


def check_same(found: Mapping[str, Any], asked: Mapping[str, Any], optimizer: BaseOptimizer) -> list[str]:
    """Returns what the user should know before a run goes on; of its scorer see `changed_scorer`.

    Args:
        found: header of the run's log.
        asked: header of the run that is asked for.
        optimizer: of the run that is asked for.

    Raises:
        RequestError: it is another run that is asked for.
    """
    check_complete(found)
    before, now = _fixed(found["config"]), _fixed(asked["config"])
    before.setdefault("train.serve", False)  # of an earlier version, which had none
    if before.get("model.dtype") == "auto":  # of an earlier version, which left it open
        before["model.dtype"] = now["model.dtype"]
    check_settings(before, _with_moved(before, now))
    check_rows(found, asked)
    check_model(found["model"], asked["model"], saved=True)
    return check_place(found, asked, optimizer.drawn_on_the_device)


def with_choices_of(begun: LogContents, asked: Config) -> Config:
    """Returns the configuration with what the run chose where it leaves things open, and its number of steps.

    Raises:
        RequestError: the log is not that of a run, or steps and epochs contradict each other.
    """
    check_complete(begun.header)
    asked = with_dtype_of(begun.header, asked)
    before = parse_config(untrusted_tree(begun.header["config"]))
    asked = _with_method_of(before.method, asked)
    if before.method.name != asked.method.name:
        return asked  # another run, which `check_same` will refuse
    chosen, train = method(asked.method.name), asked.train
    asked_for, options = chosen.defaults() | asked.method.options, before.method.options
    open_ = [name for name in ("lr", "rho") if asked_for.get(name) == AUTO]
    asked = asked.with_options(**{name: options[name] for name in open_ if isinstance(options.get(name), float)})
    left_open = [key for key in CHOSEN_OF_TRAIN if getattr(train, key) is None]
    train = replace(train, **{key: getattr(before.train, key) for key in left_open})
    if train.epochs is None:
        train = replace(train, steps=train.steps or total_of(begun))
    elif isinstance(rows := begun.header.get("stepped_rows"), int) and rows > 0:
        choices = Choices(replace(asked, train=train))
        choices.add(choose_size(train, rows, chosen))
        return choices.config
    return replace(asked, train=train)


CHOSEN_OF_TRAIN = ("batch_size", "schedule", "feedback_first", "feedback_last", "guard")
"""Settings of section train that a run fills in, beside its number of steps."""


def total_of(begun: LogContents) -> int:
    """Returns the number of steps that a run is to have."""
    if begun.totals:
        return begun.totals[-1].steps
    return parse_config(untrusted_tree(begun.header["config"])).train.num_steps


def new_total(begun: LogContents, steps: int | None) -> NewTotal | None:
    """Returns the change of a run's number of steps to `steps`; None where it is the same, or not asked for.

    Raises:
        RequestError: the run has taken more.
    """
    taken, before = len(begun.steps), total_of(begun)
    if steps in (None, before):
        return None
    assert steps is not None
    if steps < taken:
        raise RequestError(
            f"train.steps is {steps}, and the run has taken {taken} steps; give at least as many, or another --output."
        )
    return NewTotal(taken, before, steps, begun.end is not None and taken < before)


def in_words(total: NewTotal) -> str:
    """Returns a notice on a change of the number of steps."""
    return f"train.steps was {total.before} until step {total.step}, and is {total.steps} from there on."


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
        {name: replace(one, source=sources[name]) if sources.get(name) in SOURCES else one
         for name, one in settings.items()}
    )  # fmt: skip


def _with_method_of(begun: MethodConfig, asked: Config) -> Config:
    """Returns the configuration with the method that a run chose by itself, and the basis that it chose with it.

    Raises:
        RequestError: the method lacks an option that is asked for.
    """
    if asked.method.name != AUTO:
        return asked
    check_options(asked, begun.name)
    chosen = {"basis": RANDOM} if begun.options.get("basis") == RANDOM else {}
    return replace(asked, method=MethodConfig(name=begun.name, options=chosen | asked.method.options))


def check_unchanged(ended: Config, asked: Config, stepped: int | None = None) -> None:
    """Raises a `RequestError` if a run that has ended, with its settings resolved, has others than are asked for.

    `stepped` is the number of rows that its steps were taken on, which no batch has more of.
    """
    asked = _with_method_of(ended.method, asked)
    size = asked.train.batch_size
    if size is not None and stepped is not None:
        asked = replace(asked, train=replace(asked.train, batch_size=min(size, stepped)))
    before = _fixed(to_tree(ended))
    now = _with_moved(before, _fixed(to_tree(asked)))
    resolved = {key: before.get(key) for key, left_open in RESOLVED_AT_START.items() if now.get(key) == left_open}
    check_settings(before, now | resolved)


def check_given(header: Mapping[str, Any], rows: Splits, loaded: LoadedModel | None) -> None:
    """Raises a `RequestError` if a run that has ended had other rows or another model.

    Args:
        header: of its log.
        rows: all that are read.
        loaded: the model, where it is in memory; one that has a name is not loaded for this.
    """
    check_complete(header)
    if header["read_rows"] != rows.digest:
        raise RequestError(f"data: the rows are not those that the run began with; {BACK}.")
    if loaded is not None:
        check_model(header["model"], loaded.fingerprint)


WORD = "accept it with --accept-scorer (in Python accept_scorer=True)"
OTHER = "train.reward: the scorer is not the one that the run began with"


def check_word(config: Config, *, resume: bool, accept_scorer: bool) -> None:
    """Raises a `RequestError` where another scorer is accepted, and there is none to be had."""
    if accept_scorer and not resume:
        raise RequestError("accept_scorer is set, which is for a run that goes on; set resume too, or leave it out.")
    if accept_scorer and config.train.objective != REWARD:
        raise RequestError(
            f"accept_scorer is set, and train.objective is {config.train.objective}, which has no scorer; leave it out."
        )


def last_scorer(log: LogContents) -> Any:
    """Returns the identity, as JSON, of the scorer that a run went on with last; None: it has no reward."""
    return log.scorers[-1].scorer if log.scorers else log.header.get("reward")


def check_scorer(log: LogContents, now: Any) -> None:
    """Raises a `RequestError` where the scorer of a run that has ended is not the one of this identity, as JSON."""
    part = difference(last_scorer(log), now)
    if part is not None:
        raise RequestError(f"{OTHER} ({part} differs); put it back, or give another output.")


def changed_scorer(job: Job, state: ResumeState, folder: RunFolder, *, accepted: bool) -> ScorerChange | None:
    """Returns how a run goes on with the scorer of a job; None: by the one that it has gone on with so far.

    Args:
        job: that is asked for.
        state: of the run.
        folder: of the run, open.
        accepted: whether the user accepts another scorer.

    Raises:
        RequestError: it is another scorer, and nobody has accepted it.
    """
    now = None if job.reward is None else job.reward.identity.to_json()
    part = difference(last_scorer(state), now)
    if part is None:
        return None
    if job.reward is None or now is None:
        raise RequestError(f"{OTHER}; put it back, or give another output.")
    step, name = len(state.steps), job.reward.name
    if accepted:
        return ScorerChange(step, name, now, None)
    if not state.scorer_failed or not job.reward.scores_texts:
        raise RequestError(f"{OTHER} ({part} differs); put it back, or {WORD}.")
    with current().phase(SCORING):
        count, other = _scored_again(job, job.reward, state, folder)
    if other is not None:
        raise RequestError(
            f"{OTHER} ({part} differs), and it gives other scores to earlier answers, such as {other}; mend it so that "
            f"it does not, or {WORD}."
        )
    return ScorerChange(step, name, now, count)


def _scored_again(job: Job, reward: Reward, state: ResumeState, folder: RunFolder) -> tuple[int, str | None]:
    """Returns (logged answers that were scored again, the first whose score differs, in words; None: there is none)."""
    count = 0
    for samples, scores in _logged(job, reward, state, folder):
        for sample, before, after in zip(samples, scores, reward.scores(samples), strict=True):
            if not math.isnan(before) and kept_losses([before]) != kept_losses([after.value]):
                now = after.failure or f"{after.value:g}"
                return count, f"that to {sample.where} ({before:g} before, now {now})"
        count += sum(not math.isnan(score) for score in scores)
    return count, None


def _logged(
    job: Job, reward: Reward, state: ResumeState, folder: RunFolder
) -> Iterator[tuple[list[Sample], list[float]]]:
    """Yields answers in the log of a run, and their scores, NaN where one is missing, as they were scored together."""
    for (split, step), losses in state.row_losses.items():
        rows, answers = job.test if split == "test" else job.dev, state.answers.get((split, step), [])
        samples = [sample_of(row, answer) for row, answer in zip(rows, answers, strict=False)]
        yield samples, [-loss for loss in losses[: len(samples)]]
    sampler = job.sampler()
    for step, of_step in groupby(folder.scored(), key=lambda line: line["step"]):
        rows, lines = [job.train[i] for i in sampler.rows(step - 1)], list(of_step)
        samples = [sample_of(rows[i % len(rows)], str(line.get("completion"))) for i, line in enumerate(lines)]
        scores = [_score_in(line) for line in lines]
        size = len(rows) * RewardRows(reward, job.model, job.objective, rows, step - 1).most_copies
        for start in range(0, len(lines), size):
            yield samples[start : start + size], scores[start : start + size]


def _score_in(line: Mapping[str, Any]) -> float:
    score = line.get("score")
    return float(score) if isinstance(score, int | float) else math.nan


def change_texts(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence on each change of the scorer, as a summary has them."""
    return [
        f"after step {change['step']} the run went on with another scorer, {change['name']}: "
        + (
            "it was accepted by the user."
            if change["answers"] is None
            else f"the one before had failed, and this one gives {change['answers']:,} logged answers the same scores."
        )
        for change in changes
    ]


def as_json(changes: Sequence[ScorerChange]) -> list[dict[str, Any]]:
    """Returns changes of the scorer for a summary."""
    return [{"step": change.step, "name": change.name, "answers": change.answers} for change in changes]


def request_of(config: Config) -> dict[str, Any]:
    """Returns all settings by dotted key, which ranks that share a run must have in common, but for their device."""
    return {key: value for key, value in _settings(to_tree(config)).items() if key != "model.device"}


def _fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that may not change, by dotted key, with paths in full."""
    may_change = (*MAY_CHANGE_ON_RESUME, *NUM_STEPS)
    settings = {key: value for key, value in _settings(tree).items() if key not in may_change}
    if "model.engine" in settings:  # a server may move
        settings["model.engine"] = engine_kind(str(settings["model.engine"]))
    return settings | {key: absolute_setting(key, settings[key]) for key in PATHS if key in settings}


def _with_moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the earlier paths that are gone: files that were moved are compared by their content."""
    return {**now, **{key: before[key] for key in PATHS if is_gone(str(before.get(key)))}}


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted key, those of the method with their defaults; tuples are lists, as JSON has them."""
    options = defaults_by(tree["method"]["name"])
    tree = json.loads(json.dumps({**tree, "method": {**options, **tree["method"]}}))
    return {f"{section}.{key}": value for section, values in tree.items() for key, value in dict(values).items()}


def replay(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    model: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Takes the steps of a run again, without an evaluation, and saves what they lead to.

    Args:
        run: folder with a steps.log; a run that was cut short will do.
        output: folder for the result, new; it can be opened, measured and exported as that of a run.
        step: how many steps; None: those whose parameters the run kept, or all where it did not end.
        device: to do it on. Another than the run's will do for methods that draw nothing on the device.
        model: folder or hub name of the base, of the same weights; None: as the run names it.
        trust_remote_code: whether code that comes with the model may run; what the run says of it does not count.

    Returns:
        "steps", their number; "result", see `tezo.models.saving.save_result`; "notices", those for the user.

    Raises:
        RequestError: the base model is another one, or the log does not say enough for this method and device.
    """
    check_free(output)
    check_manifest(run, [LOG])
    log = read_log(run / LOG)
    check_complete(log.header)
    here = [("model.device", device), ("model.placement", "device"), ("model.trust_remote_code", trust_remote_code)]
    named = [("model.name", model)] if model else []
    request = with_dtype_of(log.header, parse_config(overlay(untrusted_tree(log.header["config"]), named)))
    config = parse_config(overlay(to_tree(request), here))
    loaded = load_for_tuning(config)
    check_model(log.header["model"], loaded.fingerprint, saved=True)
    optimizer = make_optimizer(config, loaded, log.header["untrained"])
    if optimizer.by_gradients:
        raise RequestError(f"method.name: {config.method.name} steps along gradients, which a log does not have.")
    optimizer.set_factor_store(FactorFiles(run, writes=False, digests=log.files))
    optimizer.set_passes(partial(_no_data, run))
    place = {"device": loaded.device.type, "noise": NOISE_VERSION, "versions": versions(("tezo", "torch"))}
    notices = check_place(log.header, place, optimizer.drawn_on_the_device)
    if log.size > log.valid:
        notices.append(left_out_text(LOG, log.size - log.valid))
    if step is None:
        step = len(log.steps) if log.end is None else log.end.kept
    if not 0 <= step <= len(log.steps):
        raise RequestError(f"step is {step}, and the log has {len(log.steps)} steps; give one from 0 to that number.")
    returned_to = {rollback.to for rollback in log.rollbacks.values()}
    kept: dict[int, dict[str, Tensor]] = {}
    with current().phase(STEPS):
        for number in tracked(range(step), STEPS):
            if number in returned_to:
                kept[number] = optimizer.tuned_state()
            if number in log.rollbacks:
                to = log.rollbacks[number].to
                optimizer.roll_back(kept[to], to)
            optimizer.replay(log.steps[number])
    with current().phase(SAVING), new_folder(output) as folder, loaded.files.unchanged():
        result = save_result(config.model, loaded, optimizer, lambda name: _part(folder / name))
        complete(folder, run, step, dump_config(with_absolute_paths(request)))
    return {"steps": step, "result": result, "notices": notices}


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """Yields a new folder, which is removed if the block fails."""
    path.mkdir()
    try:
        yield path
    except BaseException:
        remove(path)
        raise


def _no_data(run: Path, refresh_step: int) -> None:
    path = FactorFiles(run, writes=False).path(KIND, refresh_step)
    raise RequestError(
        f"{path} is missing, and steps from {refresh_step} on depend on it; put it back, or give --step {refresh_step}."
    )
