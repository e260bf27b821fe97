"""The tasks through the command line: train, evaluate, predict, from a folder of rows; faults."""

import json
import shutil

import pytest
from folders import bpe_tokenizer, read_jsonl, refused, saved, settings, tezo, tiny_model, words_tokenizer, write_rows
from task_folders import LABEL_WORDS, models_and_tasks, rows_of, trained

from tezo.tasks.catalogue import TASKS

RUNS = [(name, kind) for name, entry in TASKS.items() for kind in entry.wordings]
METRICS = {
    "copa": {"loss", "accuracy", "calibration_error"},
    "record": {"loss", "accuracy", "calibration_error", "exact_match", "f1"},
    "squad": {"loss", "token_accuracy", "exact_match", "f1"},
    "drop": {"loss", "token_accuracy", "exact_match", "f1", "drop_exact_match", "drop_f1"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return models_and_tasks(tmp_path_factory.mktemp("home"))


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "kind"), RUNS, ids=[f"{name}-{kind}" for name, kind in RUNS])
def test_a_task_is_trained_on_evaluated_and_answered(home, tmp_path, name, kind):
    done = trained(home, name, kind, tmp_path / "run")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["rows"] == {"train": 15, "dev": 9, "test": 6}
    assert any("24 rows to train on, not 1000 +" in notice for notice in summary["notices"])
    assert set(summary["after"]) == METRICS.get(name, {"loss", "accuracy", "macro_f1", "calibration_error"})
    again = tezo("eval", tmp_path / "run", "--json")
    found = json.loads(again.out)
    assert found.pop("rows") == 6
    found.pop("notices")
    assert found == pytest.approx(summary["after"], abs=1e-5)
    file = home / "data" / name / "validation.jsonl"
    asked = tezo("predict", tmp_path / "run", "--input", file, "--output", tmp_path / "answers.jsonl")
    assert asked.code == 0, asked.err
    wording = TASKS[name].wordings[kind]
    for row in read_jsonl(tmp_path / "answers.jsonl"):
        assert ("probability" in row) == ("accuracy" in summary["after"])
        assert row.get("probability") == row.get("probabilities", {}).get(row["prediction"])
        if wording.labels:
            assert row["prediction"] in wording.labels
        elif name == "record":
            assert row["prediction"] in row["entities"]
        elif name == "copa":
            assert row["prediction"].lower() in (row["choice1"].lower(), row["choice2"].lower())


def test_a_model_as_it_is_is_measured_on_a_task(home):
    done = tezo("eval", home / "causal", "--task", "rte", "--data-dir", home / "data", "--json")
    assert done.code == 0, done.err
    assert {"accuracy", "macro_f1"} < set(json.loads(done.out))


def test_a_run_on_other_rows_is_measured_on_the_test_rows_of_a_task(home, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": f"a {i}", "label": "ab"[i % 2]} for i in range(12)])
    flags = ("--model", home / "causal", "--data", rows, "--test", rows, "--steps", 1, "--set", "method.lr=0.001")
    assert tezo("train", *flags, "--output", tmp_path / "run").code == 0
    done = tezo("eval", tmp_path / "run", "--task", "rte", "--data-dir", home / "data")
    assert done.code == 0 and done.out.startswith("6 rows of rte, test\n"), done.err


def test_tasks_are_listed_and_shown():
    listed = tezo("tasks").out.splitlines()
    assert [line.split()[0] for line in listed] == list(TASKS)
    shown = tezo("tasks", "trec").out
    assert "<mask>:" in shown and "Expression" in shown and "CogComp/trec" in shown
    everything = json.loads(tezo("tasks", "--json").out)
    assert [entry["name"] for entry in everything] == list(TASKS)
    assert all(model["prompt"] for entry in everything for model in entry["models"].values())
    refused(tezo("tasks", "snil"), "data.task", "Did you mean 'snli'")


# Faults


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--task", "wik"], ["data.task", "'wik'", "Did you mean 'wic'"]),
        (["--task", "rte", "--data", "rows.jsonl"], ["data.train", "'rows.jsonl'", "'rte'", "leave one"]),
        (["--task", "rte", "--set", "data.test=tset"], ["data.dir", "'tset'", "train, validation"]),
        (["--task", "rte", "--test", "rows.jsonl"], ["data.test", "'rows.jsonl'", "'rte'", "name of a split"]),
        (["--task", "rte", "--test", "/rows"], ["data.test", "'/rows'", "'rte'", "name of a split"]),
        (["--task", "rte", "--set", "data.train_split=trian"], ["data.dir", "'trian'", "train, validation"]),
        (["--task", "rte", "--set", "data.num_test=7"], ["data.num_test", "7", "6 rows"]),
        (["--task", "rte", "--set", "data.per_class=40"], ["data.per_class", "40", "'Yes'", "12 rows"]),
        (["--task", "squad", "--set", "data.per_class=2"], ["data.per_class", "no labels"]),
        (["--task", "snli"], ["data.task", "snli", "masked", "causal"]),
    ],
)
def test_a_task_that_cannot_be_had(home, tmp_path, flags, parts):
    always = ("--model", home / "causal", "--data-dir", home / "data", "--output", tmp_path / "out")
    refused(tezo("train", *always, *flags), *parts)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_task(home, tmp_path):
    flags = ("--model", home / "causal", "--task", "rte", "--data-dir", tmp_path, "--output", tmp_path / "out")
    refused(tezo("train", *flags), "data.dir", "rte", "no rows")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"label": 2}, ["train.jsonl, line 1", "label is 2", "0 to 1"]),
        ({"label": "yes"}, ["train.jsonl, line 1", "'label'", "str"]),
        ({"premise": None}, ["train.jsonl, line 1", "'premise'", "NoneType"]),
        ({"hypothesis": ...}, ["train.jsonl, line 1", "'hypothesis'"]),
    ],
)
def test_a_row_that_does_not_fit_its_task(home, tmp_path, change, parts):
    shutil.copytree(home / "data/rte", tmp_path / "rte")
    first, *others = rows_of("rte", 6)
    changed = {key: value for key, value in (first | change).items() if value is not ...}
    write_rows(tmp_path / "rte/train.jsonl", [changed, *others])
    flags = ("--model", home / "causal", "--task", "rte", "--data-dir", tmp_path, "--output", tmp_path / "out")
    refused(tezo("train", *flags, *settings(data__num_train=4, data__num_dev=2)), *parts)


def test_models_that_cannot_take_a_masked_task(home, tmp_path):
    tokenizer = words_tokenizer(closing=True, more=[word for word in LABEL_WORDS if word != "Maybe"])
    folder = saved(tiny_model("roberta", len(tokenizer)), tokenizer, tmp_path / "wordless")
    flags = ("--task", "snli", "--data-dir", home / "data", "--output", tmp_path / "out")
    refused(tezo("train", "--model", folder, *flags), "data.label_words", "'Maybe'", "single token")
    tokenizer = words_tokenizer(closing=True, more=LABEL_WORDS)
    tokenizer.mask_token = None
    folder = saved(tiny_model("roberta", len(tokenizer)), tokenizer, tmp_path / "maskless")
    refused(tezo("train", "--model", folder, *flags), "no mask token")


def test_a_model_too_short_for_an_answer(home, tmp_path):
    flags = ("--task", "squad", "--data-dir", home / "data", "--output", tmp_path / "out")
    tokenizer = bpe_tokenizer()
    short = saved(tiny_model("opt", len(tokenizer), max_position_embeddings=40), tokenizer, tmp_path / "short")
    refused(tezo("train", "--model", short, *flags), "max_new_tokens", "50", "40")
