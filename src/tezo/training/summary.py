"""Whether a run made the model better, in one sentence, and what to try next in another.

The summary of a finished run, summary.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tezo.models.quantization import stored_bytes
from tezo.models.saving import Tuning
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.runs.environment import hardware, peak_memory, versions
from tezo.runs.folder import SUMMARY, read_summary
from tezo.runs.step_log import Rollback
from tezo.runs.words import BETTER, HARDLY, NO_BETTER, OPTIONS_LOSS, REWARD, TEXT_LOSS, minus
from tezo.system.files import reading
from tezo.system.ranks import Ranks
from tezo.tasks.evaluation import Metrics
from tezo.tasks.objectives.objective import Encoded
from tezo.training.best_state import REASONS
from tezo.training.job import Job, parameter_counts, plan

LEAST_GAIN = 1e-3
"""Relative decrease of the loss (increase of the reward) below which a run is called hardly better."""
FEW_ROWS = 100


@dataclass(frozen=True)
class _Words:
    """How the figure that a run lowers, or whose negative it lowers, is spoken of."""

    figure: str
    sign: int
    better: str
    worse: str
    improving: str
    best: str
    another_rate: str


_OF_LOSS = _Words("loss", 1, "fell from", "rose", "falling", "lowest", "another rate, such as --lr auto")
_OF_REWARD = _Words("reward", -1, "rose from", "fell", "rising", "highest", "another rate, or a larger method.rho")


def verdict(summary: Mapping[str, Any], lr: float, planned_steps: int) -> str:
    """Two sentences on a finished run.

    Args:
        summary: of the run, as in summary.json.
        lr: first learning rate.
        planned_steps: number of steps that the run was to have.
    """
    if summary["dev_loss"] is None:
        before, after = summary["before"]["loss"], summary["after"]["loss"]
    else:
        before, after = summary["dev_loss_before"], summary["dev_loss"]
    rows = "dev" if summary["dev_loss"] is not None or summary["rows"].get("test") == 0 else "test"
    words = _OF_REWARD if REWARD in summary["after"] else _OF_LOSS
    start, end = (f"{words.sign * loss:.4f}" for loss in (before, after))
    if after < before - LEAST_GAIN * abs(before):
        advice = _of_better(summary, planned_steps, words)
        return f"{BETTER}: the {rows} {words.figure} {words.better} {start} to {end}. {advice}"
    advice = _of_no_better(summary, lr, words)
    if after < before and start != end:
        little = f"by less than {100 * LEAST_GAIN:g} %"
        return f"{HARDLY}: the {rows} {words.figure} {words.better} {start} to {end}, {little}. {advice}"
    return f"{NO_BETTER}: the {rows} {words.figure} was {start} and is {end}. {advice}"


def _of_better(summary: Mapping[str, Any], planned_steps: int, words: _Words) -> str:
    steps, worse = summary["steps"], summary["after"]["loss"] > summary["before"]["loss"]
    if worse:
        return f"On the test rows it {words.worse}: these dev rows are too few, or unlike them; give more in data.dev."
    if summary["stopped"] is not None:
        return f"It ended after {steps} of {planned_steps} steps: {REASONS[summary['stopped']]}, at a lower rate too."
    if summary["kept_step"] == steps:
        return f"It was {words.improving} to the end: try train.steps={2 * steps}."
    return f"It was {words.best} after step {summary['kept_step']}: more rows may help more than more steps."


def _of_no_better(summary: Mapping[str, Any], lr: float, words: _Words) -> str:
    lowest = lr * summary["rollbacks"][-1]["lr_scale"] if summary["rollbacks"] else lr
    if lowest < lr:
        return (
            f"The learning rate was lowered from {lr:.1e} to {lowest:.1e}, still too high: try --lr {lowest / 3:.1e}."
        )
    if summary["rows"]["train"] < FEW_ROWS:
        return f"{summary['rows']['train']} training rows may be too few: give more."
    return f"Try {words.another_rate} (it was {lr:.1e}), or more steps than {summary['steps']}."


@dataclass(frozen=True)
class Outcome:
    """The outcome of a finished run.

    Attributes:
        steps: number of steps taken.
        kept_step: number of steps after which the kept parameters were reached.
        dev_loss: loss on the dev rows with the kept parameters; None if there are no dev rows.
        seconds: time spent on steps.
        before: metrics of the test rows before training.
        after: metrics of the test rows after training.
        dev_loss_before: loss on the dev rows before training; None if there are no dev rows.
        rollbacks: returns to earlier states.
        chosen: whether the step was kept for its loss on the dev rows.
        stopped: reason why the run ended before its last step, see `REASONS` in
            `tezo.training.best_state`; None: it did not, or was asked to.
    """

    steps: int
    kept_step: int
    dev_loss: float | None
    seconds: float
    before: Metrics
    after: Metrics
    dev_loss_before: float | None
    rollbacks: Sequence[Rollback]
    chosen: bool
    stopped: str | None


def row_counts(job: Job) -> dict[str, int]:
    """Split -> number of its rows. Where there are no test rows the metrics before and after are of the dev rows."""
    return {"train": len(job.train), "dev": len(job.dev), "test": 0 if job.test is job.dev else len(job.test)}


def summarize(
    job: Job, outcome: Outcome, ranks: Ranks, result: dict[str, Any], phases: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """The summary as JSON: metrics, cost, hardware and versions.

    Args:
        job: the job that ran.
        outcome: its outcome.
        ranks: the processes of the run.
        result: what was saved, as `save_result` returns it.
        phases: seconds and forward passes of each phase; see `tezo.system.progress`.
    """
    optimizer = job.optimizer
    calls, seconds, error = 0, 0.0, 0.0
    if isinstance(optimizer, ZerothOrderOptimizer):
        (calls, seconds), error = optimizer.cost_of_basis, optimizer.compression_error
    summary = {
        "method": job.config.method.name,
        "model": job.config.model.name,
        "losses": _losses(job),
        "before": outcome.before,
        "after": outcome.after,
        "rows": row_counts(job),
        "steps": outcome.steps,
        "test_rows_chose": job.test is job.dev and outcome.chosen,
        "kept_step": outcome.kept_step,
        "dev_loss": outcome.dev_loss,
        "dev_loss_before": outcome.dev_loss_before,
        "rollbacks": [asdict(rollback) for rollback in outcome.rollbacks],
        "stopped": outcome.stopped,
        "phases": phases,
        "num_forward_passes": optimizer.num_forward_passes,
        "basis_passes": calls,
        "seconds_stepping": round(outcome.seconds, 3),
        "seconds_on_basis": round(seconds, 3),
        "compression_error": error,
        "peak_memory": peak_memory(job.loaded.device),
        "model_bytes": stored_bytes(job.model),
        "parameters": parameter_counts(plan(job.model, optimizer)),
        "result": result,
        "prompt_shared_by_options": job.objective.packs,
        "notices": list(job.notices),
        "seed": job.config.train.seed,
        "ranks": ranks.size,
        "bytes_sent": ranks.bytes_sent,
        "exchanges": ranks.exchanges,
        "hardware": hardware(),
        "versions": versions(),
    }
    train = job.config.train
    return summary | {"verdict": verdict(summary, float(job.config.method.options["lr"]), train.num_steps)}


def _losses(job: Job) -> dict[str, str]:
    """In words, what the loss of a step is, and what the metric "loss" of dev and test rows is."""
    train = job.config.train
    steps = _loss_text(job.train) if train.minimises_loss else minus(train.objective)
    return {"steps": steps, "rows": _loss_text(job.test) if job.reward is None else minus(REWARD)}


def _loss_text(rows: Sequence[Encoded]) -> str:
    return OPTIONS_LOSS if rows[0].example.options else TEXT_LOSS


def tuning_of(run: Path) -> Tuning | None:
    """What a model card says of a run; None if the run has no summary.

    Raises:
        RequestError: the summary is damaged.
    """
    summary = read_summary(run)
    if summary is None:
        return None
    with reading(f"{run}: {SUMMARY} is not that of a run", "restore it"):
        rows = {str(split): int(count) for split, count in summary["rows"].items()}
        return Tuning(
            method=str(summary["method"]),
            steps=int(summary["kept_step"]),
            rows=rows | ({"test": 0} if summary.get("test_rows_chose") is True else {}),
            before=_finite(summary["before"]),
            after=_finite(summary["after"]),
        )


def _finite(metrics: Metrics) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items() if value is not None}
