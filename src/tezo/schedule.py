"""What happens when, as functions of the step alone: batches, learning rates, evaluations."""

import math
from typing import Any

from tezo.random import permutation
from tezo.recipe import TrainConfig


def batch_indices(rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of a step's batch: epoch after epoch, each in its own order, as a function of (seed, step) alone."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    orders = {epoch: permutation(rows, seed=seed, step=epoch, name="epoch") for epoch in {p // rows for p in positions}}
    return [orders[p // rows][p % rows] for p in positions]


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
