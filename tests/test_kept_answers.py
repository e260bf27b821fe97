"""The answers that a run keeps are the model's own, before and after, whether or not it was ever stopped."""

import json
from dataclasses import replace

import pytest
from folders import completion_rows, model_and_rows, model_folder, read_jsonl, tezo, train, write_rows
from kills import contents
from questions import free_text, labelled
from short_runs import config, stopped

from tezo.runs.files import check_manifest
from tezo.runs.folder import ANSWERS, LOG
from tezo.runs.step_log import read_log
from tezo.system.errors import RequestError
from tezo.tasks.evaluation import predict
from tezo.tasks.objectives.objective import Encoded
from tezo.training import evaluations as kept_answers
from tezo.training import loop as training
from tezo.training.evaluations import SAMPLES, compare
from tezo.training.job import prepare


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return model_and_rows(tmp_path_factory.mktemp("home"), 12)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A model and rows of free text."""
    root = tmp_path_factory.mktemp("texts")
    model_folder(root, "opt")
    for number, name in enumerate(("train", "dev", "test")):
        write_rows(root / f"{name}.jsonl", completion_rows(8, seed=number))
    return root


def answers_in(run):
    return json.loads((run / ANSWERS).read_text())


def asked(run, rows, folder):
    """What the tuned model says to rows, by `tezo predict`."""
    output = folder / "predicted.jsonl"
    assert tezo("predict", run, "--input", rows, "--output", output).code == 0
    return [row["prediction"] for row in read_jsonl(output)]


def of_base(made):
    """What the base model says to the test rows."""
    job = prepare(made)
    try:
        return predict(job.model, job.objective, job.test, 3, 0), [row.example for row in job.test]
    finally:
        job.optimizer.close()


def test_counts_are_those_of_the_answers_that_base_and_tuned_model_give(home, tmp_path):
    made, run = config(home, guard=False, keep_best=False).with_options(lr=0.03), tmp_path / "run"
    before, examples = of_base(made)
    training.train(made, run)
    after = asked(run, home / "test.jsonl", tmp_path)
    right = [example.name_of(example.label) for example in examples]
    found, summary = answers_in(run), json.loads((run / "summary.json").read_text())
    assert (found["rows"], found["of"], [entry["label"] for entry in found["labels"]]) == (12, 12, sorted(set(right)))
    assert before != after
    for when, given in (("before", before), ("after", after)):
        pairs = list(zip(right, given, strict=True))
        for entry in found["labels"]:
            name = entry["label"]
            assert entry["rows"] == right.count(name)
            assert entry[when] == {"answered": given.count(name), "right": pairs.count((name, name))}
        hits = sum(entry[when]["right"] for entry in found["labels"])
        assert hits / 12 == pytest.approx(summary[when]["accuracy"])
    changed = sum(b != r and a == r for b, a, r in zip(before, after, right, strict=True))
    assert found["outcomes"]["wrong before, right after"] == changed
    assert sum(found["outcomes"].values()) == 12
    for row in found["shown"]:
        place = int(row["row"].rpartition(" ")[2]) - 1
        assert (row["right"], row["before"], row["after"]) == (right[place], before[place], after[place])
        assert row["text"] == examples[place].prompt.strip()
        assert row["outcome"] == kept_answers.OUTCOMES[before[place] == right[place], after[place] == right[place]]


def test_a_run_that_was_stopped_keeps_the_answers_before_its_first_step(home, texts, tmp_path):
    for number, root in enumerate((home, texts)):
        made, whole, run = (
            config(root, guard=False, keep_best=False).with_options(lr=0.03),
            tmp_path / f"whole-{number}",
            tmp_path / f"run-{number}",
        )
        training.train(made, whole)
        stopped(made, run, 5)
        assert not (run / ANSWERS).exists()
        training.train(made, run, resume=True)
        assert (run / ANSWERS).read_bytes() == (whole / ANSWERS).read_bytes()
        assert contents(run) == contents(whole)
        log = read_log(run / LOG)
        assert log.answers["test", 0] != log.answers["test", len(log.steps)]
        assert {split for split, _ in log.answers} == {"test"}


def test_a_changed_file_of_answers_is_found(home, tmp_path):
    training.train(config(home), tmp_path / "run")
    path = tmp_path / "run" / ANSWERS
    path.write_text(path.read_text().replace('"of": 12', '"of": 13'))
    with pytest.raises(RequestError, match=r"answers\.json is not the file that was saved"):
        check_manifest(tmp_path / "run", [ANSWERS])


def test_free_text_is_answered_for_the_first_rows_and_printed_as_it_is_kept(texts, tmp_path):
    done = train(texts / "opt", texts / "train.jsonl", tmp_path / "run", "--test", texts / "test.jsonl")
    assert done.code == 0, done.err
    found = answers_in(tmp_path / "run")
    assert "labels" not in found and len(found["shown"]) == SAMPLES and found["of"] == 8
    rows = read_jsonl(texts / "test.jsonl")
    after = asked(tmp_path / "run", texts / "test.jsonl", tmp_path)
    for number, shown in enumerate(found["shown"]):
        assert (shown["text"], shown["right"]) == (rows[number]["prompt"], rows[number]["completion"].strip())
        assert after[number].strip().startswith(shown["after"][:20])  # predict's answers are longer
        assert done.says(f"sample of test.jsonl, line {number + 1}", f"before {shown['before'][:200]}")


def test_the_longest_answer_leaves_room_for_the_longest_prompt(texts, tmp_path):
    long = completion_rows(4)
    for row in long:
        row["prompt"] = " ".join(["the"] * 150)  # of 158 positions
    test = write_rows(tmp_path / "test.jsonl", long)
    done = train(texts / "opt", texts / "train.jsonl", tmp_path / "run", "--test", test)
    assert done.code == 0, done.err
    assert all(1 <= len(row["after"].split()) <= 8 for row in answers_in(tmp_path / "run")["shown"])


def test_of_too_many_answers_the_first_are_kept_and_counted(home, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_answers, "MOST_BYTES", 5 * len('"good", '))
    training.train(config(home), tmp_path / "run")
    found = answers_in(tmp_path / "run")
    assert 0 < found["rows"] < found["of"] == 12
    assert sum(entry["rows"] for entry in found["labels"]) == found["rows"] == sum(found["outcomes"].values())


def encoded(*examples):
    return [Encoded(((1, 2),), (1,), example) for example in examples]


def test_rows_without_common_options_are_counted_by_outcome_alone():
    first, second = labelled(count=2)
    rows = encoded(replace(first, options=(" x", " y"), label=1, right=(0, 1)), second)
    found = compare(rows, ["y", "no"], ["x", second.name_of(second.label)])
    assert found["labels"] == []
    assert found["outcomes"]["right before and after"] == found["outcomes"]["wrong before, right after"] == 1
    assert [row["right"] for row in found["shown"]] == [second.name_of(second.label), "x or y"]


def test_what_has_no_right_answer_or_no_answer_before_is_not_compared():
    example = labelled(count=1)[0]
    assert compare(encoded(replace(example, label=None)), ["good"], ["bad"]) is None
    assert compare(encoded(example), [], ["bad"]) is None
    assert compare(encoded(*free_text(1)), ["a"], []) is None


def test_a_long_text_is_cut_in_its_middle():
    (example,) = free_text(1)
    (shown,) = compare(encoded(replace(example, prompt="a" * 500 + "b" * 500)), ["x"], ["y" * 700])["shown"]
    half = kept_answers.MOST_CHARACTERS // 2
    assert shown["text"] == f"{'a' * half} \N{HORIZONTAL ELLIPSIS} {'b' * half}" and len(shown["after"]) < 700


def test_rows_of_a_label_that_was_never_answered_or_never_right_count_as_none():
    options = (" good", " bad", " fine")
    example = replace(labelled(count=1)[0], options=options, label=0)
    found = compare(encoded(example, example), ["bad", "bad"], ["good", "bad"])
    assert [(e["rows"], e["before"], e["after"]) for e in found["labels"]] == [
        (2, {"answered": 0, "right": 0}, {"answered": 1, "right": 1}),
        (0, {"answered": 2, "right": 0}, {"answered": 1, "right": 0}),
        (0, {"answered": 0, "right": 0}, {"answered": 0, "right": 0}),
    ]


def test_a_run_whose_base_was_measured_by_an_earlier_version_ends_without_them(home, tmp_path, monkeypatch):
    made, run = config(home), tmp_path / "run"
    with monkeypatch.context() as earlier:
        earlier.setattr("tezo.training.evaluations.answers_to_keep", lambda *_: [])
        stopped(made, run, 5)
    training.train(made, run, resume=True)
    assert not (run / ANSWERS).exists() and (run / "summary.json").exists()
