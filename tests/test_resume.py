"""A run that stops anywhere goes on to the bit; a log is replayed; a disk that fails leaves what was saved whole."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from folders import label_rows, model_folder, refused, settings, tezo, write_rows
from kills import contents
from safetensors.torch import load_file

from tezo import checkpoint, durable, export, steplog
from tezo.checkpoint import DamagedError, checkpoints, load_checkpoint, newest
from tezo.config import dump_config, parse_config, to_tree
from tezo.errors import NonFiniteLossError, RequestError, RunError, TezoError
from tezo.methods import METHODS
from tezo.recipe import Config
from tezo.replay import replay
from tezo.runs import LOG, Listener
from tezo.steplog import LoggedStep, StepLog, read_log
from tezo.train import train

STEPS = 9


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    model_folder(root, "opt", dtype=torch.bfloat16)
    for number, name in enumerate(("train", "dev", "test")):
        write_rows(root / f"{name}.jsonl", label_rows(10, seed=number))
    return root


def config(home: Path, method: str = "tezo-cadam", *, model: str = "opt", **train_settings: Any) -> Config:
    options = dict(CASES[method].options) if method in CASES else {}
    defaults = METHODS[method].defaults() if method in METHODS else {}
    options |= {"lazy_update_interval": 4} if defaults.get("lazy_update_interval") else {}
    return parse_config(
        {
            "model": {"name": str(home / model), "device": "cpu"},
            "data": {name: str(home / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": method, "lr": 3e-3, **options},
            "train": {"steps": STEPS, "batch_size": 4, "eval_every": 2, "log_every": 2, "schedule": "linear",
                      "checkpoint_every": 3} | train_settings,
        }
    )  # fmt: skip


class Death(Listener):
    """Ends the process's part of a run in the worst way that one process can: by an error nobody foresees."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, progress: Any) -> None:
        if progress.record.step == self.step:
            raise KeyboardInterrupt


def stopped(made: Config, run: Path, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(made, run, [Death(step)], resume=True)


@pytest.mark.parametrize("name", [*METHODS, "adam"])
def test_a_run_that_stops_anywhere_goes_on_to_the_bit(home, tmp_path, name):
    made = config(home, name)
    train(made, tmp_path / "whole")
    for step in (0, 4, STEPS - 1):  # before any checkpoint, between two, and after the last step
        stopped(made, tmp_path / "run", step)
        assert (tmp_path / "run" / "checkpoint-3").is_dir() == (step > 3)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["mezo", "lozo", "tezo-adam", "tezo-cadam"])
def test_below_float32_too_and_from_the_log_alone(home, tmp_path, name):
    made = config(home, name, model="optbfloat16", checkpoint_every=0)
    train(made, tmp_path / "whole")
    stopped(made, tmp_path / "run", 5)
    assert not checkpoints(tmp_path / "run")
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_early_stopping_stops_where_it_would_have(home, tmp_path):
    made = config(home, "mezo", patience=1, eval_every=1, steps=40, checkpoint_every=2)
    summary = train(made, tmp_path / "whole")
    assert summary["steps"] < 40
    for step in range(2, summary["steps"] - 1, 2):
        stopped(made, tmp_path / "run", step)
    assert train(made, tmp_path / "run", resume=True)["steps"] == summary["steps"]
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["mezo", "tezo", "tezo-cadam"])
def test_a_run_that_never_got_better_ends_with_its_base(home, tmp_path, name):
    tree = to_tree(config(home, name, seed=3))
    made = parse_config(tree | {"method": tree["method"] | {"lr": 30.0}})
    assert train(made, tmp_path / "whole")["kept_step"] == 0
    stopped(made, tmp_path / "run", 7)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_finished_run_is_not_taken_again(home, tmp_path):
    summary = train(config(home), tmp_path / "run")
    before = contents(tmp_path / "run")
    assert train(config(home), tmp_path / "run", resume=True) == summary
    assert contents(tmp_path / "run") == before


