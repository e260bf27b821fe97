"""What happens when, as functions of the step alone: batches, learning rates, feedback steps, evaluations."""

import math
from collections.abc import Sequence

from tezo.directions.random import permutation
from tezo.optim.estimators.estimate import FEEDBACK
from tezo.training.recipe import TrainConfig


class BatchSampler:
    """Rows of each step's batch, as a function of (seed, step): epoch after epoch, each in a random order of its own.

    Args:
        rows: numbers of the training rows that steps have.
        batch_size: rows of a batch, which may go on into the next epoch.
        seed: of the orders.
        whole: whether an epoch ends where fewer rows than a batch are left, so that no batch has a row twice.
    """

    def __init__(self, rows: Sequence[int], batch_size: int, seed: int, *, whole: bool = False) -> None:
        self.num_rows = len(rows)
        self._epoch_rows = len(rows) // batch_size * batch_size if whole and batch_size <= len(rows) else len(rows)
        self._rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Indices of the rows of that step's batch."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = {position // self._epoch_rows for position in positions}
        # drawing the order of a large data set at every step would take too long
        self._orders = {epoch: self._orders.get(epoch) or self._order(epoch) for epoch in epochs}
        return [self._orders[position // self._epoch_rows][position % self._epoch_rows] for position in positions]

    def _order(self, epoch: int) -> list[int]:
        order = permutation(self.num_rows, seed=self.seed, step=epoch, name="epoch")
        return [self._rows[place] for place in order]


LOOKED = 0.6
"""Part of the training rows that looks have where steps have the others. Our choice."""


def parts(num_rows: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns (rows that looks have, rows that steps have), no row in both unless it is the only one.

    What a look finds holds for its rows better than for others, and a step has to choose what holds for others.
    """
    order = permutation(num_rows, seed=seed, step=0, name="parts")
    looked = round(LOOKED * num_rows)
    return order[:looked] or order, order[looked:] or order


def lr_factor(step: int, settings: TrainConfig) -> float:
    """Factor of the learning rate at a step, by the schedule."""
    if settings.schedule in (None, "constant"):
        return 1.0
    part = step / max(1, settings.num_steps)
    return 1.0 - part if settings.schedule == "linear" else (1 + math.cos(math.pi * part)) / 2


def interval(every: int | None, settings: TrainConfig) -> int:
    """Steps between evaluations, or checkpoints: ten a run unless `every` says; 0 is never."""
    return max(1, settings.num_steps // 10) if every is None else every


def evaluates(steps: int, settings: TrainConfig) -> bool:
    """Whether a run evaluates its dev rows after so many steps.

    Every `interval`, after the last step, and after the feedback steps at the start if they may be undone.
    """
    every = interval(settings.eval_every, settings)
    return every > 0 and (steps % every == 0 or steps in (settings.num_steps, judged_feedback(settings)))


FIRST, LAST = 15, 60
"""Default numbers of feedback steps at the start and at the end, from the study in docs/experiments.md. They are at
most 5 % and 20 % of the steps."""
EARLY_RATE = 3.0
"""Factor of the learning rate of feedback steps at the start, over that of those at the end. Far from an optimum their
bias matters less than how far they get. Chosen by trials on dev rows of TREC (encoder) and completions (decoder), which
are not committed; docs/experiments.md has the decoder's study with it."""
LEAST_STEPS = 100
"""Shorter runs have no feedback steps by default: a few steps are not worth the extra passes before them."""
KEYS = ("feedback_first", "feedback_last")


def default_counts(steps: int) -> tuple[int, int]:
    """The default numbers of feedback steps at the start and at the end of a run of so many steps."""
    return (min(FIRST, steps // 20), min(LAST, steps // 5)) if steps >= LEAST_STEPS else (0, 0)


def is_feedback(step: int, settings: TrainConfig) -> bool:
    """Whether a step is a feedback step; `settings` has numbers for both keys, `step` counts from 0."""
    first, last = settings.feedback_first or 0, settings.feedback_last or 0
    return step < first or settings.num_steps - last <= step < settings.num_steps


def planned(step: int, settings: TrainConfig, first: str) -> tuple[str, float]:
    """(the rule of a step, the factor of its learning rate), of an optimizer whose first rule is `first`."""
    if not is_feedback(step, settings):
        return first, 1.0
    return FEEDBACK, EARLY_RATE if step < (settings.feedback_first or 0) else 1.0


def judged_feedback(settings: TrainConfig) -> int:
    """Number of feedback steps at the start that a run with dev rows undoes if they raise the dev loss; 0: none."""
    return (settings.feedback_first or 0) if settings.guard and settings.minimises_loss else 0
