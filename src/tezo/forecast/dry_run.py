"""A run's plan, and a forecast of its time and memory, without a step: its model is loaded, and one pass is timed.

Together with the trials on single rows while loading and preparing, this takes less than two forward passes. All else
is a forecast from numbers of passes. Settings that a run measures at its start are named with their cost, and stay
open. The forecast does not include a return to an earlier state, or an early end.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import mul
from typing import Any

import torch

from tezo.directions.bases.activation import groups
from tezo.directions.products import float32_on_emulating_cpu
from tezo.forecast.memory import copies_of, first_order_kept, forecast
from tezo.methods import AUTO, METHODS, method
from tezo.models.quantization import stored_bytes
from tezo.optim.estimators.estimate import FEEDBACK, GRADIENT
from tezo.optim.measured_scale import most_passes, passes_of_reach
from tezo.optim.optimizer import PER_EXAMPLE
from tezo.runs.environment import hardware, memory_for, peak_memory
from tezo.system.errors import RequestError
from tezo.system.progress import CHECKING, TIMING, current, metered
from tezo.tasks.evaluation import Metrics, evaluate, predict
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.scoring import REWARD
from tezo.tasks.untuned import MOST_ROWS
from tezo.training.choices import is_rho_open, search_budget, settled_options
from tezo.training.evaluations import SAMPLE_TOKENS, check_objective, compares_with_untuned
from tezo.training.job import Job, parameter_counts, parameter_table, prepare
from tezo.training.rows_of_steps import BASIS_ROWS, evaluates, is_feedback
from tezo.training.settings import Config, to_tree, with_absolute_paths
from tezo.training.summary import row_counts

WITH_GRADIENT = 3
"""Time of a pass whose gradient is taken, in forward passes."""


@dataclass(frozen=True)
class _Pace:
    """Seconds of a forward pass over a training batch, of a token in it, and of one token that is written alone."""

    batch: float
    token: float
    written: float


def dry_run(config: Config) -> dict[str, Any]:
    """Prepares a run without measuring its open settings, and times a forward pass.

    Returns:
        JSON: the forward "passes" that were made; "rows_as_read"; the resolved "settings"; those that are "measured" at
        the start, with their forward passes at most; the "plan" of every parameter; "memory" in bytes (of the model,
        where torch holds it, of fixed factors, and a forecast of the peak); and "seconds" (of the preparation and the
        timed pass, and forecasts of one step of each kind, the measurements, the evaluations and the whole run). Times
        are those of this machine as it is now.

    Raises:
        RequestError: the run could not start.
        RunError: memory ran out.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RequestError("a dry run is of one process; leave out torchrun.")
    config = with_absolute_paths(config)  # a scorer may change the working folder
    with metered() as meter:
        started = time.perf_counter()
        job = prepare(config, measuring=False)
        with current().phase(CHECKING):
            check_objective(job, partial(_metrics_of_one, job))
        before = peak_memory(job.loaded.device)
        with current().phase(TIMING):
            pace = _timed(job)
        preparing = time.perf_counter() - started
        measured = _measured(config, job)
        parameters, steps = parameter_table(job.model, job.optimizer), _steps(job)
        passes = {kind: [job.optimizer.passes_of(kind, first=first) for first in (True, False)] for kind in steps}
        seconds = {kind: [count * _loss_seconds(job, kind, pace) for count in passes[kind]] for kind in steps}
        evaluations, measuring = _evaluation_seconds(job, pace), sum(measured.values()) * pace.batch
        stepping = sum(sum(map(mul, steps[kind], seconds[kind])) for kind in steps)
        return {
            "method": job.config.method.name,
            "model": job.config.model.name,
            "hardware": hardware(),
            "rows": row_counts(job),
            "parameters": parameter_counts(parameters),
            "steps": {kind: sum(counts) for kind, counts in steps.items()},
            "num_forward_passes": sum(sum(map(mul, steps[kind], passes[kind])) for kind in steps),
            "measured": measured,
            "seconds": {
                "preparation": round(preparing, 3),
                "timed pass": round(pace.batch, 4),
                **{f"first {kind} step": round(first, 4) for kind, (first, _) in seconds.items()},
                **{f"{kind} step": round(other, 4) for kind, (_, other) in seconds.items()},
                "measurements": round(measuring, 3),
                "evaluations": round(evaluations, 3),
                "run": round(preparing + measuring + stepping + evaluations, 3),
            },
            "rows_as_read": list(job.rows_as_read),
            "notices": list(job.notices),
            "settings": to_tree(job.config),
            "plan": parameters,
            "memory": _memory(job, before),
            "passes": round(meter.passes, 2),
        }


def _metrics_of_one(job: Job) -> Metrics:
    """Returns metrics of a row, of an answer of one token; those of a reward by name alone, for scorers may be slow."""
    if job.reward is not None:
        return {REWARD: 0.0}
    return evaluate(job.model, job.objective, job.train[:1], 1, measures=job.format.measures, max_new_tokens=1).metrics


def _steps(job: Job) -> dict[str, tuple[int, int]]:
    """Returns kind of step -> (steps that begin a series of such steps, and compute its shared data; all others)."""
    settings = job.config.train
    kinds = [FEEDBACK if is_feedback(step, settings) else job.optimizer.rules[0] for step in range(settings.num_steps)]
    first = [kind for kind, _ in groupby(kinds)]
    return {kind: (first.count(kind), kinds.count(kind) - first.count(kind)) for kind in dict.fromkeys(kinds)}


