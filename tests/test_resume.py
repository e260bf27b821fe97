"""A run that stops anywhere goes on to the bit, and no other run goes on in its place."""

import json
import os
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import ONE_OF_EACH_KIND, mostly_slow
from folders import label_rows, model_and_rows, model_folder, refused, settings, tezo, write_rows
from kills import contents
from safetensors.torch import load_file
from short_runs import STEPS, config, entries, killed_after, result, same, stopped

from tezo.methods import METHODS, method
from tezo.models import lora as export
from tezo.runs.checkpoints import checkpoints
from tezo.runs.folder import LOG
from tezo.runs.step_log import read_log
from tezo.system.errors import NonFiniteLossError, RequestError, RunInterrupted
from tezo.system.progress import showing
from tezo.training.job import prepare
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.resume import check_same, check_unchanged, log_header, replay
from tezo.training.screen import Screen
from tezo.training.settings import parse_config, to_tree
from tezo.training.stopping import STAGNATED


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = model_and_rows(tmp_path_factory.mktemp("home"), 10)
    model_folder(root, "opt", dtype=torch.bfloat16)
    return root


@pytest.mark.parametrize("name", mostly_slow([*METHODS, "adam"], *ONE_OF_EACH_KIND, "adam"))
def test_a_run_that_stops_anywhere_goes_on_to_the_bit(home, tmp_path, name):
    made = config(home, name)
    train(made, tmp_path / "whole")
    for step in (0, 4, STEPS - 1):  # before any checkpoint, between two, and after the last step
        stopped(made, tmp_path / "run", step)
        assert (tmp_path / "run" / "checkpoint-3").is_dir() == (step > 3)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head-feedback", "gauss-newton", "lozo"])
def test_a_run_that_measured_its_settings_and_was_killed_after_any_entry_leaves_the_same_files(home, tmp_path, name):
    made = config(home, name, steps=3, eval_every=1, log_every=1, feedback_first=None, feedback_last=None)
    made = replace(made, method=replace(made.method, options={"rho": "auto"} if name == "lozo" else {}))
    train(made, tmp_path / "whole")
    for killed in range(len(entries((tmp_path / "whole/steps.log").read_bytes())) - 1):
        killed_after(tmp_path / "whole", tmp_path / f"{killed}", killed)
        train(made, tmp_path / f"{killed}", resume=True)
        assert contents(tmp_path / f"{killed}") == contents(tmp_path / "whole"), killed


