"""When a run returns to an earlier state and goes on at a lower rate, and when it ends because that no longer helps.

A run keeps the parameters with the lowest dev loss. It returns to them, drops the moments, and multiplies its learning
rate by `LOWERED`, for one of the `REASONS`. It ends if it stagnates again after a return for stagnation. Without dev
rows the state to return to is that with the lowest mean loss of a tenth of the steps.

Feedback steps are biased. If the dev loss after those at the start is above the lowest one, the run returns at the same
learning rate: it was not the rate that was wrong.

Decisions depend on nothing but losses that are in the step log, and are written there themselves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tezo.estimators.estimate import StepRecord
from tezo.runs.step_log import Rollback
from tezo.training.execution.guard import Guard

LOWERED = 1 / 3
"""Factor of the learning rate at a rollback. Not searched."""
PATIENCE = 3
"""Evaluations in a row without a lower dev loss, over `PATIENT_SHARE` of the steps and `PATIENT_STEPS` at least."""
PATIENT_SHARE, PATIENT_STEPS = 0.3, 24
MOST_ROLLBACKS = 8
"""Rollbacks of a run. After as many the rate is below a thousandth of the first, and the run ends."""

STEPS_ROSE, DEV_ROSE, STAGNATED, NOT_FINITE = "steps rose", "dev rose", "stagnated", "not finite"
FEEDBACK_ROSE = "feedback rose"
REASONS = {
    STEPS_ROSE: "the losses of the steps have risen",
    DEV_ROSE: "the dev loss has risen",
    STAGNATED: "the dev loss was no lower for long",
    NOT_FINITE: "the loss was not finite",
    FEEDBACK_ROSE: "the feedback steps raised the dev loss",
}
"""Reason for a rollback, as in the step log -> in words."""


def in_words(rollback: Rollback) -> str:
    """A sentence on a rollback, without its end."""
    reason = REASONS.get(rollback.reason, rollback.reason)
    share = "" if rollback.lr_scale == 1 else f"{rollback.lr_scale:.3g} of "
    return f"{reason}: back to step {rollback.to}, with {share}the first learning rate"


@dataclass
class GoodState:
    """The state with the lowest loss so far.

    Attributes:
        step: number of steps after which the run had it.
        loss: on the dev rows; without these the mean loss of the steps before.
        state: the parameters, see `Tuner.tuned_state`; None: they are not kept.
        since: evaluations since.
    """

    step: int
    loss: float
    state: Mapping[str, Tensor] | None
    since: int = 0


class Rollbacks:
    """The rollbacks of one run.

    Args:
        steps: number of steps of the run.
        rows_ratio: rows of a step over dev rows.
        every: steps between evaluations.
        by_dev_loss: whether the dev loss chooses the state to return to, and is what the steps minimise.
        judged_feedback: number of feedback steps at the start that are undone if the dev loss is above the lowest one.
    """

    def __init__(
        self, steps: int, rows_ratio: float, every: int, *, by_dev_loss: bool, judged_feedback: int = 0
    ) -> None:
        self.done: list[Rollback] = []
        self._steps = steps
        self._guard = Guard(steps)
        self._rows_ratio = rows_ratio
        self._every = every
        self._by_dev_loss = by_dev_loss
        self._judged_feedback = judged_feedback
        self._have_risen = False

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate."""
        return self.done[-1].lr_scale if self.done else 1.0

    def stepped(self, loss: float) -> None:
        """Takes in the loss of a step."""
        self._have_risen = self._guard.add(loss)

    def reason(self, steps: int, best: GoodState, dev_loss: float | None) -> str | None:
        """Why the run should return to the best state now; None: it should go on.

        Args:
            steps: number of steps taken.
            best: the state to return to.
            dev_loss: loss on the dev rows after these steps; None: it was not measured, or is not what is minimised.
        """
        if best.step == steps:
            return None
        if dev_loss is not None and not math.isfinite(dev_loss):
            return NOT_FINITE
        if dev_loss is not None and steps == self._judged_feedback:
            return FEEDBACK_ROSE
        if self._have_risen:
            return STEPS_ROSE
        if dev_loss is None:
            return None
        if self._guard.is_above(dev_loss - best.loss, self._rows_ratio):
            return DEV_ROSE
        return STAGNATED if self._stagnates(steps, best) else None

    def _stagnates(self, steps: int, best: GoodState) -> bool:
        start = max([best.step, *(rollback.step for rollback in self.done)])
        evaluations = steps // self._every - start // self._every
        return evaluations >= PATIENCE and steps - start >= max(PATIENT_SHARE * self._steps, PATIENT_STEPS)

    def planned(self, steps: int, best: GoodState, reason: str) -> Rollback | None:
        """The rollback to the best state for a reason; None: the run should end instead."""
        last = self.done[-1] if self.done else None
        again = last is not None and (last.reason, last.to) == (STAGNATED, best.step)
        if len(self.done) == MOST_ROLLBACKS or (reason == STAGNATED and again):
            return None
        lowered = 1.0 if reason == FEEDBACK_ROSE else LOWERED
        return Rollback(steps, best.step, self.lr_scale * lowered, reason)

    def add(self, rollback: Rollback) -> None:
        """Takes in a rollback that was made."""
        self.done.append(rollback)
        self._guard.restart(keep_lowest=not self._by_dev_loss)
        self._have_risen = False

    def load(self, records: Sequence[StepRecord], done: Mapping[int, Rollback], count: int) -> None:
        """Restores the state after all these steps and the first `count` of the rollbacks of the run."""
        made = sorted(done)[:count]
        for steps in range(len(records) + 1):
            if steps in made:
                self.add(done[steps])
            if steps < len(records):
                self.stepped(records[steps].loss)
