"""What happens when, as functions of the step alone: batches, learning rates, evaluations."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tezo.numerics.random import permutation
from tezo.training.recipe import TrainConfig


class BatchSampler:
    """Rows of each step's batch: epoch after epoch, each in its own order, as a function of (seed, step) alone.

    Args:
        strata: of every row, what an epoch is to be spread out by; all alike: rows are in random order.
        batch_size: rows of a batch, which may go on into the next epoch.
        seed: of the orders.
    """

    def __init__(self, strata: Sequence[Hashable], batch_size: int, seed: int) -> None:
        numbers = {stratum: number for number, stratum in enumerate(dict.fromkeys(strata))}
        self.strata = np.array([numbers[stratum] for stratum in strata])
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Indices of the rows of that step's batch."""
        count = len(self.strata)
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = {position // count for position in positions}
        # a large data set's order takes longer than it may at every step
        self._orders = {epoch: self._orders.get(epoch) or self._order(epoch) for epoch in epochs}
        return [self._orders[position // count][position % count] for position in positions]

    def _order(self, epoch: int) -> list[int]:
        """Every row once, in random order within its stratum, row j of the n of stratum s at j/n + offset_s/n.

        Any stretch of the epoch then has each stratum in its proportion, give or take a row or two. Offsets lie evenly
        in (0, 1), and which stratum has which is random.
        """
        order = np.array(permutation(len(self.strata), seed=self.seed, step=epoch, name="epoch"))
        strata = self.strata[order]
        sizes = np.bincount(strata)
        places = np.array(permutation(len(sizes), seed=self.seed, step=epoch, name="strata"))
        j = np.empty(len(order))
        j[np.argsort(strata, kind="stable")] = np.concatenate([np.arange(size) for size in sizes])
        keys = (j + (places[strata] + 0.5) / len(sizes)) / sizes[strata]
        return [int(row) for row in order[np.argsort(keys, kind="stable")]]


def lr_factor(settings: TrainConfig) -> Any:
    """The schedule: step -> factor of the learning rate."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        left = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
        if settings.schedule == "linear":
            return 1.0 - left
        return (1 + math.cos(math.pi * left)) / 2 if settings.schedule == "cosine" else 1.0

    return factor


def interval(every: int | None, settings: TrainConfig) -> int:
    """Steps between evaluations, or checkpoints: ten a run unless `every` says; 0 is never."""
    return max(1, settings.steps // 10) if every is None else every
