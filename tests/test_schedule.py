"""Which rows a step takes, and at which learning rate: functions of the settings and the step alone."""

import math
from collections import Counter
from typing import Any

import pytest

from tezo.numerics.random import permutation
from tezo.training.recipe import TrainConfig
from tezo.training.schedule import BatchSampler, lr_factor


def strata_of(rows: int, classes: int) -> list[int | None]:
    """Labels of rows sorted by them, the last the most frequent; of one class, none at all."""
    return [None] * rows if classes == 1 else sorted(min(i % (2 * classes), classes - 1) for i in range(rows))


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize(("rows", "batch"), [(14, 4), (5, 16), (16, 16), (1, 3), (7, 7)])
def test_batches_have_every_row_once_an_epoch(rows, batch, classes):
    strata = strata_of(rows, classes)
    sampler = BatchSampler(strata, batch, seed=3)
    batches = [sampler.rows(step) for step in range(60)]
    assert all(len(rows_of) == batch for rows_of in batches)
    # functions of the step alone: asked in another order, of another sampler, they are the same
    assert [BatchSampler(strata, batch, seed=3).rows(step) for step in (41, 7, 8)] == [batches[i] for i in (41, 7, 8)]
    assert [sampler.rows(step) for step in (41, 7, 8)] == [batches[i] for i in (41, 7, 8)]
    flat = [i for rows_of in batches for i in rows_of]
    epochs = [flat[start : start + rows] for start in range(0, len(flat) - rows, rows)]
    assert all(Counter(epoch) == Counter(range(rows)) for epoch in epochs)
    if rows > 4:
        assert len({tuple(epoch) for epoch in epochs}) > 1
        assert BatchSampler(strata, batch, seed=3).rows(0) != BatchSampler(strata, batch, seed=4).rows(0)


def test_rows_that_are_all_alike_come_in_one_random_order():
    order = permutation(21, seed=5, step=0, name="epoch")
    assert BatchSampler([None] * 21, 21, seed=5).rows(0) == BatchSampler(["any"] * 21, 21, seed=5).rows(0) == order


@pytest.mark.parametrize("counts", [(16,) * 6, (40, 9, 1), (3, 3), (5, 300)])
def test_stretches_of_an_epoch_have_every_stratum_in_its_proportion(counts):
    strata = [label for label, count in enumerate(counts) for _ in range(count)]
    for epoch in range(5):
        labels = [strata[i] for i in BatchSampler(strata, len(strata), seed=8).rows(epoch)]
        for start in range(0, len(labels), 7):
            for size in (7, 16):
                found = Counter(labels[start : start + size])
                for label, count in enumerate(counts):
                    expected = count * len(labels[start : start + size]) / len(labels)
                    # a stratum's rows lie 1/count of the epoch apart: one more or fewer, and one of the others'
                    assert abs(found[label] - expected) <= 2


def test_within_a_stratum_the_order_is_random_and_so_is_which_comes_first():
    strata = [0] * 4 + [1] * 4
    orders = [BatchSampler(strata, 8, seed=2).rows(epoch) for epoch in range(600)]
    firsts = Counter(order[0] for order in orders)
    # chi-squared with 7 degrees of freedom: above 24.3 with probability 0.001
    assert sum((firsts[row] - 75) ** 2 / 75 for row in range(8)) < 24.3


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
