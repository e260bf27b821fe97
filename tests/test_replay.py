"""A base and a log alone give the tuned model; what a log cannot give is refused."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ONE_OF_EACH_KIND, mostly_slow
from folders import model_and_rows, model_folder, refused, tezo
from short_runs import STEPS, config, result, same, stopped

from tezo.optim.estimators.estimate import StepRecord
from tezo.optim.methods import METHODS
from tezo.runs.folder import LOG
from tezo.runs.step_log import End, StepLog, read_log
from tezo.system.errors import RequestError
from tezo.system.files import new_folder
from tezo.training.api import open_run
from tezo.training.loop import train
from tezo.training.replay import replay


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = model_and_rows(tmp_path_factory.mktemp("home"), 10)
    model_folder(root, "opt", dtype=torch.bfloat16)
    return root


@pytest.mark.parametrize("name", mostly_slow(METHODS, *ONE_OF_EACH_KIND))
def test_base_and_log_alone_give_the_tuned_model(home, tmp_path, name):
    train(config(home, name), tmp_path / "run")
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in (tmp_path / "run" / LOG, *(tmp_path / "run").glob("basis-*")):  # what was computed from data is no draw
        shutil.copy(file, alone / file.name)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    done = replay(alone, tmp_path / "out")
    assert done["steps"] == summary["kept_step"]
    assert done["result"]["kind"] == summary["result"]["kind"]
    assert same(result(tmp_path / "out"), result(tmp_path / "run"))
    assert replay(alone, tmp_path / "all", step=STEPS)["steps"] == STEPS


def figures(folder: Path) -> dict[str, Any]:
    done = tezo("eval", folder, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("name", ["tezo-cadam", "mezo", "head-feedback"])
def test_a_replay_is_opened_as_the_run(home, tmp_path, name):
    made, run, again = config(home, name, feedback_first=1), tmp_path / "run", tmp_path / "again"
    train(made if name == "head-feedback" else config(home, name), run)
    summary = json.loads((run / "summary.json").read_text())
    replay(run, again)
    assert figures(again) == figures(run)
    assert {path.name for path in again.iterdir()} - {path.name for path in run.iterdir()} == set()
    opened = open_run(again)
    assert opened.evaluate() == open_run(run).evaluate() and "replayed" in repr(opened)
    assert tezo("predict", again, "--input", home / "test.jsonl", "--output", tmp_path / "answers.jsonl").code == 0
    for form in ["merged"] if name == "mezo" else ["merged", "lora"]:
        assert tezo("export", again, "--format", form, "--output", tmp_path / form).code == 0
        card = tmp_path / form / "README.md"
        assert form == "merged" or "Metrics" not in card.read_text()
    log = read_log(again / LOG)
    assert len(log.steps) == summary["kept_step"] and log.end == End(summary["kept_step"], summary["kept_step"])
    replay(again, tmp_path / "twice")
    assert same(result(tmp_path / "twice"), result(run))
    refused(tezo("train", "--output", again, "--resume"), f"{again} is what tezo replay made")
    file = next(again.glob("[am]*/*model.safetensors"))
    file.write_bytes(file.read_bytes() + b"\0")
    refused(tezo("eval", again), "is not the file that was saved")


def test_a_replay_of_some_steps_of_a_killed_run_of_a_base_that_moved_is_opened(home, tmp_path):
    stopped(config(home, "tezo"), tmp_path / "run", 6)
    moved = shutil.copytree(home / "opt", tmp_path / "moved")
    for step in (0, 4):
        done = tezo("replay", tmp_path / "run", "--step", step, "--model", moved, "--output", tmp_path / f"{step}")
        assert done.code == 0, done.err
    whole = [read_log(tmp_path / "run" / LOG).evaluations["test", 0], figures(tmp_path / "0")]
    assert whole[0]["loss"] == pytest.approx(whole[1]["loss"], abs=1e-6)
    assert figures(tmp_path / "4")["loss"] != figures(tmp_path / "0")["loss"]
    assert str(moved) in (tmp_path / "4/config.yaml").read_text() and len(read_log(tmp_path / "4" / LOG).steps) == 4


def test_what_replay_cannot_do_it_says(home, tmp_path):
    run = tmp_path / "run"
    train(config(home, "adam"), run)
    refused(tezo("replay", run, "--output", tmp_path / "out"), "method.name", "adam", "gradients")
    refused(tezo("replay", tmp_path, "--output", tmp_path / "out"), "has no steps.log")
    train(config(home), tmp_path / "second")
    for step in (-1, 99):
        done = tezo("replay", tmp_path / "second", "--output", tmp_path / "out", "--step", step)
        refused(done, f"step is {step}, and the log has {STEPS} steps; give one from 0 to that number.")
    refused(tezo("replay", tmp_path / "second", "--output", run), "output", "exists already")
    assert not (tmp_path / "out").exists()
    done = tezo("replay", tmp_path / "second", "--output", tmp_path / "out")
    assert done.code == 0 and str(tmp_path / "out/adapter") in done.out


KILLED = """
import os, pathlib, signal, sys
from tezo.system.files import new_folder
with new_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "adapter_config.json").write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_replay_left_does_not_stop_the_next_and_a_live_one_does(home, tmp_path):
    train(config(home), tmp_path / "run")
    (tmp_path / "place").mkdir()
    out, left = tmp_path / "place/out", tmp_path / "place/.out.partial"
    done = subprocess.run([sys.executable, "-c", KILLED, out], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(out.parent.iterdir()) == [left]
    again = ("replay", tmp_path / "run", "--output", out)
    with new_folder(out):
        refused(tezo(*again), "output", "another process is writing")
        with pytest.raises(RequestError, match="another process is writing"), new_folder(out):
            pass
        assert left.is_dir()
    shutil.rmtree(out)
    subprocess.run([sys.executable, "-c", KILLED, out], check=False)
    assert tezo(*again).code == 0
    assert same(result(out), result(tmp_path / "run"))
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("name", "changes", "portable"),
    [("tezo", {}, True), ("tezo-m", {}, True), ("tezo-cadam", {}, True), ("tezo-adam", {}, True), ("subzo", {}, True),
     ("mezo", {}, False), ("lozo", {}, False), ("zo-adamu", {}, False), ("tezo-adam", {"model": "optbfloat16"}, False),
     ("tezo-cadam", {"model": "optbfloat16"}, True)],
)  # fmt: skip
def test_on_another_device_what_was_drawn_on_the_first_is_refused(home, tmp_path, name, changes, portable):
    run = tmp_path / "run"
    train(config(home, name, keep_best=False, **changes), run)
    found = read_log(run / LOG)
    elsewhere = rewritten(tmp_path / "elsewhere", found.header | {"device": "cuda"}, found.steps)
    if not portable:
        with pytest.raises(RequestError, match=r"model.device is cpu, and the run drew noise for .* on cuda"):
            replay(elsewhere, tmp_path / "out")
        return
    done = replay(elsewhere, tmp_path / "out")
    assert any("began on cuda" in notice for notice in done["notices"])
    assert same(result(tmp_path / "out"), result(run))