@pytest.mark.parametrize("name", mostly_slow(["mezo", "lozo", "tezo-adam", "tezo-cadam"], "lozo", "tezo-adam"))
def test_below_float32_too_and_from_the_log_alone(home, tmp_path, name):
    made = config(home, name, model="optbfloat16", checkpoint_every=0)
    train(made, tmp_path / "whole")
    stopped(made, tmp_path / "run", 5)
    assert not checkpoints(tmp_path / "run")
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_early_stopping_stops_where_it_would_have(home, tmp_path):
    made = config(home, "mezo", eval_every=1, steps=80, checkpoint_every=10, guard=True).with_options(lr=0.0)
    summary = train(made, tmp_path / "whole")
    assert (summary["steps"], summary["stopped"]) == (48, STAGNATED)
    for step in (9, 25, 47):
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
    with pytest.raises(RequestError, match=r"train.seed is 1, and the run began with 0"):
        train(config(home, seed=1), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_a_finished_run_is_known_by_a_recipe_that_left_things_to_it(home, tmp_path):
    made = config(home)
    left = replace(made, method=replace(made.method, options={**made.method.options, "lr": "auto"}))
    summary = train(left, tmp_path / "run")
    assert train(left, tmp_path / "run", resume=True) == summary
    words = replace(left, data=replace(left.data, label_words={"good": "fine", "bad": "bad"}))
    with pytest.raises(RequestError, match=r"data\.label_words"):
        train(words, tmp_path / "run", resume=True)


@pytest.mark.parametrize("part", ["train", "dev", "test"])
def test_a_finished_run_is_not_that_of_other_rows(home, tmp_path, part):
    other = shutil.copytree(home, tmp_path / "home")
    summary = train(config(other), tmp_path / "run")
    rows = (other / f"{part}.jsonl").read_text()
    write_rows(other / f"{part}.jsonl", label_rows(10, seed=9))
    before = contents(tmp_path / "run")
    with pytest.raises(RequestError, match="data: the rows are not those that the run began with"):
        train(config(other), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    said = tezo("eval", tmp_path / "run").err
    assert ("not those that the run's own figures are of" in said) == (part == "test")
    assert "own figures" not in tezo("eval", tmp_path / "run", "--data", other / "test.jsonl").err
    (other / f"{part}.jsonl").write_text(rows)
    assert train(config(other), tmp_path / "run", resume=True) == summary
    assert "own figures" not in tezo("eval", tmp_path / "run").err


def test_what_was_said_at_the_first_start_is_said_of_the_whole_run(home, tmp_path):
    made = config(home, "head-feedback")
    whole = train(made, tmp_path / "whole")
    stopped(made, tmp_path / "run", 4)
    resumed = train(made, tmp_path / "run", resume=True)
    assert any(text.startswith("method.rho") and "measured" in text for text in whole["notices"])
    assert resumed["notices"][: len(whole["notices"])] == whole["notices"]


def test_a_finished_run_is_that_of_a_batch_larger_than_its_rows(home, tmp_path):
    large = config(home, batch_size=64)
    summary = train(large, tmp_path / "run")
    assert train(large, tmp_path / "run", resume=True) == summary and summary["batch_size"] < 64
    with pytest.raises(RequestError, match=r"train.batch_size is 3, and the run began with"):
        train(config(home, batch_size=3), tmp_path / "run", resume=True)


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
    same = label_rows(10, seed=0)
    flipped = [{**row, "label": {"good": "bad", "bad": "good"}[row["label"]]} for row in same]
    write_rows(other / "train.jsonl", flipped)
    with pytest.raises(RequestError, match="training rows are not those"):
        train(config(other), tmp_path / "second", resume=True)
    write_rows(other / "train.jsonl", same)
    held = (other / "test.jsonl").read_text()
    write_rows(other / "test.jsonl", same)
    with pytest.raises(RequestError, match="dev and test rows are not those"):
        train(config(other), tmp_path / "second", resume=True)
    (other / "test.jsonl").write_text(held)
    weights = load_file(other / "opt/model.safetensors")
    weights["model.decoder.layers.1.fc2.weight"] += 1
    export.save_file(weights, other / "opt/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match="weights are not those"):
        train(config(other), tmp_path / "second", resume=True)
    with pytest.raises(RequestError, match="weights are not those"):
        replay(tmp_path / "second", tmp_path / "out")
    assert (run / LOG).read_bytes() == log
    train(config(home, checkpoint_every=3), run, resume=True)  # this one may change


@pytest.mark.parametrize(
    ("name", "model", "drawn"),
    [("tezo", "opt", False), ("mezo", "opt", True), ("lozo", "opt", True), ("tezo-adam", "opt", False),
     ("tezo-adam", "optbfloat16", True)],
)  # fmt: skip
def test_a_run_that_drew_noise_with_another_version_of_the_generator_does_not_go_on(home, name, model, drawn):
    job = prepare(config(home, name, model=model))
    own = log_header(job)
    begun = own | {"noise": 1}
    if not drawn:
        assert check_same(begun, own, job.optimizer) == []
        return
    with pytest.raises(RequestError, match=r"drew noise for .* with version 1 .* has version 2.*use the earlier tezo"):
        check_same(begun, own, job.optimizer)


def test_resume_by_the_command_line_needs_the_folder_alone(home, tmp_path):
    run = tmp_path / "run"
    stopped(config(home), run, 4)
    train(config(home), tmp_path / "whole")
    refused(tezo("train", "--output", run, "--model", home / "opt", "--data", home / "train.jsonl"), "--resume")
    refused(tezo("train", "--output", run, "--resume", *settings(method__lr=0.5)), "method.lr", "0.5", "0.003")
    done = tezo("train", "--output", run, "--resume")
    assert done.code == 0 and "going on after step 5, from checkpoint-3 and steps.log" in done.err
    said = {line.split()[0]: line.split()[-1] for line in done.err.splitlines() if line.startswith("  ")}
    assert (said["lr"], said["rho"]) == ("given", "default"), "as they were when the run began"
    assert contents(run) == contents(tmp_path / "whole")


def test_who_follows_a_run_that_goes_on_hears_of_its_evaluations_so_far(home, tmp_path):
    class Heard(Screen):
        def stepping(self, step: int) -> None:
            del step
            told.append(list(self.dev_losses))

    stopped(config(home), tmp_path / "run", 4)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    told: list[Any] = []
    with showing() as line:
        train(config(home), tmp_path / "run", [Heard(line)], resume=True)
    assert told[0] == [own["loss"] for own in lines if own.get("split") == "dev"] != []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_ends(home, tmp_path, number):
    class Sender(Listener):
        def stepping(self, step: int) -> None:
            if step == 4:
                os.kill(os.getpid(), number)

    made, run = config(home, "mezo-m"), tmp_path / "run"
    before = signal.getsignal(number)
    with pytest.raises(RunInterrupted, match=rf"stopped by {number.name} after step 5; .*{run}.*resume=True"):
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


def test_a_setting_given_as_it_is_by_default_is_the_same_run(home):
    job = prepare(config(home, "lozo-m"))
    options = {**method("lozo-m").defaults(), **job.config.method.options}
    given = replace(job, config=replace(job.config, method=replace(job.config.method, options=options)))
    assert check_same(log_header(job), log_header(given), job.optimizer) == []
    check_unchanged(job.config, given.config)
    check_unchanged(given.config, job.config)
    options["lazy_update_interval"] = 101
    other = replace(job, config=replace(job.config, method=replace(job.config.method, options=options)))
    with pytest.raises(RequestError, match=r"method\.lazy_update_interval is 101"):
        check_same(log_header(job), log_header(other), job.optimizer)
