"""Runs with feedback steps: counted, stopped and gone on with, taken again from their folder, shared by ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cases import mostly_slow, tuples_mostly_slow
from folders import (
    completion_rows,
    label_rows,
    model_and_rows,
    model_folder,
    read_jsonl,
    refused,
    saved,
    tezo,
    tiny_model,
    tokenizer_for,
    write_rows,
)  # fmt: skip
from folders import train as trained
from kills import contents
from short_runs import STEPS, config, result, same, stopped
from test_ranks import ranks, recipe, records

from tezo.optim.estimators.feedback import DirectFeedback
from tezo.runs.folder import LOG
from tezo.runs.reader import read_run
from tezo.runs.step_log import read_log
from tezo.system.errors import RequestError
from tezo.training.job import prepare
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.rows_of_steps import EARLY_RATE, LEAST_STEPS
from tezo.training.settings import read_config

FIRST, LAST = 3, 4


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return model_and_rows(tmp_path_factory.mktemp("home"), 10)


def made(home: Path, **more):
    return config(home, "head-feedback", **{"feedback_first": FIRST, "feedback_last": LAST} | more)


def test_a_run_that_stops_in_or_between_phases_goes_on_to_the_bit(home, tmp_path):
    summary = train(made(home), tmp_path / "whole")
    apart = 2  # passes of the first step with directions, which check that rows are apart
    assert summary["num_forward_passes"] == FIRST + 2 + 2 * (STEPS - FIRST - LAST) + apart + LAST + 2
    for step in (0, 1, 2, 3, 4, 6, 7, STEPS - 1):
        stopped(made(home), tmp_path / "run", step)
    train(made(home), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_folder_alone_gives_the_tuned_model_of_every_step(home, tmp_path):
    whole = train(made(home, keep_best=False), tmp_path / "run")
    replay(tmp_path / "run", tmp_path / "again")
    assert whole["result"]["kind"] == "adapter" and same(result(tmp_path / "again"), result(tmp_path / "run"))
    for steps in range(1, STEPS):
        stopped(made(home, keep_best=False), tmp_path / f"short{steps}", steps - 1)
        outputs = tmp_path / f"part{steps}", tmp_path / f"end{steps}"
        replay(tmp_path / "run", outputs[0], step=steps)
        replay(tmp_path / f"short{steps}", outputs[1])
        assert same(result(outputs[0]), result(outputs[1]))


def test_what_a_step_measured_is_needed_and_named(home, tmp_path):
    train(made(home), tmp_path / "run")
    missing = tmp_path / "run" / f"feedback-{STEPS - 1}.safetensors"
    missing.unlink()
    with pytest.raises(RequestError, match=rf"feedback-{STEPS - 1}.safetensors is missing, and steps from"):
        replay(tmp_path / "run", tmp_path / "out", step=STEPS)
    assert replay(tmp_path / "run", tmp_path / "out", step=STEPS - 1)["steps"] == STEPS - 1
    damaged = tmp_path / "run" / "feedback-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    refused(
        tezo("replay", tmp_path / "run", "--output", tmp_path / "two", "--step", STEPS),
        "feedback-1.safetensors",
        "not the file that this run wrote",
    )


def test_the_log_tells_steps_apart_and_passes_are_counted_from_it(home, tmp_path):
    summary = train(made(home), tmp_path / "run")
    steps = read_log(tmp_path / "run" / LOG).steps
    assert [len(record.probes) for record in steps] == [0] * FIRST + [4] * (STEPS - FIRST - LAST) + [0] * LAST
    run = read_run(tmp_path / "run")
    assert run.passes == [0, 3, 4, 5, 9, 11, 14, 15, 16, 17] and run.passes[-1] == summary["num_forward_passes"]
    assert [line["projected_grads"] == [] for line in read_jsonl(tmp_path / "run/metrics.jsonl")
            if "seconds" in line] == [True, False, True, True]  # fmt: skip
    assert [record.rule for record in steps] == ["feedback" if not record.probes else "two-point" for record in steps]
    assert tezo("report", tmp_path / "run", "--output", tmp_path / "report.html").code == 0


def test_the_schedule_of_the_rate_holds_for_them_too(home, tmp_path):
    train(made(home), tmp_path / "run")
    rates = [step.lr for step in read_log(tmp_path / "run" / LOG).steps]
    scale = [0.3 * EARLY_RATE] * FIRST + [1.0] * (STEPS - FIRST - LAST) + [0.3] * LAST
    assert rates == pytest.approx([3e-3 * (1 - i / STEPS) * s for i, s in enumerate(scale)])


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"method": "tezo", "train__feedback_first": 1}, ("train.feedback_first is 1", "tezo", "head-feedback")),
        ({"train__feedback_last": 4}, ("train.feedback_last is 4", "3 steps")),
        ({"train__feedback_last": -1}, ("train.feedback_last is -1", "at least 0")),
        ({"train__feedback_last": 1, "train__objective": "accuracy"}, ("train.feedback_last is 1", "no gradient")),
    ],
)
def test_what_does_not_fit_is_refused(home, tmp_path, more, parts):
    more = {"method": "head-feedback"} | more
    refused(trained(home / "opt", home / "train.jsonl", tmp_path / "out", steps=3, **more), *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("steps", "method", "rows", "expected"),
    [
        (1000, "head-feedback", "train", (15, 60)),
        (100, "head-feedback", "train", (5, 20)),
        (99, "head-feedback", "train", (0, 0)),
        (1000, "head-feedback", "completions", (15, 60)),
        (1000, "tezo", "train", (0, 0)),
    ],
)
def test_what_is_left_open_goes_by_steps_and_method_whatever_the_rows(home, steps, method, rows, expected):
    write_rows(home / "completions.jsonl", completion_rows(6))
    wanted = config(home, method, steps=steps, feedback_first=None, feedback_last=None)
    wanted = replace(wanted, data=replace(wanted.data, train=str(home / f"{rows}.jsonl"), dev=None, test=None))
    job = prepare(wanted)
    assert (job.config.train.feedback_first, job.config.train.feedback_last) == expected
    half = prepare(replace(wanted, train=replace(wanted.train, feedback_last=0))).config.train
    assert (half.feedback_first, half.feedback_last) == (expected[0], 0)


def test_where_no_layer_qualifies_a_default_is_left_out_and_said_and_a_wish_refused(home, tmp_path):
    settings = {"method": "head-feedback", "method__targets": "[q_proj]", "steps": 100}
    done = trained(home / "opt", home / "train.jsonl", tmp_path / "run", **settings)
    assert done.code == 0 and done.says("note: there are no feedback steps", "no tuned layer")
    assert not list((tmp_path / "run").glob("feedback-*"))
    done = trained(home / "opt", home / "train.jsonl", tmp_path / "out", **settings, train__feedback_first=1)
    refused(done, "no tuned layer", "method.targets")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "flags"),
    tuples_mostly_slow(
        [("bert", ()), ("roberta", ()), ("qwen2", ()), ("gpt2", ()), ("wide opt", ("--quantization", "nf4")),
         ("opt", ("--quantization", "int8wo")), ("opt", ("--set", "model.dtype=bfloat16"))],
        ("bert", ()), ("qwen2", ()), ("wide opt", ("--quantization", "nf4")),
    ),
)  # fmt: skip
def test_every_kind_of_model_takes_them_and_ends_as_an_adapter(tmp_path, family, flags):
    if family == "wide opt":  # a CPU unpacks no narrower layers
        tokenizer, sizes = tokenizer_for("opt"), {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
        folder = saved(tiny_model("opt", len(tokenizer), **sizes), tokenizer, tmp_path / "wide")
    else:
        folder = model_folder(tmp_path, family)
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(24))
    done = trained(folder, rows, tmp_path / "run", *flags, steps=6, method="head-feedback", train__feedback_first=2,
                   train__feedback_last=2, method__lr=1e-3)  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    apart = 0 if family == "bert" else 2  # passes that check that rows are apart; an encoder's share their directions
    assert summary["result"]["kind"] == "adapter" and summary["num_forward_passes"] == 4 + 4 + apart + 4
    assert tezo("eval", tmp_path / "run", "--data", rows).code == 0


@pytest.mark.parametrize("share", mostly_slow(["rows", "directions"], "rows"))
def test_ranks_take_the_steps_of_one_process(home, tmp_path, share):
    settings = {"feedback_first": 2, "feedback_last": 1, "parallel": share}
    path = recipe(home, tmp_path, "head-feedback", 2, **settings)
    done = ranks(2, path, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    train(read_config(path, []), tmp_path / "alone")
    for one, other in zip(records(tmp_path / "run"), records(tmp_path / "alone"), strict=True):
        assert len(one.probes) == len(other.probes) and one.loss == pytest.approx(other.loss, rel=1e-5)


def test_explicit_zeros_search_no_layers(home, monkeypatch):
    searched = []
    monkeypatch.setattr(DirectFeedback, "check", lambda *_: searched.append(1))
    for first, last, searches in ((0, 0, 0), (None, 0, 1), (0, None, 1), (3, 0, 1)):
        searched.clear()
        settings = config(home, "head-feedback", steps=LEAST_STEPS, feedback_first=first, feedback_last=last)
        resolved = prepare(settings).config.train
        assert len(searched) == searches
        assert resolved.feedback_first == (first if first is not None else 5)
        assert resolved.feedback_last == (last if last is not None else 20)
