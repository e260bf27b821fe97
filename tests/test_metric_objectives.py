"""Objectives that are no losses: metrics, which a run without gradients can climb."""

import json

import pytest
from cases import tuples_mostly_slow
from folders import label_rows, read_jsonl, refused, saved, settings, tezo, tiny_model, words_tokenizer, write_rows
from task_folders import models_and_tasks, trained


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return models_and_tasks(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize(
    ("name", "objective"),
    tuples_mostly_slow(
        [("sst2", "accuracy"), ("copa", "accuracy"), ("squad", "f1"), ("drop", "drop_f1")],
        ("copa", "accuracy"),
        ("squad", "f1"),
    ),
)
def test_a_metric_is_an_objective(home, tmp_path, name, objective):
    done = trained(home, name, "causal", tmp_path / "run", train__objective=objective, train__log_every=1)
    assert done.code == 0, done.err
    (line,) = [line for line in read_jsonl(tmp_path / "run/metrics.jsonl") if "projected_grads" in line]
    assert -1 <= line["loss"] <= 0


def test_the_accuracy_of_a_separable_task_grows_by_its_own_objective(tmp_path):
    tokenizer = words_tokenizer()
    model = saved(tiny_model("opt", len(tokenizer)), tokenizer, tmp_path / "opt")
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(16))
    flags = ("--model", model, "--data", rows, "--test", rows, "--method", "mezo-norm", "--json")
    named = {"method__lr": 0.03, "method__rho": 0.1, "train__batch_size": 16, "train__objective": "accuracy",
             "train__keep_best": False, "data__hold_out": 0}  # fmt: skip
    done = tezo("train", *flags, "--steps", 100, "--output", tmp_path / "run", *settings(**named))
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["before"]["accuracy"] < 0.7 and summary["after"]["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("name", "values", "parts"),
    [
        ("sst2", {"train__objective": "acuracy"}, ["train.objective", "'acuracy'", "Did you mean 'accuracy'"]),
        ("squad", {"train__objective": "accuracy"}, ["train.objective", "'accuracy'", "token_accuracy"]),
        ("sst2", {"train__objective": "accuracy", "method__name": "adam", "method__rank": None},
         ["train.objective", "accuracy", "no gradient"]),
    ],
)  # fmt: skip
def test_objectives_that_cannot_be_had(home, tmp_path, name, values, parts):
    values = {key: value for key, value in ({"method__rank": 4} | values).items() if value is not None}
    flags = ("--model", home / "causal", "--task", name, "--data-dir", home / "data", "--output", tmp_path / "out")
    refused(tezo("train", *flags, *settings(**values)), *parts)
    assert not (tmp_path / "out").exists()