@pytest.mark.parametrize(("name", "drawn"), [("tezo", False), ("mezo", True), ("lozo", True)])
def test_dense_noise_of_another_version_of_the_generator_is_refused(home, tmp_path, name, drawn):
    run = tmp_path / "run"
    train(config(home, name, keep_best=False), run)
    found = read_log(run / LOG)
    earlier = rewritten(tmp_path / "earlier", found.header | {"noise": 1}, found.steps)
    if drawn:
        with pytest.raises(RequestError, match=r"drew noise for .* with version 1 .* use the earlier tezo"):
            replay(earlier, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    replay(earlier, tmp_path / "out")
    assert same(result(tmp_path / "out"), result(run))


def rewritten(run: Path, header: dict[str, Any], steps: list[StepRecord]) -> Path:
    run.mkdir()
    log = StepLog(run / LOG, header)
    for step in steps:
        log.append(step)
    log.close()
    return run


@pytest.mark.parametrize("lost", ["model", "config", "untrained", "device", "noise", "versions", "sources"])
def test_a_header_that_lacks_what_a_run_writes_is_refused(home, tmp_path, lost):
    train(config(home), tmp_path / "run")
    found = read_log(tmp_path / "run" / LOG)
    bad = rewritten(tmp_path / "bad", {k: v for k, v in found.header.items() if k != lost}, found.steps)
    with pytest.raises(RequestError, match="header is not that of a run"):
        replay(bad, tmp_path / "out")
