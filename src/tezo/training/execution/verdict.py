"""Whether a run made the model better, in one sentence, and what to try next in another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tezo.runs.result_words import BETTER, HARDLY, NO_BETTER, REWARD
from tezo.training.execution.rollbacks import REASONS

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
