"""Which rows a step takes, and at which learning rate: functions of the settings and the step alone."""

import math
from collections import Counter
from typing import Any

import pytest

from tezo.recipe import TrainConfig
from tezo.schedule import batch_indices, lr_factor


@pytest.mark.parametrize(("rows", "batch"), [(14, 4), (5, 16), (16, 16), (1, 3), (7, 7)])
def test_batches_have_every_row_once_an_epoch(rows, batch):
    flat = [i for step in range(60) for i in batch_indices(rows, batch, step, seed=3)]
    assert all(len(batch_indices(rows, batch, step, seed=3)) == batch for step in range(9))
    epochs = [flat[start : start + rows] for start in range(0, len(flat) - rows, rows)]
    assert all(Counter(epoch) == Counter(range(rows)) for epoch in epochs)
    if rows > 4:
        assert len({tuple(epoch) for epoch in epochs}) > 1
        assert batch_indices(rows, batch, 0, seed=3) != batch_indices(rows, batch, 0, seed=4)


def test_the_schedules_are_what_they_are_called():
    def factors(**settings: Any) -> list[float]:
        made = TrainConfig(**({"steps": 10} | settings))
        return [lr_factor(made)(step) for step in range(10)]

    assert factors() == [1.0] * 10
    assert factors(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(schedule="linear") == pytest.approx([1 - step / 10 for step in range(10)])
    cosine = [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert factors(schedule="cosine") == pytest.approx(cosine)
    assert factors(schedule="linear", warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert [lr_factor(TrainConfig(steps=3, warmup_steps=9))(step) for step in (0, 8)] == pytest.approx([1 / 9, 1])