@torch.no_grad()
def _timed(job: Job) -> _Pace:
    rows = [job.train[i] for i in job.sampler().rows(0)]
    with memory_for("a forward pass", rows, "train.batch_size"), float32_on_emulating_cpu(job.model):
        batch, in_torch = job.objective.collate(rows), job.loaded.engine is None
        started = time.perf_counter()
        if in_torch or job.reward is None:
            float(job.objective.closure(job.model, [batch])())
        else:  # prompts have no place at which an engine would read
            predict(job.model, job.objective, rows, len(rows), 1)
        seconds, written = time.perf_counter() - started, 0.0
        if _new_tokens(job):
            started = time.perf_counter()
            if in_torch:
                float(job.model(input_ids=batch.passes[0].inputs["input_ids"][:1, :1]).logits.sum())
            else:
                predict(job.model, job.objective, rows[:1], 1, 1)
            written = time.perf_counter() - started
    return _Pace(seconds, seconds / _tokens(job, rows), written)


def _tokens(job: Job, encoded: Sequence[Encoded]) -> int:
    return sum(len(row.tokens) for tree in job.objective.trees(encoded) for row in tree)


def _new_tokens(job: Job) -> int:
    """Returns the tokens of the longest answer that an evaluation of the test rows writes; 0 if it writes none."""
    if job.reward is not None:
        return job.reward.max_new_tokens
    if job.format.measures and not job.test[0].example.options:
        return job.format.max_new_tokens or 0
    return SAMPLE_TOKENS if job.format.shape in ("completion", "messages") else 0


def _loss_seconds(job: Job, kind: str, pace: _Pace) -> float:
    """Returns the seconds of one evaluation of the objective of a kind of step."""
    if kind == GRADIENT:
        return WITH_GRADIENT * pace.batch
    if job.config.train.minimises_loss:
        return pace.batch
    return pace.batch * (job.reward is None) + pace.written * _new_tokens(job)


def _evaluation_seconds(job: Job, pace: _Pace) -> float:
    """Returns the seconds of all evaluations; a token that is written takes as long for a batch as for a row."""
    settings = job.config.train
    due = sum(evaluates(steps, settings) for steps in range(settings.num_steps + 1))
    of_dev = max(0, due - (job.dev is job.test)) if job.dev else 0
    if job.held_out is not None:
        of_dev += settings.num_steps  # a step is measured there at its end, before it is shortened
    reading = of_dev * _tokens(job, job.dev) + 2 * _tokens(job, job.test)
    if job.objective.options and job.reward is None and job.dev is not job.test:
        reading += _tokens(job, job.dev)  # to fit a temperature
    if compares_with_untuned(job):
        reading += _tokens(job, job.train[:MOST_ROWS]) + _tokens(job, job.test)
    batches = 2 * (math.ceil(len(job.test) / settings.eval_batch_size) if job.reward or job.format.measures else 1)
    if job.reward is not None:
        batches += of_dev * math.ceil(len(job.dev) / settings.eval_batch_size)
    return reading * pace.token + batches * _new_tokens(job) * pace.written


def _measured(config: Config, job: Job) -> dict[str, int]:
    """Returns setting that a run measures at its start -> forward passes that it takes for that, at most."""
    options, optimizer = job.config.method.options, job.optimizer
    found: dict[str, int] = {}
    if options.get("directions") == PER_EXAMPLE != config.method.options.get("directions"):
        found["method.directions"] = 1  # four, over two rows
    if is_rho_open(job.config):
        found["method.rho"] = most_passes(optimizer.num_directions) if job.reward is None else passes_of_reach()
    if options.get("basis", method(job.config.method.name).defaults().get("basis")) == "activation":
        ranks = {t.name: optimizer.rank_and_way(t.name)[0] or 0 for t in optimizer.targets if t.input_role is not None}
        shown = math.ceil(min(BASIS_ROWS, len(job.train)) / job.config.train.rows_per_step)
        found["method.basis"] = shown * len(list(groups([t for t in optimizer.targets if t.name in ranks], ranks)))
    if FEEDBACK in _steps(job):
        found["train.feedback_first"] = optimizer.passes_of(FEEDBACK, first=True)
    if options.get("lr") == AUTO:
        found["method.lr"] = search_budget(job.config.train, optimizer)
    return found


def _memory(job: Job, before: int) -> dict[str, int]:
    """Returns bytes; the peak is that of the timed pass, made for both signs, plus the state of the method."""
    after, name = peak_memory(job.loaded.device), job.config.method.name
    factors = job.optimizer.factor_bytes
    if name in METHODS:
        job.optimizer.close()
        options = {key: value for key, value in settled_options(job.config.method).items() if key != "targets"}
        patterns = tuple(target.name for target in job.optimizer.targets)
        said = forecast(job.model, METHODS[name], targets=patterns, **options)
        kept, batch = said.kept + said.collecting, job.train[: job.config.train.rows_per_step]
        copies = copies_of(said, _tokens(job, batch))
    else:
        kept, copies = sum(first_order_kept(job.model)), 1
    peak = after + (copies - 1) * max(0, after - before) + kept
    of_model = {"model": stored_bytes(job.model)} if job.loaded.engine is None else {}
    return {**of_model, "factors": factors, "peak": peak}