def test_another_run_does_not_go_on_in_its_place(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home), run, 4)
    log = (run / LOG).read_bytes()
    with pytest.raises(RequestError, match=r"train.seed is 5, and the run began with 0"):
        train(config(home, seed=5), run, resume=True)
    with pytest.raises(RequestError, match=r"method.name is 'mezo', and the run began with 'tezo-cadam'"):
        train(config(home, "mezo"), run, resume=True)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("opt", "train.jsonl", "dev.jsonl", "test.jsonl"):
        (shutil.copytree if name == "opt" else shutil.copy)(home / name, other / name)
    stopped(config(other), tmp_path / "second", 4)
    write_rows(other / "train.jsonl", label_rows(10, seed=9))
    with pytest.raises(RequestError, match="training rows are not those"):
        train(config(other), tmp_path / "second", resume=True)
    write_rows(other / "train.jsonl", label_rows(10, seed=0))
    weights = load_file(other / "opt/model.safetensors")
    weights["model.decoder.layers.1.fc2.weight"] += 1
    export.save_file(weights, other / "opt/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match="weights are not those"):
        train(config(other), tmp_path / "second", resume=True)
    with pytest.raises(RequestError, match="weights are not those"):
        replay(tmp_path / "second", tmp_path / "out")
    assert (run / LOG).read_bytes() == log
    train(config(home, sync_every=1, keep_checkpoints=1), run, resume=True)  # these two may change


def test_resume_by_the_command_line_needs_the_folder_alone(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home), run, 4)
    train(config(home), tmp_path / "whole")
    refused(tezo("train", "--output", run, "--model", home / "opt", "--data", home / "train.jsonl"), "--resume")
    refused(tezo("train", "--output", run, "--resume", *settings(method__lr=0.5)), "method.lr", "0.5", "0.003")
    done = tezo("train", "--output", run, "--resume")
    assert done.code == 0 and "going on after step 5, from checkpoint-3 and steps.log" in done.err
    assert contents(run) == contents(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_ends(home, tmp_path, number):
    class Sender(Listener):
        def stepping(self, step: int) -> None:
            if step == 4:
                os.kill(os.getpid(), number)

    made, run = config(home, "mezo-m"), tmp_path / "run"
    before = signal.getsignal(number)
    with pytest.raises(RunError, match=rf"stopped by {number.name} after step 5; go on with --resume"):
        train(made, run, [Sender()])
    assert signal.getsignal(number) == before
    assert checkpoints(run)[0].name == "checkpoint-5" and len(read_log(run / LOG).steps) == 5
    train(made, run, resume=True)
    train(made, tmp_path / "whole")
    assert contents(run) == contents(tmp_path / "whole")


def test_after_a_loss_that_is_no_number_the_good_steps_are_there(home, tmp_path):
    class Poison(Listener):
        def started(self, job: Any) -> None:
            self.job = job

        def stepping(self, step: int) -> None:
            if step == 6:
                self.job.model.model.decoder.final_layer_norm.bias.data[0] = float("nan")

    made, run = config(home, "lozo"), tmp_path / "run"
    with pytest.raises(NonFiniteLossError):
        train(made, run, [Poison()])
    assert len(read_log(run / LOG).steps) == 6
    replay(run, tmp_path / "good")
    train(config(home, "lozo", keep_best=False), tmp_path / "whole")
    assert replay(tmp_path / "whole", tmp_path / "six", step=6)["steps"] == 6
    assert same(result(tmp_path / "good"), result(tmp_path / "six"))
    train(made, run, resume=True)  # the fault was not the run's


def result(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("[am]*/*model.safetensors")))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", METHODS)
def test_base_and_log_alone_give_the_tuned_model(home, tmp_path, name):
    train(config(home, name), tmp_path / "run")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / "run" / LOG, alone / LOG)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    done = replay(alone, tmp_path / "out", step=summary["kept_step"])
    assert done["result"]["kind"] == summary["result"]["kind"]
    assert same(result(tmp_path / "out"), result(tmp_path / "run"))
    assert replay(tmp_path / "run", tmp_path / "again")["steps"] == summary["kept_step"]
    assert replay(alone, tmp_path / "all")["steps"] == STEPS


def test_what_replay_cannot_do_it_says(home, tmp_path):
    run = tmp_path / "run"
    train(config(home, "adam"), run)
    refused(tezo("replay", run, "--output", tmp_path / "out"), "method.name", "adam", "gradients")
    refused(tezo("replay", tmp_path, "--output", tmp_path / "out"), "steps.log", "cannot be read")
    train(config(home), tmp_path / "second")
    refused(tezo("replay", tmp_path / "second", "--output", tmp_path / "out", "--step", 99), "step is 99", str(STEPS))
    refused(tezo("replay", tmp_path / "second", "--output", run), "output", "in use")
    assert not (tmp_path / "out").exists()
    done = tezo("replay", tmp_path / "second", "--output", tmp_path / "out")
    assert done.code == 0 and str(tmp_path / "out/adapter") in done.out


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


def rewritten(run: Path, header: dict[str, Any], steps: list[LoggedStep]) -> Path:
    run.mkdir()
    log = StepLog(run / LOG, header, 0)
    for step in steps:
        log.append(step)
    log.close()
    return run


@pytest.mark.parametrize("lost", ["model", "config", "untrained", "device", "versions"])
def test_a_header_that_lacks_what_a_run_writes_is_refused(home, tmp_path, lost):
    train(config(home), tmp_path / "run")
    found = read_log(tmp_path / "run" / LOG)
    bad = rewritten(tmp_path / "bad", {k: v for k, v in found.header.items() if k != lost}, found.steps)
    with pytest.raises(RequestError, match="header is not that of a run"):
        replay(bad, tmp_path / "out")


