"""Examples to samples: so many of each class, or a share held out, by the seed."""

import json

import pytest
from folders import label_rows, model_folder, train, write_rows

from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.row_files import DataConfig
from tezo.tasks.splits import _held_out, count_held_out, hold_out, per_class


def examples(count: int) -> list[Example]:
    return [Example(f"text {i}", "", ("a", "b", "c"), i % 3, f"line {i}") for i in range(count)]


def test_per_class_takes_so_many_of_each_by_the_seed():
    pool = examples(60)
    labels, names = [e.label for e in pool], ["a", "b", "c"]
    train, dev = per_class(labels, [7, 5], names, seed=0)
    assert [sum(labels[i] == k for i in train) for k in range(3)] == [7, 7, 7]
    assert [sum(labels[i] == k for i in dev) for k in range(3)] == [5, 5, 5]
    assert len({*train, *dev}) == 36
    assert (train, dev) == (sorted(train), sorted(dev))
    assert [train, dev] == per_class(labels, [7, 5], names, seed=0)
    assert train != per_class(labels, [7, 5], names, seed=1)[0]
    assert per_class(labels, [20], names, seed=5) == [list(range(60))]
    with pytest.raises(RequestError, match=r"data\.per_class is 21, but label 'a' has 20 rows"):
        per_class(labels, [21], names, seed=0)


def test_where_a_label_has_too_few_rows_they_are_shared_out_if_asked():
    labels = [0] * 9 + [1] * 100
    with pytest.raises(RequestError, match=r"data\.per_class is 10 and as many dev rows, but label 'a' has 9 rows"):
        per_class(labels, [10, 10], ["a", "b"], seed=0)
    train, dev = per_class(labels, [10, 10], ["a", "b"], seed=0, fewer=True)
    assert [sum(labels[i] == k for i in train) for k in range(2)] == [4, 10]
    assert [sum(labels[i] == k for i in dev) for k in range(2)] == [4, 10]
    assert not {*train} & {*dev}


SHARES = [(2, None, 1), (20, None, 6), (60, None, 18), (107, None, 32), (400, None, 40), (9000, None, 500),
          (60, 0.1, 6), (60, 0.5, 30), (40, 0.01, 1), (9000, 0.2, 500)]  # fmt: skip


@pytest.mark.parametrize(("count", "share", "expected"), SHARES)
def test_held_out_rows_have_the_labels_in_proportion(count, share, expected):
    pool = examples(count)
    groups = ["rare" if i % 5 == 0 else "often" for i in range(count)]
    assert count_held_out(count, share) == expected
    kept, held = hold_out(pool, groups, expected, seed=0)
    assert len(held) == expected and sorted(kept + held, key=lambda e: int(e.where.removeprefix("line "))) == pool
    assert (kept, held) == hold_out(pool, groups, expected, seed=0)
    assert held != hold_out(pool, groups, expected, seed=2)[1] or count == 2
    names = dict(zip((e.where for e in pool), groups, strict=True))
    of_rare = sum(names[e.where] == "rare" for e in held)
    assert abs(of_rare - expected * groups.count("rare") / count) <= 1
    with pytest.raises(RequestError, match=f"has {count} row.*too few to hold {count} out.*data.hold_out=0"):
        hold_out(pool, groups, count, seed=0)


def test_a_share_that_is_held_out_takes_no_label_away(tmp_path):
    rows = [{"text": f"row {i}", "label": f"label {i % 12}"} for i in range(24)]
    data = DataConfig(train=str(write_rows(tmp_path / "rows.jsonl", rows)), hold_out=0.3)
    for seed in range(5):
        kept, held = _held_out(rows, data, seed)
        assert len(held) == 7 and {row["label"] for row in kept} == {row["label"] for row in rows}


def test_a_run_is_not_tested_on_rows_it_was_trained_on(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", label_rows(20))
    done = train(model_folder(tmp_path, "opt"), data, tmp_path / "run", "--json", data__per_class=3, data__hold_out=0.2)
    assert done.code == 0, done.err
    assert json.loads(done.out)["rows"] == {"train": 6, "dev": 4, "test": 0}
