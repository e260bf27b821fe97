"""Which rows a step takes, and at which learning rate: functions of the settings and the step alone."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tezo.directions.random import permutation
from tezo.training.rows_of_steps import LOOKED, BatchSampler, evaluates, lr_factor, parts
from tezo.training.settings import TrainConfig


@pytest.mark.parametrize(("rows", "batch"), [(14, 4), (5, 16), (16, 16), (1, 3), (7, 7)])
def test_batches_are_the_epochs_permutations_one_after_the_other(rows, batch):
    sampler = BatchSampler(range(rows), batch, seed=3)
    batches = [sampler.rows(step) for step in range(60)]
    epochs = [permutation(rows, seed=3, step=epoch, name="epoch") for epoch in range(60 * batch // rows + 1)]
    assert all(Counter(epoch) == Counter(range(rows)) for epoch in epochs)
    assert [row for rows_of in batches for row in rows_of] == [row for epoch in epochs for row in epoch][: 60 * batch]
    assert all(len(rows_of) == batch for rows_of in batches)
    if rows > 4:
        assert len({tuple(epoch) for epoch in epochs}) > 1
        assert sampler.rows(0) != BatchSampler(range(rows), batch, seed=4).rows(0)


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 434])
def test_looks_and_steps_have_rows_of_their_own(rows):
    looked, stepped = parts(rows, seed=3)
    assert looked and stepped and sorted({*looked, *stepped}) == list(range(rows))
    if rows > 1:
        assert not {*looked} & {*stepped} and len(looked) == round(LOOKED * rows)
    assert (looked, stepped) == parts(rows, seed=3) and (rows < 10 or parts(rows, seed=4) != (looked, stepped))
    sampler = BatchSampler(stepped, len(stepped), seed=3)
    assert all(sorted(sampler.rows(step)) == sorted(stepped) for step in range(3))


@pytest.mark.parametrize(("rows", "batch"), [(14, 4), (16, 16), (270, 192), (7, 3)])
def test_batches_of_whole_epochs_have_no_row_twice(rows, batch):
    sampler = BatchSampler(range(rows), batch, seed=3, whole=True)
    batches = [sampler.rows(step) for step in range(60)]
    per_epoch = rows // batch
    epochs = [[row for batch_of in batches[i : i + per_epoch] for row in batch_of]
              for i in range(0, 60 - per_epoch, per_epoch)]  # fmt: skip
    assert all(len(set(epoch)) == per_epoch * batch for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1 and {row for epoch in epochs for row in epoch} == set(range(rows))
    assert BatchSampler(range(5), 16, seed=3, whole=True).rows(0) == BatchSampler(range(5), 16, seed=3).rows(0)


def test_batches_are_functions_of_the_step_alone():
    sampler = BatchSampler(range(14), 4, seed=3)
    batches = [sampler.rows(step) for step in range(50)]
    for asked in (sampler, BatchSampler(range(14), 4, seed=3)):  # in another order, of another sampler
        assert [asked.rows(step) for step in (41, 7, 8)] == [batches[i] for i in (41, 7, 8)]


def test_the_schedules_are_what_they_are_called():
    def factors(**settings: Any) -> list[float]:
        made = TrainConfig(**({"steps": 10} | settings))
        return [lr_factor(step, made) for step in range(10)]

    assert factors() == [1.0] * 10
    assert factors(schedule="linear") == pytest.approx([1 - step / 10 for step in range(10)])
    cosine = [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert factors(schedule="cosine") == pytest.approx(cosine)


def test_dev_rows_are_evaluated_at_intervals_at_the_end_and_after_feedback_steps_that_may_be_undone():
    settings = TrainConfig(steps=10, eval_every=4, feedback_first=3, guard=True)

    def evaluation_steps(settings: TrainConfig) -> set[int]:
        return {step for step in range(settings.num_steps + 1) if evaluates(step, settings)}

    assert evaluation_steps(settings) == {0, 3, 4, 8, 10}
    assert evaluation_steps(replace(settings, guard=False)) == {0, 4, 8, 10}
    assert evaluation_steps(replace(settings, feedback_first=None)) == {0, 4, 8, 10}
    assert evaluation_steps(replace(settings, eval_every=0)) == set()
