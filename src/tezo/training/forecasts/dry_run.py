"""What a run would do, found without writing anything: its plan, and a forecast of its time and memory.

The model is loaded, the rows are encoded, open settings are filled in, and some steps and evaluations are timed. What a
run adds by returning to an earlier state, or saves by an early end, is in no forecast.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tezo.errors import RequestError
from tezo.estimators.estimate import FEEDBACK
from tezo.models.quantization import stored_bytes
from tezo.runs.environment import hardware, memory_for, peak_memory
from tezo.tasks.evaluation import evaluate
from tezo.tasks.objectives import Encoded
from tezo.training.configuration.config import to_tree
from tezo.training.configuration.recipe import Config
from tezo.training.preparation.feedback_schedule import is_feedback
from tezo.training.preparation.job import Job, prepare
from tezo.training.preparation.plan import parameter_counts, plan
from tezo.training.preparation.schedule import evaluation_steps


@dataclass(frozen=True)
class _Cost:
    """What the steps of one kind take: the first of a phase, which computes what the others share, and each other."""

    count: int
    phases: int
    seconds: tuple[float, float]
    passes: tuple[int, int]

    def total(self, first_and_other: tuple[float, float]) -> float:
        """Sum over all steps of the kind."""
        first, other = first_and_other
        return self.phases * first + (self.count - self.phases) * other


def dry_run(config: Config) -> dict[str, Any]:
    """Prepares a run, takes two of its steps of each kind in memory, and evaluates a batch.

    Returns:
        JSON: the resolved "settings", the "plan" of every parameter, "memory" in bytes (of the model, of fixed factors,
        and the peak that was measured) and "seconds" (of the preparation, one step of each kind, the evaluations and
        the whole run). Times are those of this machine as it is now.

    Raises:
        RequestError: the run could not start.
        RunError: memory ran out.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RequestError("a dry run is of one process; leave out torchrun.")
    started = time.perf_counter()
    job = prepare(config)
    preparing = time.perf_counter() - started
    parameters = plan(job.model, job.optimizer)
    costs = _steps(job)
    evaluations = _evaluations(job)
    stepping = sum(cost.total(cost.seconds) for cost in costs.values())
    return {
        "method": job.config.method.name,
        "model": job.config.model.name,
        "hardware": hardware(),
        "rows": {"train": len(job.train), "dev": len(job.dev), "test": len(job.test)},
        "parameters": parameter_counts(parameters),
        "steps": {kind: cost.count for kind, cost in costs.items()},
        "num_forward_passes": int(sum(cost.total(cost.passes) for cost in costs.values())),
        "memory": {
            "model": stored_bytes(job.model),
            "factors": job.optimizer.factor_bytes,
            "peak": peak_memory(job.loaded.device),
        },
        "seconds": {
            "preparation": round(preparing, 3),
            **{f"first {kind} step": round(cost.seconds[0], 4) for kind, cost in costs.items()},
            **{f"{kind} step": round(cost.seconds[1], 4) for kind, cost in costs.items()},
            "evaluations": round(evaluations, 3),
            "run": round(preparing + stepping + evaluations, 3),
        },
        "notices": list(job.notices),
        "settings": to_tree(job.config),
        "plan": parameters,
    }


def _phases(job: Job) -> list[tuple[str, int]]:
    """(kind, number) of the steps of one kind in a row, from the first step to the last."""
    settings = job.config.train
    kinds = [FEEDBACK if is_feedback(step, settings) else job.optimizer.kinds[0] for step in range(settings.num_steps)]
    return [(kind, len(list(steps))) for kind, steps in groupby(kinds)]


def _steps(job: Job) -> dict[str, _Cost]:
    """Kind of step -> its cost, by two of each that the run has."""
    phases, sampler = _phases(job), job.sampler()
    costs: dict[str, _Cost] = {}
    for kind in dict.fromkeys(kind for kind, _ in phases):
        (first, first_passes), (other, other_passes) = (_timed_step(job, kind, sampler.rows(step)) for step in range(2))
        lengths = [length for of, length in phases if of == kind]
        costs[kind] = _Cost(sum(lengths), len(lengths), (first, other), (first_passes, other_passes))
    return costs


def _timed_step(job: Job, kind: str, indices: Sequence[int]) -> tuple[float, int]:
    """(seconds, forward passes) of a step on these training rows."""
    rows = [job.train[i] for i in indices]
    started = time.perf_counter()
    with memory_for(f"a {kind} step", rows, "train.batch_size"):
        job.optimizer.take_step(_closure(job, rows), kind)
    record = job.optimizer.last_step
    assert record is not None
    return time.perf_counter() - started, record.forward_passes


def _closure(job: Job, rows: Sequence[Encoded]) -> Callable[[], Any]:
    """What a step minimises on these rows."""
    if job.config.train.minimises_loss:
        return job.objective.closure(job.model, job.objective.batches(rows))
    return lambda: -_metrics(job, rows, written=True)[job.config.train.objective]


def _metrics(job: Job, rows: Sequence[Encoded], *, written: bool) -> dict[str, float]:
    measures = job.format.measures if written else ()
    size, new = job.config.train.eval_batch_size, job.format.max_new_tokens or 0
    return evaluate(job.model, job.objective, rows, size, measures=measures, max_new_tokens=new, reward=job.reward)


def _evaluations(job: Job) -> float:
    """Seconds of all evaluations, by one batch of dev and one of test rows."""
    settings = job.config.train
    of_dev = len(evaluation_steps(settings))
    total = 0.0
    for rows, count, written in ((job.dev, of_dev, False), (job.test, 2, True)):
        if rows and count:
            batch = rows[: settings.eval_batch_size]
            started = time.perf_counter()
            with memory_for("an evaluation", batch, "train.eval_batch_size"):
                _metrics(job, batch, written=written)
            total += (time.perf_counter() - started) / len(batch) * len(rows) * count
    return total
