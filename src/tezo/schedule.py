"""What happens when, as functions of the step alone: batches, learning rates, evaluations."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

from tezo.random import permutation
from tezo.recipe import TrainConfig


def batch_indices(strata: Sequence[Hashable], batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of a step's batch: epoch after epoch, each in its own order, as a function of (seed, step) alone.

    Args:
        strata: of every row, what it is to be spread out by; all alike: rows are in random order.
        batch_size: rows of a batch, which may go on into the next epoch.
        step: whose batch it is.
        seed: of the orders.
    """
    rows = len(strata)
    positions = range(step * batch_size, (step + 1) * batch_size)
    orders = {epoch: _epoch_order(strata, seed, epoch) for epoch in {p // rows for p in positions}}
    return [orders[p // rows][p % rows] for p in positions]


def _epoch_order(strata: Sequence[Hashable], seed: int, epoch: int) -> list[int]:
    """Every row once, in random order within its stratum, row j of the n of stratum s at j/n + offset_s/n.

    Any stretch of the epoch then has each stratum in its proportion, give or take a row or two. Offsets lie evenly in
    (0, 1), and which stratum has which is random.
    """
    order = permutation(len(strata), seed=seed, step=epoch, name="epoch")
    members: dict[Hashable, list[int]] = {stratum: [] for stratum in dict.fromkeys(strata)}
    for row in order:
        members[strata[row]].append(row)
    places = permutation(len(members), seed=seed, step=epoch, name="strata")
    keyed: list[tuple[float, int]] = []
    for place, own in zip(places, members.values(), strict=True):
        offset = (place + 0.5) / len(members)
        keyed += [((j + offset) / len(own), row) for j, row in enumerate(own)]
    return [row for _, row in sorted(keyed, key=lambda pair: pair[0])]


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
