"""Probabilities of answers: the temperature and the calibration error are those of their definitions, and predict and
the report have them."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, read_jsonl, refused, settings, tezo, train, write_rows
from kills import contents
from short_runs import stopped

import tezo as library
from tezo.report import charts
from tezo.report.tables import MOST_CONFUSED, confusion_table
from tezo.runs.files import write_manifest
from tezo.runs.folder import FILES
from tezo.runs.reader import Counts, LabelCounts, read_run
from tezo.system.errors import RequestError
from tezo.tasks.calibration import BINS, MOST, calibration_error, fitted_temperature, probabilities, reliability
from tezo.training.loop import train as run_train
from tezo.training.opening import Answers, check_abstain
from tezo.training.settings import parse_config

# The definitions


def nll(scores, labels, temperature):
    """The negative log-likelihood, literally."""
    total = 0.0
    for row, label in zip(scores, labels, strict=True):
        exps = [math.exp(float(z) / temperature) for z in row]
        total -= math.log(exps[label] / sum(exps))
    return total


def drawn(seed, *, options=(2, 3, 5), rows=40, noise=1.0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    scores, labels = [], []
    for i in range(rows):
        count = options[i % len(options)]
        label = int(torch.randint(count, (1,), generator=generator))
        row = noise * torch.randn(count, generator=generator, dtype=torch.float64)
        row[label] += 1.0
        scores.append(scale * row)
        labels.append(label)
    return scores, labels


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [0.02, 1.0, 9.0])
def test_the_temperature_has_the_least_negative_log_likelihood(seed, scale):
    scores, labels = drawn(seed, scale=scale)
    found = fitted_temperature(scores, labels)
    least = nll(scores, labels, found)
    for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2.0):
        assert nll(scores, labels, factor * found) > least
    assert found / scale == pytest.approx(fitted_temperature(*drawn(seed)), rel=1e-9), "T goes with the scores"


def test_the_temperature_of_one_kind_of_row_is_in_closed_form():
    """Two options with a gap of d, right in k of n rows: sigmoid(d / T) = k / n."""
    scores = [torch.tensor([0.7, 0.0], dtype=torch.float64)] * 10
    found = fitted_temperature(scores, [0] * 8 + [1] * 2)
    assert found == pytest.approx(0.7 / math.log(8 / 2), rel=1e-12)
    assert float(probabilities(scores, found)[0][0]) == pytest.approx(0.8, rel=1e-12)


def test_rows_that_determine_no_temperature():
    gap = torch.tensor([2.0, 0.0])
    assert fitted_temperature([gap, gap], [0, 0]) is None, "the likelihood rises as T falls to zero"
    assert fitted_temperature([torch.zeros(3)] * 4, [0, 1, 2, 0]) is None, "the likelihood does not depend on T"
    assert fitted_temperature([gap, gap], [1, 1]) == MOST, "worse than chance: even probabilities are best"


@pytest.mark.parametrize("bins", [1, 3, BINS])
@pytest.mark.parametrize("seed", range(4))
def test_the_calibration_error_is_that_of_its_definition(seed, bins):
    generator = torch.Generator().manual_seed(seed)
    sure = [*torch.rand(50, generator=generator, dtype=torch.float64).tolist(), 0.0, 1.0, 1 / 3, 2 / 3, 0.2]
    right = [bool(value) for value in torch.randint(2, (len(sure),), generator=generator)]
    expected = 0.0
    for m in range(1, bins + 1):
        inside = [i for i, p in enumerate(sure) if (m - 1) / bins < p <= m / bins or (m == 1 and p == 0)]
        if inside:
            accuracy, confidence = (
                sum(right[i] for i in inside) / len(inside),
                sum(sure[i] for i in inside) / len(inside),
            )
            expected += len(inside) / len(sure) * abs(accuracy - confidence)
    found = reliability(sure, right, bins)
    assert calibration_error(found) == pytest.approx(expected, abs=1e-12)
    assert len(found) == bins and sum(each.rows for each in found) == len(sure)


def test_the_error_of_what_is_sure_and_wrong_is_one_and_of_what_is_as_sure_as_right_zero():
    assert calibration_error(reliability([1.0] * 4, [False] * 4)) == 1.0
    assert calibration_error(reliability([0.75] * 4, [True, True, True, False])) == 0.0
    assert calibration_error(reliability([0.5, 0.5], [True, False])) == 0.0


def test_the_error_of_a_probability_that_is_not_a_number_is_none():
    assert math.isnan(calibration_error(reliability([0.5, math.nan], [True, False])))


# Runs


WORDS = {"data__label_words": "{good: good, bad: bad}"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("sure")
    model_folder(root, "llama")
    for name, count, seed in (("train", 40, 1), ("dev", 30, 2), ("test", 50, 3)):
        rows = label_rows(count, seed=seed)
        for i, row in enumerate(rows):
            if i % 5 == 4:  # a label that the text does not tell, so that not all can be right
                row["label"] = "bad" if row["label"] == "good" else "good"
        write_rows(root / f"{name}.jsonl", rows)
    write_rows(root / "texts.jsonl", completion_rows(8, seed=1))
    asked = [{key: value for key, value in row.items() if key != "label"} for row in read_jsonl(root / "test.jsonl")]
    write_rows(root / "asked.jsonl", asked)
    flags = ("--test", root / "test.jsonl", *settings(data__dev=root / "dev.jsonl", train__keep_best=False))
    done = train(root / "llama", root / "train.jsonl", root / "run", *flags, steps=20, method="tezo", **WORDS)
    assert done.code == 0, done.err
    return root


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def bare(path):
    """Scores of the labels of rows, by the probabilities of the model without a temperature."""
    found = [row["probabilities"] for row in read_jsonl(path)]
    return [torch.tensor([row["good"], row["bad"]], dtype=torch.float64).log() for row in found]


def labels_in(path):
    return [0 if row["label"] == "good" else 1 for row in read_jsonl(path)]


def without_temperature(home, tmp_path):
    """A copy of the run that has fitted none."""
    copy = Path(shutil.copytree(home / "run", tmp_path / "bare"))
    summary = summary_of(copy)
    summary["calibration"]["temperature"] = None
    (copy / "summary.json").write_text(json.dumps(summary))
    write_manifest(copy, [name for name in (*FILES, "basis-0.safetensors") if (copy / name).exists()])
    return copy


def test_a_run_keeps_the_temperature_of_its_dev_rows_and_the_errors_of_its_test_rows(home, tmp_path):
    found, copy = summary_of(home / "run")["calibration"], without_temperature(home, tmp_path)
    for name in ("dev", "test"):
        done = tezo("predict", copy, "--input", home / f"{name}.jsonl", "--output", tmp_path / f"{name}.jsonl")
        assert done.code == 0 and done.says("the probabilities are not calibrated"), done.err
    dev, test = bare(tmp_path / "dev.jsonl"), bare(tmp_path / "test.jsonl")
    assert found["temperature"] == pytest.approx(fitted_temperature(dev, labels_in(home / "dev.jsonl")), rel=1e-3)
    assert (found["dev_rows"], found["same_rows"]) == (30, False)
    right = labels_in(home / "test.jsonl")
    hits = [int(row.argmax()) == label for row, label in zip(test, right, strict=True)]
    for key, temperature in (("after", 1.0), ("calibrated", found["temperature"])):
        sure = [float(row.max()) for row in probabilities(test, temperature)]
        assert found[key] == pytest.approx(calibration_error(reliability(sure, hits)), abs=1e-4)
    summary = summary_of(home / "run")
    for when in ("before", "after"):
        assert summary[when]["calibration_error"] == pytest.approx(found[when], abs=1e-12)
    assert sum(one["rows"] for one in found["bins"]) == 50
    assert (
        f"at a temperature of {found['temperature']:.3g}, fitted to the 30 dev rows, which are few"
        in summary["verdict"]
    )


def test_predict_has_the_probabilities_at_this_temperature_and_the_same_answers(home, tmp_path):
    temperature, copy = summary_of(home / "run")["calibration"]["temperature"], without_temperature(home, tmp_path)
    files = {}
    for name, run in (("with", home / "run"), ("without", copy)):
        files[name] = tmp_path / f"{name}.jsonl"
        done = tezo("predict", run, "--input", home / "asked.jsonl", "--output", files[name])
        assert done.code == 0 and done.says("not calibrated") == (name == "without"), done.err
    for row, plain, scores in zip(*map(read_jsonl, files.values()), bare(files["without"]), strict=True):
        assert row["prediction"] == plain["prediction"]
        expected = (scores / temperature).softmax(0)
        assert [row["probabilities"][name] for name in ("good", "bad")] == pytest.approx(expected.tolist(), abs=1e-4)
        assert row["probability"] == max(row["probabilities"].values())
    run = library.open_run(home / "run")
    own = run.probabilities(home / "asked.jsonl")
    for row, found in zip(read_jsonl(files["with"]), own, strict=True):
        assert row["probabilities"] == pytest.approx(found, abs=1e-6) and sum(found.values()) == pytest.approx(1.0)


def test_answers_less_sure_than_abstain_are_left_out_and_counted(home, tmp_path):
    run, asked = home / "run", home / "asked.jsonl"
    assert tezo("predict", run, "--input", asked, "--output", tmp_path / "all.jsonl").code == 0
    everything = read_jsonl(tmp_path / "all.jsonl")
    least = sorted(row["probability"] for row in everything)[20] - 1e-6
    done = tezo("predict", run, "--input", asked, "--output", tmp_path / "some.jsonl", "--abstain", least)
    assert done.code == 0 and read_jsonl(tmp_path / "some.jsonl") == [
        r for r in everything if r["probability"] >= least
    ]
    assert done.says("20 of 50 answers are left out: they are less probable than") and "30 answers" in done.out
    done = tezo("predict", run, "--input", asked, "--output", tmp_path / "j.jsonl", "--abstain", least, "--json")
    assert json.loads(done.out)["left_out"] == 20
    done = tezo("predict", run, "--input", asked, "--output", "-", "--abstain", 1)
    assert done.code == 0 and len(done.out.splitlines()) < 50


@pytest.mark.parametrize("least", [0, -1, 1.5, math.nan])
def test_what_no_answer_can_be_sure_of_is_refused(home, tmp_path, least):
    with pytest.raises(RequestError, match="above 0 and at most 1"):
        check_abstain(least)
    flags = ("--input", home / "asked.jsonl", "--output", tmp_path / "x.jsonl", f"--abstain={least}")
    refused(tezo("predict", home / "run", *flags), "abstain", "at most 1")
    assert not (tmp_path / "x.jsonl").exists()


def test_free_text_has_no_probabilities(home, tmp_path):
    flags = ("--input", home / "texts.jsonl", "--output", tmp_path / "x.jsonl", "--max-new-tokens", 2)
    refused(tezo("predict", home / "llama", *flags, "--abstain", 0.9), "abstain is 0.9", "free text")
    assert not (tmp_path / "x.jsonl").exists()
    assert tezo("predict", home / "llama", *flags).code == 0
    assert "probability" not in read_jsonl(tmp_path / "x.jsonl")[0]
    with pytest.raises(RequestError, match="free text"):
        Answers(["a"], [], []).as_sure_as(0.5)
    done = train(home / "llama", home / "texts.jsonl", tmp_path / "run", method="tezo")
    assert done.code == 0 and summary_of(tmp_path / "run")["calibration"] is None
    assert "calibration" not in summary_of(tmp_path / "run")["verdict"]


def test_rows_with_a_field_of_the_name_of_a_probability_are_refused(home, tmp_path):
    for name in ("probability", "probabilities"):
        rows = write_rows(tmp_path / f"{name}.jsonl", [{"text": "a film", name: 1}])
        flags = ("--input", rows, "--output", tmp_path / "x.jsonl")
        refused(tezo("predict", home / "run", *flags), f"there is a field {name!r} already")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data__hold_out": 0}, "no temperature is fitted, because there are no dev rows"),
        ({"data__hold_out": 0.3}, "dev rows, which are few: another draw of them may give another one"),
        ({}, "fitted to these rows themselves"),
    ],
    ids=str,
)
def test_a_run_says_what_its_temperature_was_fitted_to(home, tmp_path, given, words):
    more = ("--test", home / "test.jsonl") if given else ()
    done = train(home / "llama", home / "train.jsonl", tmp_path / "run", *more, method="tezo", **given, **WORDS)
    assert done.code == 0, done.err
    found = summary_of(tmp_path / "run")
    assert words in found["verdict"] and words in done.out
    assert (found["calibration"]["temperature"] is None) == (given == {"data__hold_out": 0})
    assert found["calibration"]["same_rows"] == (not given)


def test_a_run_that_goes_on_has_the_same_calibration(home, tmp_path):
    config = parse_config({
        "model": {"name": str(home / "llama"), "device": "cpu"},
        "data": {name: str(home / f"{name}.jsonl") for name in ("train", "dev", "test")},
        "method": {"name": "tezo", "rank": 4, "lr": 0.05},
        "train": {"steps": 6, "batch_size": 4, "checkpoint_every": 2},
    })  # fmt: skip
    whole = run_train(config, tmp_path / "whole")["calibration"]
    stopped(config, tmp_path / "stopped", 3)
    assert run_train(config, tmp_path / "stopped", resume=True)["calibration"] == whole
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    (tmp_path / "whole/manifest.json").unlink()  # its last files are written again
    assert run_train(config, tmp_path / "whole", resume=True)["calibration"] == whole


def test_the_calibration_error_is_no_objective(home, tmp_path):
    flags = settings(train__objective="calibration_error", method__lr=1e-3)
    refused(train(home / "llama", home / "train.jsonl", tmp_path / "x", *flags), "better when it is lower")


def test_a_damaged_temperature_is_refused(home, tmp_path):
    for value in ("hot", -1.0, 1e9):
        copy = Path(shutil.copytree(home / "run", tmp_path / f"run{value}"))
        summary = summary_of(copy)
        summary["calibration"]["temperature"] = value
        (copy / "summary.json").write_text(json.dumps(summary))
        (copy / "manifest.json").unlink()
        write_manifest(copy, [name for name in (*FILES, "basis-0.safetensors") if (copy / name).exists()])
        flags = ("--input", home / "asked.jsonl", "--output", tmp_path / "x.jsonl")
        refused(tezo("predict", copy, *flags), "summary.json")
    assert not (tmp_path / "x.jsonl").exists()


# The page


def test_the_page_has_the_bins_and_the_answers_to_each_label(home, tmp_path):
    run = read_run(home / "run")
    assert tezo("predict", home / "run", "--input", home / "test.jsonl", "--output", tmp_path / "a.jsonl").code == 0
    rows = read_jsonl(tmp_path / "a.jsonl")
    names = [one.label for one in run.answers.labels]
    counted = [[sum(r["label"] == a and r["prediction"] == b for r in rows) for b in names] for a in names]
    table = confusion_table(run.answers.labels, run.answers.confusion)
    assert [[one.value for one in cells] for _, cells in table.rows] == counted and table.head[1:] == tuple(names)
    shown = charts.reliability_chart(0, run)
    bins = [one for one in summary_of(home / "run")["calibration"]["bins"] if one["rows"]]
    assert shown.series[0].points == sorted((one["sure"], one["right"]) for one in bins)
    assert tezo("report", home / "run", "--output", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "How sure, and how often right" in page and "Answers at the end (columns)" in page


EVEN = {"rows": 1, "sure": 0.5, "right": 0.5}


@pytest.mark.parametrize(
    "damage",
    [{"bins": 3}, {"bins": [{"rows": 1}]}, {"temperature": "x", "bins": []}, 5, {"bins": [EVEN | {"rows": -1}]},
     {"bins": [EVEN | {"sure": 2}]}, {"bins": [EVEN] * 101}, {"bins": [7]}],
)  # fmt: skip
def test_a_damaged_calibration_is_no_page(home, tmp_path, damage):
    copy = Path(shutil.copytree(home / "run", tmp_path / "run"))
    (copy / "summary.json").write_text(json.dumps(summary_of(copy) | {"calibration": damage}))
    (copy / "manifest.json").unlink()
    write_manifest(copy, [name for name in (*FILES, "basis-0.safetensors") if (copy / name).exists()])
    with pytest.raises(RequestError, match=r"summary\.json: calibration is"):
        read_run(copy)


def test_of_many_labels_the_most_frequent_mistakes_are_shown():
    count = MOST_CONFUSED + 1
    labels = [LabelCounts(f"l{i}", 9, Counts(0, 0), Counts(0, 0)) for i in range(count)]
    confusion = [(i, j, 5 if i == j else i + 1) for i in range(count) for j in (i, (i + 1) % count)]
    table = confusion_table(labels, confusion)
    assert len(table.rows) == MOST_CONFUSED
    (name, (answer, rows)), last = table.rows[0], table.rows[-1]
    assert (name, answer.text, rows.value, last[1][1].value) == (f"l{count - 1}", "l0", count, 2)
    few = confusion_table(labels[:2], [(0, 0, 1), (0, 1, 2), (1, 1, 4)])
    assert [[one.value for one in cells] for _, cells in few.rows] == [[1, 2], [0, 4]]


@pytest.mark.parametrize("damage", [[[0, 2, 1]], [[0, 1]], [[0, -1, 1]], 5, [["a", 0, 1]]])
def test_damaged_counts_of_answers_are_no_page(home, tmp_path, damage):
    copy = Path(shutil.copytree(home / "run", tmp_path / "run"))
    answers = json.loads((copy / "answers.json").read_text())
    (copy / "answers.json").write_text(json.dumps(answers | {"confusion": damage}))
    (copy / "manifest.json").unlink()
    write_manifest(copy, [name for name in (*FILES, "basis-0.safetensors") if (copy / name).exists()])
    with pytest.raises(RequestError, match=r"answers\.json has no counts"):
        read_run(copy)
