"""Whether a run made the model better, in one sentence, and what to try next in another."""

from collections.abc import Mapping
from typing import Any

from tezo.training.rollbacks import REASONS

LEAST_GAIN = 1e-3
"""Relative decrease of the loss below which a run is called no better."""
FEW_ROWS = 100


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
    if after < before - LEAST_GAIN * abs(before):
        found, advice = (
            f"Better: the {rows} loss fell from {before:.4f} to {after:.4f}.",
            _of_better(summary, planned_steps),
        )
    else:
        found, advice = f"No better: the {rows} loss was {before:.4f} and is {after:.4f}.", _of_no_better(summary, lr)
    return f"{found} {advice}"


def _of_better(summary: Mapping[str, Any], planned_steps: int) -> str:
    steps, rose = summary["steps"], summary["after"]["loss"] > summary["before"]["loss"]
    if rose:
        return "On the test rows it rose: these dev rows are too few, or unlike them; give more in data.dev."
    if summary["stopped"] is not None:
        return f"It ended after {steps} of {planned_steps} steps: {REASONS[summary['stopped']]}, at a lower rate too."
    if summary["kept_step"] == steps:
        return f"It was falling to the end: try train.steps={2 * steps}."
    return f"It was lowest after step {summary['kept_step']}: more rows may help more than more steps."


def _of_no_better(summary: Mapping[str, Any], lr: float) -> str:
    if summary["rollbacks"]:
        lowest = lr * summary["rollbacks"][-1]["lr_scale"]
        return (
            f"The learning rate was lowered from {lr:.1e} to {lowest:.1e}, still too high: try --lr {lowest / 3:.1e}."
        )
    if summary["rows"]["train"] < FEW_ROWS:
        return f"{summary['rows']['train']} training rows may be too few: give more."
    return f"Try another rate, such as --lr auto (it was {lr:.1e}), or more steps than {summary['steps']}."
