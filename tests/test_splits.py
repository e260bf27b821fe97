"""Sizes of splits: what a task is trained on, chosen by and reported on, and that no row is two of these."""

import re
from collections import Counter
from pathlib import Path

import pytest
from folders import write_rows
from task_folders import form_of, rows_of, write_task

from tezo.system.errors import RequestError
from tezo.tasks.row_files import DataConfig
from tezo.tasks.splits import divide, evaluation_rows, read_splits


def divided(root: Path, name: str, kind: str, run_seed: int = 0, **data):
    config = DataConfig(task=name, dir=str(root), **data)
    return divide(read_splits(config), form_of(name, kind), config, run_seed)


def places(rows) -> set[str]:
    return {row.where for row in rows}


@pytest.mark.parametrize(("name", "train", "expected"), [
    ("wsc", 554, (333, 221)), ("cb", 250, (150, 100)), ("rte", 2490, (1000, 500)), ("copa", 400, (300, 100)),
])  # fmt: skip
def test_a_dev_set_does_not_eat_the_training_rows(tmp_path, name, train, expected):
    rows = divided(write_task(tmp_path, name, train), name, "causal")
    assert (len(rows.train), len(rows.dev)) == expected
    assert not places(rows.train) & places(rows.dev)
    assert bool(rows.notices) == (train < 1500)


def test_sizes_that_are_asked_for_are_kept_or_refused(tmp_path):
    root = write_task(tmp_path, "wsc", 60, 20)
    rows = divided(root, "wsc", "causal", num_train=40, num_dev=20, num_test=10)
    assert [len(part) for part in (rows.train, rows.dev, rows.test)] == [40, 20, 10]
    for sizes, fault in (
        ({"num_train": 50, "num_dev": 20}, r"data\.num_train \+ data\.num_dev is 70, but there are 60 rows"),
        ({"num_test": 21}, r"data\.num_test is 21, but there are 20 rows"),
    ):
        with pytest.raises(RequestError, match=fault):
            divided(root, "wsc", "causal", **sizes)
        assert divided(root, "wsc", "causal", allow_fewer=True, **sizes)


def test_few_shots_are_k_of_each_class_for_training_and_for_choosing(tmp_path):
    root = write_task(tmp_path, "trec", 120, 30)
    form = form_of("trec", "masked")
    drawn = [divided(root, "trec", "masked", seed, per_class=7, num_test=9) for seed in (13, 21)]
    for rows in drawn:
        for part in (rows.train, rows.dev):
            assert Counter(form.example(row).label for row in part) == dict.fromkeys(range(6), 7)
        assert not places(rows.train) & places(rows.dev)
    assert places(drawn[0].train) != places(drawn[1].train)
    assert drawn[0].test == drawn[1].test, "the rows that are reported on are the same for every seed"
    assert drawn[0].train == divided(root, "trec", "masked", 99, seed=13, per_class=7).train


def test_few_shots_may_be_read_off_a_larger_dev_set_that_is_the_same_for_every_k(tmp_path):
    root = write_task(tmp_path, "trec", 240, 30)
    form = form_of("trec", "masked")
    drawn = {k: divided(root, "trec", "masked", 13, per_class=k, num_dev=100) for k in (3, 9)}
    for k, rows in drawn.items():
        assert len(rows.dev) == 100 and not places(rows.train) & places(rows.dev) and not rows.notices
        assert Counter(form.example(row).label for row in rows.train) == dict.fromkeys(range(6), k)
    assert drawn[3].dev == drawn[9].dev != divided(root, "trec", "masked", 21, per_class=3, num_dev=100).dev
    with pytest.raises(RequestError, match=r"data\.num_dev \+ data\.per_class of each label is 280, .* 240 rows"):
        divided(root, "trec", "masked", per_class=30, num_dev=100)
    few = divided(root, "trec", "masked", per_class=30, num_dev=100, allow_fewer=True)
    assert (len(few.train), len(few.dev)) == (144, 96) and len(few.notices) == 2, "dev rows are two fifths at most"


def test_rows_without_a_label_are_left_out(tmp_path):
    root = write_task(tmp_path, "snli", 12)
    write_rows(root / "snli/validation.jsonl", [{**row, "label": i - 1} for i, row in enumerate(rows_of("snli", 4))])
    assert [row.fields["label"] for row in evaluation_rows(DataConfig(task="snli", dir=str(root)))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("source", "idle"),
    [
        ({"task": "sst2"}, {"subset": "other"}),
        ({"task": "sst2"}, {"template": "{sentence} It was"}),
        ({"task": "sst2"}, {"label_words": {"0": "bad", "1": "good"}}),
        ({"train": __file__}, {"dir": "rows"}),
        ({"train": __file__}, {"subset": "other"}),
        ({"train": __file__}, {"train_split": "validation"}),
        ({"train": "owner/rows"}, {"dir": "rows"}),
    ],
)
def test_a_setting_of_rows_from_elsewhere_is_refused(source, idle):
    ((name, value),) = idle.items()
    with pytest.raises(RequestError, match=rf"data\.{name} is {re.escape(repr(value))}, but has no meaning for"):
        read_splits(DataConfig(**source, **idle))
