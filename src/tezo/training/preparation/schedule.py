"""What happens when, as functions of the step alone: batches, learning rates, evaluations."""

import math
from typing import Any

from tezo.numerics.random import permutation
from tezo.training.configuration.recipe import TrainConfig
from tezo.training.preparation.feedback_schedule import judged_feedback, rate_factor


class BatchSampler:
    """Rows of each step's batch, as a function of (seed, step): epoch after epoch, each in a random order of its own.

    Args:
        num_rows: of the training data.
        batch_size: rows of a batch, which may go on into the next epoch.
        seed: of the orders.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Indices of the rows of that step's batch."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = {position // self.num_rows for position in positions}
        # drawing the order of a large data set at every step would take too long
        self._orders = {epoch: self._orders.get(epoch) or self._order(epoch) for epoch in epochs}
        return [self._orders[position // self.num_rows][position % self.num_rows] for position in positions]

    def _order(self, epoch: int) -> list[int]:
        return permutation(self.num_rows, seed=self.seed, step=epoch, name="epoch")


def lr_factor(settings: TrainConfig) -> Any:
    """Step -> factor of the learning rate: that of the schedule, times that of feedback steps."""

    def factor(step: int) -> float:
        return of_schedule(step) * rate_factor(step, settings)

    def of_schedule(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        left = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
        if settings.schedule == "linear":
            return 1.0 - left
        return (1 + math.cos(math.pi * left)) / 2 if settings.schedule == "cosine" else 1.0

    return factor


def interval(every: int | None, settings: TrainConfig) -> int:
    """Steps between evaluations, or checkpoints: ten a run unless `every` says; 0 is never."""
    return max(1, settings.num_steps // 10) if every is None else every


def evaluation_steps(settings: TrainConfig) -> frozenset[int]:
    """After how many steps a run evaluates its dev rows.

    Every `interval`, after the last step, and after the feedback steps at the start if they may be undone.
    """
    every, steps = interval(settings.eval_every, settings), settings.num_steps
    return frozenset((*range(0, steps, every), steps, judged_feedback(settings))) if every else frozenset()
