"""`tezo train --dry-run` says what the run does, and writes nothing."""

import json

import pytest
from folders import completion_rows, label_rows, model_folder, refused, settings, tezo, write_rows

from tezo.training.settings import parse_config, read_config


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    home = tmp_path_factory.mktemp("dry")
    rows = write_rows(home / "rows.jsonl", label_rows(24))
    return home, ("train", "--model", model_folder(home, "opt"), "--data", rows)


FEEDBACK_RUN = settings(
    method__name="head-feedback", method__rank=2, method__lr=0.01, train__batch_size=4, train__feedback_first=2,
    train__steps=6,
)  # fmt: skip
BOTH_ENDS = [*FEEDBACK_RUN, *settings(train__feedback_last=1)]
PLAIN_RUN = settings(method__name="mezo", method__lr=0.001, train__batch_size=4, train__steps=5)


@pytest.mark.parametrize("more", [FEEDBACK_RUN, BOTH_ENDS, PLAIN_RUN], ids=["feedback first", "both ends", "mezo"])
def test_the_forecast_is_of_the_run_that_follows(given, more, tmp_path):
    home, command = given
    before = sorted(home.rglob("*"))
    done = tezo(*command, *more, "--dry-run", "--json")
    assert done.code == 0, done.err
    assert sorted(home.rglob("*")) == before
    forecast = json.loads(done.out)
    done = tezo(*command, *more, "--output", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert sum(forecast["steps"].values()) == summary["steps"]
    for key in ("method", "model", "rows", "parameters", "num_forward_passes"):
        assert forecast[key] == summary[key], key
    later = [notice for notice in summary["notices"] if notice not in forecast["notices"]]
    assert set(forecast["notices"]) <= set(summary["notices"])
    assert all(any(notice.startswith(key) for key in forecast["measured"]) for notice in later)
    assert forecast["memory"]["model"] == summary["model_bytes"]
    assert forecast["plan"] == json.loads((tmp_path / "run/plan.json").read_text())
    expected = read_config(tmp_path / "run/config.yaml", [])
    measured = {"rho": expected.method.options["rho"]} if "method.rho" in forecast["measured"] else {}
    assert parse_config(forecast["settings"]).with_options(**measured) == expected


def test_the_time_of_the_run_is_the_sum_of_its_parts(given):
    _, command = given
    forecast = json.loads(tezo(*command, *FEEDBACK_RUN, "--dry-run", "--json").out)
    seconds, steps = forecast["seconds"], forecast["steps"]
    assert steps == {"two-point": 4, "feedback": 2}
    parts = seconds["preparation"] + seconds["measurements"] + seconds["evaluations"]
    parts += sum(seconds[f"{kind} step"] * (count - 1) + seconds[f"first {kind} step"] for kind, count in steps.items())
    assert seconds["run"] == pytest.approx(parts, abs=0.01) and min(seconds.values()) > 0


def test_in_words_and_with_an_output_that_stays_unmade(given, tmp_path):
    _, command = given
    done = tezo(*command, *FEEDBACK_RUN, "--dry-run", "--output", tmp_path / "run")
    assert done.code == 0 and not (tmp_path / "run").exists(), done.err
    for said in ("nothing is written", "4 two-point", "2 feedback", "of rank 2: in forward", "MiB at the peak",
                 "label rows of text, label", "as the model reads it"):  # fmt: skip
        assert said in done.out


def test_a_run_that_cannot_start_is_refused_as_without_it(given):
    home, command = given
    refused(tezo(*command, "--dry-run", "--method", "lozzo"), "lozzo")
    rows = write_rows(home / "texts.jsonl", completion_rows(8))
    for objective, data in (("f2", ()), ("accuracy", ("--data", rows))):
        flags = (*command[:3], *(data or command[3:]), "--method", "mezo", *settings(train__objective=objective))
        refused(tezo(*flags, "--dry-run"), "train.objective: there is no metric", objective)
    adam = ("--method", "adam", *settings(train__objective="accuracy"))
    refused(tezo(*command, *adam, "--dry-run"), "train.objective is accuracy, which has no gradient")
    known = ("--method", "mezo", *settings(train__objective="accuracy"))
    assert tezo(*command, *known, "--dry-run").code == 0
    refused(tezo(*command, "--dry-run", "--output", home), f"output: {home} exists already")
    refused(tezo("train", "--model", home / "opt", "--dry-run"), "data.train is not set")
