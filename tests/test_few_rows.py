"""Few labelled rows: all are learnt from, in one step, and no few dev rows choose."""

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, write_rows

import tezo
from tezo.methods import METHODS
from tezo.tasks.splits import are_few
from tezo.training.job import prepare
from tezo.training.rows_of_steps import looked_and_stepped
from tezo.training.settings import parse_config

MOST_FEW = 104


def test_few_rows_are_those_of_which_three_tenths_cannot_judge():
    assert [count for count in range(1, 400) if are_few(count)] == list(range(1, MOST_FEW + 1))


def job_of(folder, count: int, *, dev: int = 0, test: int = 20, rows=label_rows, method="gauss-newton", **data):
    files = {"train": count, "dev": dev, "test": test}
    for part, size in files.items():
        if size:
            write_rows(folder / f"{part}.jsonl", rows(size, seed=len(part)))
    model_folder(folder, "llama")
    paths = {part: str(folder / f"{part}.jsonl") for part, size in files.items() if size}
    return prepare(
        parse_config({"model": {"name": str(folder / "llama")}, "data": paths | data, "method": {"name": method}})
    )


@pytest.mark.parametrize("count", [24, MOST_FEW])
def test_all_of_few_rows_are_looked_at_and_stepped_on_and_no_row_judges(tmp_path, count):
    job = job_of(tmp_path, count)
    assert len(job.train) == count and not job.dev and job.held_out is None
    train = job.config.train
    assert (train.num_steps, train.guard, train.rows_per_step) == (1, False, count)
    assert any(f"all {count} training rows are learnt from" in notice for notice in job.notices)
    seen = job.optimizer._rows(1, 1024)
    assert len(seen.outputs().labels_T) == seen.stepped == count
    job.optimizer.close()


@torch.no_grad()
@pytest.mark.parametrize(("count", "dev"), [(24, 0), (MOST_FEW, 0), (40, 40), (400, 0)])
def test_the_first_rows_of_a_look_are_those_of_its_step(tmp_path, count, dev):
    job = job_of(tmp_path, count, dev=dev)
    for step in (0, 1):
        rows = job.sampler().rows(step)
        of_step = job.objective.closure(job.model, job.batches(rows)).outputs()
        seen = job.optimizer._rows(step, 1024)
        of_look = seen.outputs()
        assert seen.stepped == len(rows) == len({*rows})
        first = of_look.example_T < len(rows)
        assert torch.equal(of_look.labels_T[first], of_step.labels_T)
        torch.testing.assert_close(of_look.scores_TC[first], of_step.scores_TC)
    job.optimizer.close()


@pytest.mark.parametrize(
    ("case", "train", "dev"),
    [
        ({"count": MOST_FEW + 1}, 73, 32),  # not few
        ({"count": 40, "test": 0}, 28, 12),  # nothing else would tell of the result
        ({"count": 40, "hold_out": 0.25}, 30, 10),  # asked for
        ({"count": 40, "num_dev": 8}, 32, 8),
        ({"count": 40, "method": "head-feedback"}, 28, 12),  # it measures its rate on dev rows
        ({"count": 40, "rows": completion_rows}, 28, 12),
        ({"count": 40, "dev": 40}, 40, 40),
    ],
)
def test_other_rows_are_held_out_as_ever(tmp_path, case, train, dev):
    job = job_of(tmp_path, **case)
    assert (len(job.train), len(job.dev)) == (train, dev)
    is_few = case["count"] <= MOST_FEW and dev < 32 and case.get("method") is None and case.get("rows") is None
    assert (job.config.train.guard is False) == is_few
    assert (job.config.train.num_steps == 1) == is_few
    if case.get("method") is None and case.get("rows") is None:
        assert (job.held_out is None) == is_few
    job.optimizer.close()


def test_a_guard_that_is_asked_for_and_steps_that_are_given_stay(tmp_path):
    write_rows(tmp_path / "rows.jsonl", label_rows(40))
    job = prepare(
        parse_config({"model": {"name": str(model_folder(tmp_path, "llama"))},
                      "data": {"train": str(tmp_path / "rows.jsonl")}, "method": {"name": "gauss-newton"},
                      "train": {"guard": True, "steps": 5}})
    )  # fmt: skip
    assert job.config.train.guard and job.config.train.num_steps == 5 and job.held_out is not None
    looked, stepped = looked_and_stepped(job.config, 28, judged=True)
    assert looked == stepped == range(28)
    job.optimizer.close()


def test_steps_of_some_of_few_rows_are_as_many_as_ever(tmp_path):
    write_rows(tmp_path / "test.jsonl", label_rows(20, seed=4))
    files = {"train": str(write_rows(tmp_path / "rows.jsonl", label_rows(40))), "test": str(tmp_path / "test.jsonl")}
    model = {"name": str(model_folder(tmp_path, "llama"))}
    job = prepare(parse_config({"model": model, "data": files, "train": {"batch_size": 8}}))
    assert (job.config.train.num_steps, job.config.train.rows_per_step) == (METHODS["gauss-newton"].steps, 8)
    job.optimizer.close()


def test_a_run_that_took_no_step_says_so(tmp_path):
    rows = [{"text": "the same text", "label": label} for label in ("good", "bad")] * 12
    model = str(model_folder(tmp_path, "llama"))
    run = tezo.train(model, rows, test=rows, rank=1, output=tmp_path / "run", progress=False)  # no column is a bias
    assert run.summary["idle_steps"] == run.summary["steps"] == 1
    assert "No step was taken" in run.summary["verdict"]


def test_a_probe_of_few_rows_is_one_step(tmp_path):
    job = job_of(tmp_path, 24, method="probe")
    assert job.config.train.num_steps == 1 and job.config.train.guard is False
    job.optimizer.close()


def test_a_run_of_few_rows_keeps_its_last_step(tmp_path):
    rows, model = label_rows(60, seed=1), model_folder(tmp_path, "llama")
    run = tezo.train(str(model), rows[:24], test=rows[24:], output=tmp_path / "run", progress=False)
    assert run.summary["rows"] == {"train": 24, "dev": 0, "test": 36}
    assert run.summary["kept_step"] == run.summary["steps"] == 1
