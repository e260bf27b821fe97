"""Callbacks written for transformers' Trainer follow a run, and can end it."""

import json
from dataclasses import replace

import pytest
import torch
from folders import label_rows, model_folder, write_rows
from transformers import EarlyStoppingCallback, TrainerCallback

from tezo.trainer.callbacks import TrainerCallbacks
from tezo.training.loop import train
from tezo.training.settings import parse_config


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    for number, name in enumerate(("train", "dev", "test")):
        write_rows(root / f"{name}.jsonl", label_rows(10, seed=number))
    return root


def config(home, steps: int, *, lr: float = 0.02, **settings):
    return parse_config(
        {
            "model": str(home / "opt"),
            "data": {
                "train": str(home / "train.jsonl"),
                "dev": str(home / "dev.jsonl"),
                "test": str(home / "test.jsonl"),
            },
            "method": {"name": "tezo-cadam", "rank": 4, "lr": lr},
            "train": {"steps": steps, "batch_size": 4, "log_every": 2, "eval_every": 3} | settings,
        }
    )


def noting(name: str):
    def event(self, *call, **given):
        args, state, _ = call
        self.events.append((name, state.global_step))
        self.seen = {"args": args, "state": state, **given}
        self.taken.append(given["optimizer"].num_steps)
        if name == "log":
            self.logs.append((state.global_step, dict(given["logs"])))
        if name == "evaluate":
            self.metrics.append((state.global_step, dict(given["metrics"])))

    return event


class Recorder(TrainerCallback):
    """Writes down every event with the step it came at."""

    def __init__(self) -> None:
        self.events, self.logs, self.metrics, self.taken, self.seen = [], [], [], [], {}

    on_train_begin = noting("train_begin")
    on_step_begin = noting("step_begin")
    on_step_end = noting("step_end")
    on_log = noting("log")
    on_evaluate = noting("evaluate")
    on_train_end = noting("train_end")


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, *call, **_given):
        _, state, control = call
        control.should_training_stop = state.global_step == self.step


def test_events_come_in_the_order_of_a_trainers_run(home, tmp_path):
    recorder = Recorder()
    train(config(home, 4), tmp_path / "run", [TrainerCallbacks([recorder])])
    steps = [event for event in recorder.events if event[0] not in ("evaluate", "log")]
    assert steps == [
        ("train_begin", 0),
        ("step_begin", 0), ("step_end", 1),
        ("step_begin", 1), ("step_end", 2),
        ("step_begin", 2), ("step_end", 3),
        ("step_begin", 3), ("step_end", 4),
        ("train_end", 4),
    ]  # fmt: skip
    assert [step for name, step in recorder.events if name == "evaluate"] == [0, 3, 4]
    assert recorder.taken == [step for _, step in recorder.events], "an event came before or after its time"


def test_an_evaluation_falls_between_the_steps(home, tmp_path):
    recorder = Recorder()
    train(config(home, 3), tmp_path / "run", [TrainerCallbacks([recorder])])
    inside = False
    for name, _ in recorder.events:
        assert not (inside and name == "evaluate"), recorder.events
        inside = {"step_begin": True, "step_end": False}.get(name, inside)


def test_logs_and_metrics_are_those_of_the_run_folder(home, tmp_path):
    recorder = Recorder()
    summary = train(config(home, 4), tmp_path / "run", [TrainerCallbacks([recorder])])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "split" not in line}
    logged = {step: logs for step, logs in recorder.logs if "loss" in logs}
    assert set(logged) == set(steps) == {2, 4}
    for step, line in steps.items():
        assert logged[step]["loss"] == line["loss"]
        assert logged[step]["learning_rate"] == line["lr"]
        assert logged[step]["projected_grad"] == line["projected_grads"][0]
    dev = {line["step"]: line["loss"] for line in lines if line.get("split") == "dev"}
    assert {step: metrics["eval_loss"] for step, metrics in recorder.metrics} == dev
    tests = [logs["test_loss"] for _, logs in recorder.logs if "test_loss" in logs]
    assert tests == [summary["before"]["loss"], summary["after"]["loss"]]


def test_a_callback_is_given_what_a_trainer_gives(home, tmp_path):
    recorder = Recorder()
    train(config(home, 4, seed=9), tmp_path / "run", [TrainerCallbacks([recorder], str(tmp_path / "there"))])
    seen = recorder.seen
    assert isinstance(seen["model"], torch.nn.Module)
    assert isinstance(seen["optimizer"], torch.optim.Optimizer)
    assert seen["processing_class"].pad_token == "<pad>"
    assert (seen["args"].max_steps, seen["args"].seed, seen["args"].logging_steps) == (4, 9, 2)
    assert seen["args"].output_dir == str(tmp_path / "there")
    assert (seen["state"].max_steps, seen["state"].epoch) == (4, pytest.approx(1.6))
    assert len(seen["state"].log_history) == len(recorder.logs)


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_callback_can_end_the_run(home, tmp_path, step):
    recorder = Recorder()
    # should_training_stop is set before the recorder's own events of the same step
    summary = train(config(home, 9, keep_best=False), tmp_path / "run", [TrainerCallbacks([StopAt(step), recorder])])
    assert summary["steps"] == summary["kept_step"] == step
    assert recorder.events[-1] == ("train_end", step)
    assert ("step_begin", step) not in recorder.events
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_run_that_is_ended_between_evaluations_still_counts_its_last_step(home, tmp_path):
    """The best of steps 0 and 2, both measured; not step 0 because 2 never was."""
    summary = train(config(home, 9), tmp_path / "run", [TrainerCallbacks([StopAt(2)])])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    dev = {line["step"]: line["loss"] for line in lines if line.get("split") == "dev"}
    assert set(dev) == {0, 2}
    assert summary["kept_step"] == min(dev, key=dev.get)


def test_transformers_own_early_stopping_ends_a_run_that_gets_no_better(home, tmp_path):
    stopper = EarlyStoppingCallback(early_stopping_patience=2)
    # A learning rate of 0: no evaluation is better than the first, at step 0.
    summary = train(config(home, 30, lr=0.0), tmp_path / "run", [TrainerCallbacks([stopper])])
    assert summary["steps"] == 6


def test_transformers_own_early_stopping_lets_a_run_go_on_that_gets_better(home, tmp_path):
    stopper, recorder = EarlyStoppingCallback(early_stopping_patience=1), Recorder()
    same = {name: str(home / "train.jsonl") for name in ("train", "dev", "test")}
    falling = parse_config(
        {
            "model": str(home / "opt"),
            "data": same,
            "method": {"name": "tezo", "rank": 16, "lr": 1e-3, "num_directions": 8},
            "train": {"steps": 6, "batch_size": 10, "eval_every": 2},
        }
    )
    summary = train(falling, tmp_path / "run", [TrainerCallbacks([recorder, stopper])])
    losses = [metrics["eval_loss"] for _, metrics in recorder.metrics]
    assert losses == sorted(losses, reverse=True), "this run is meant to fall throughout"
    assert summary["steps"] == 6


def test_without_test_rows_the_dev_rows_before_the_first_step_are_an_evaluation_too(home, tmp_path):
    made = config(home, 3)
    recorder = Recorder()
    train(replace(made, data=replace(made.data, test=None)), tmp_path / "run", [TrainerCallbacks([recorder])])
    assert [step for step, _ in recorder.metrics] == [0, 3] and all("eval_loss" in own for _, own in recorder.metrics)