NATURAL = {"open": errno.EROFS, "write": errno.ENOSPC, "fsync": errno.EIO, "replace": errno.EIO, "save": errno.ENOSPC}


class Faulty:
    """`os`, whose operation number `at` of those that change the disk fails."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count, self.failed = at, 0, None

    def __getattr__(self, name: str) -> Any:
        return self.faulty(name, getattr(os, name)) if name in NATURAL else getattr(os, name)

    def faulty(self, name: str, call: Any) -> Any:
        def operation(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self.failed = name
                raise OSError(NATURAL[name], os.strerror(NATURAL[name]))
            return call(*arguments, **named)

        return operation


def faulty(patch: Any, at: int | None) -> Faulty:
    disk = Faulty(at)
    patch.setattr(durable, "os", disk)
    patch.setattr(steplog, "os", disk)
    patch.setattr(checkpoint, "save_file", disk.faulty("save", checkpoint.save_file))
    patch.setattr(export, "save_file", disk.faulty("save", export.save_file))
    return disk


def test_a_disk_that_fails_at_any_write_is_named_and_nothing_saved_is_lost(home, tmp_path):
    made = config(home, steps=4, checkpoint_every=2, eval_every=2, sync_every=2)
    with pytest.MonkeyPatch.context() as patch:
        operations = faulty(patch, None)
        train(made, tmp_path / "whole")
    whole, failed = contents(tmp_path / "whole"), set()
    assert operations.count > 40
    for at in range(1, operations.count + 1):
        run = tmp_path / f"run-{at}"
        with pytest.MonkeyPatch.context() as patch:
            disk = faulty(patch, at)
            with pytest.raises(TezoError) as caught:
                train(made, run)
            failed.add(disk.failed)
        message = str(caught.value)
        assert message.count(". ") <= 1 and ("cannot be written" in message or "Errno" not in message), message
        if (run / LOG).exists():
            read_log(run / LOG) if (run / LOG).stat().st_size > 2000 else None
        train(made, run, resume=True)
        assert contents(run) == whole, (at, disk.failed)
    assert failed == set(NATURAL)


def test_a_folder_that_vanishes_is_named(home, tmp_path):
    class Remover(Listener):
        def stepped(self, progress: Any) -> None:
            if progress.record.step == 2:
                shutil.rmtree(tmp_path / "run")

    with pytest.raises(RunError, match=r"run/\S+ cannot be written: its folder is gone"):
        train(config(home), tmp_path / "run", [Remover()])


def test_a_checkpoint_that_was_changed_anywhere_is_passed_over(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home, "mezo-m"), run, 7)
    older, newer = run / "checkpoint-3", run / "checkpoint-6"
    assert [path.name for path in checkpoints(run)] == ["checkpoint-6", "checkpoint-3"]
    for name in ("manifest.json", "state.json", "tensors.safetensors"):
        whole = (newer / name).read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 60)):
            (newer / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(DamagedError):
                load_checkpoint(newer)
            (newer / name).write_bytes(whole[:place])
            with pytest.raises(DamagedError):
                load_checkpoint(newer)
        found, skipped = newest(run, 8)
        assert found.step == 3 and len(skipped) == 1 and "checkpoint-6 was passed over" in skipped[0]
        (newer / name).write_bytes(whole)
    assert newest(run, 8)[0].step == 6 and newest(run, 5)[0].step == 3
    (newer / "state.json").write_text("{}")
    shutil.rmtree(older)
    train(config(home, "mezo-m"), run, resume=True)  # from the log alone
    train(config(home, "mezo-m"), tmp_path / "whole")
    assert contents(run) == contents(tmp_path / "whole")


def test_a_forged_checkpoint_reads_nothing_outside_its_folder(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home), run, 7)
    folder, outside = run / "checkpoint-6", tmp_path / "outside.safetensors"
    shutil.move(folder / "tensors.safetensors", outside)
    (folder / "tensors.safetensors").symlink_to(outside)
    with pytest.raises(DamagedError, match="missing, or is a link"):
        load_checkpoint(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["../outside.safetensors"] = manifest.pop("tensors.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="names other files"):
        load_checkpoint(folder)
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DamagedError):
        load_checkpoint(folder)


def test_a_file_system_that_takes_no_more_is_named_by_the_command_line(home, tmp_path):
    made, run = config(home, "mezo"), tmp_path / "run"
    train(made, tmp_path / "whole")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(made))
    # a limit of the operating system on the size of a file: the model's weights don't fit, its log does
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from tezo.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "train", recipe, "--output", run, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search(r"error: \S+run/checkpoint-3 cannot be written: .*\. What was saved before is whole", done.stderr)
    assert "Traceback" not in done.stderr and not list(run.rglob("*.partial"))
    train(made, run, resume=True)
    assert contents(run) == contents(tmp_path / "whole")
