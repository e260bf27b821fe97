"""Whether a run made the model better, in one sentence, and what to try next in another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tezo.runs.result_words import REWARD
from tezo.training.execution.rollbacks import REASONS

LEAST_GAIN = 1e-3
"""Relative decrease of the loss (increase of the reward) below which a run is called no better."""
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
        rows, before, after = "test", summary["before"]["loss"], summary["after"]["loss"]
    else:
        rows, before, after = "dev", summary["dev_loss_before"], summary["dev_loss"]
    better = after < before - LEAST_GAIN * abs(before)
    words = _OF_REWARD if REWARD in summary["after"] else _OF_LOSS
    found = f"{rows} {words.figure} {words.better if better else 'was'} {words.sign * before:.4f}"
    advice = _of_better(summary, planned_steps, words) if better else _of_no_better(summary, lr, words)
    if better:
        return f"Better: the {found} to {words.sign * after:.4f}. {advice}"
    return f"No better: the {found} and is {words.sign * after:.4f}. {advice}"


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
