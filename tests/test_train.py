"""A run is a pure function of its configuration, and leaves everything else alone."""

import json
import math
import random

import numpy as np
import pytest
import torch
from cases import mostly_slow
from folders import completion_rows, model_and_rows, read_jsonl, write_rows
from long_steps import DENSE, FACTORED, config
from short_runs import result, same

from tezo.runs.environment import memory_for
from tezo.runs.folder import RunFolder
from tezo.system.errors import NonFiniteLossError, NonFiniteResultError, RunError
from tezo.system.processes import ProcessGroup
from tezo.tasks.evaluation import evaluate
from tezo.tasks.untuned import MOST_ROWS, untuned
from tezo.training.job import prepare
from tezo.training.listeners import Interruption, Listener
from tezo.training.loop import Loop, train
from tezo.training.settings import parse_config


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return model_and_rows(tmp_path_factory.mktemp("home"), 14)


# What a run is a function of


@pytest.mark.parametrize("method", mostly_slow([*DENSE, *FACTORED], "mezo", "tezo-cadam"))
def test_a_run_is_a_pure_function_of_its_configuration(home, tmp_path, method):
    summaries = []
    for name, noise in (("first", 1), ("second", 2)):
        torch.manual_seed(noise)
        np.random.seed(noise)
        random.seed(noise)
        summaries.append(train(config(home, method, keep_best=False), tmp_path / name))
    train(config(home, method, keep_best=False, seed=1), tmp_path / "other")
    first, second, other = (result(tmp_path / name) for name in ("first", "second", "other"))
    assert same(first, second)
    assert not same(first, other)
    assert {k: summaries[0][k] for k in ("before", "after")} == {k: summaries[1][k] for k in ("before", "after")}


@pytest.mark.parametrize("method", ["mezo", "tezo-cadam"])
def test_the_random_state_of_the_user_is_neither_read_nor_set(home, tmp_path, method):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    train(config(home, method), tmp_path / "run")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    assert before[2] == random.getstate()


def test_the_schedule_reaches_the_steps(home, tmp_path):
    train(config(home, schedule="linear", log_every=1, guard=False), tmp_path / "run")
    rates = [line["lr"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "lr" in line]
    assert rates == pytest.approx([0.05 * f for f in (1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8)])


# What a run leaves behind


def test_metrics_have_a_line_every_so_many_steps_and_one_for_each_evaluation(home, tmp_path):
    summary = train(config(home, eval_every=4, log_every=3), tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    steps = [line for line in lines if "split" not in line]
    assert [line["step"] for line in steps] == [3, 6]
    assert all(
        set(line) == {"step", "loss", "projected_grads", "lr", "seconds", "elapsed", "passes", "memory", "crc"}
        for line in steps
    )
    assert all(line["memory"] > 2**20 and len(line["projected_grads"]) == 1 for line in steps)
    tests = [line for line in lines if line.get("split") == "test"]
    assert [line["step"] for line in tests] == [0, 8]
    for line, when in zip(tests, ("before", "after"), strict=True):
        assert {key: line[key] for key in summary[when]} == summary[when]
    assert [line["step"] for line in lines if line.get("split") == "dev"] == [0, 4, 8]


@pytest.mark.parametrize("targets", [["all-linear"], ["all"], ["q_proj", "fc1.bias"]], ids=str)
def test_the_plan_has_every_parameter(home, tmp_path, targets):
    job = prepare(config(home, targets=targets))
    summary = train(config(home, targets=targets), tmp_path / "run")
    rows = {row["name"]: row for row in json.loads((tmp_path / "run" / "plan.json").read_text())}
    parameters = dict(job.model.named_parameters())
    assert rows.keys() == parameters.keys()
    assert all(row["shape"] == list(parameters[name].shape) for name, row in rows.items())
    trained = {name for name, row in rows.items() if row["trained"]}
    assert trained == set(job.optimizer.parameters)
    assert all((row["rank"] == 4) == (len(row["shape"]) > 1) for name, row in rows.items() if name in trained)
    assert {row["moved"] for row in rows.values() if row["trained"] and row["kind"] == "linear"} == {"in forward"}
    assert summary["parameters"] == {
        "total": sum(p.numel() for p in parameters.values()),
        "trained": sum(parameters[name].numel() for name in trained),
    }


class Watcher(Listener):
    """Keeps the job, and what its weights were before the first step."""

    def started(self, job) -> None:
        self.job = job
        self.before = {name: p.detach().clone() for name, p in job.model.named_parameters()}


@pytest.mark.parametrize("method", FACTORED)
def test_the_base_model_is_only_read(home, tmp_path, method):
    files = {path: path.read_bytes() for path in (home / "opt").iterdir()}
    watcher = Watcher()
    train(config(home, method), tmp_path / "run", [watcher])
    assert same(watcher.before, {name: p.detach() for name, p in watcher.job.model.named_parameters()})
    assert {path: path.read_bytes() for path in (home / "opt").iterdir()} == files


class Poisoner(Watcher):
    """Spoils a parameter that is not trained after the fourth step, when the weights are as `state` has them."""

    def stepped(self, progress) -> None:
        if progress.record.step == 3:
            self.state, self.loss = self.job.optimizer.tuned_state(), self.dev_loss()
            self.norm(math.nan)

    def norm(self, value: float) -> None:
        self.job.model.model.decoder.final_layer_norm.bias.data[0] = value

    def dev_loss(self) -> float:
        return evaluate(self.job.model, self.job.objective, self.job.dev, 64)[0]["loss"]


@pytest.mark.parametrize("method", ["tezo-cadam", "mezo", "lozo"])
def test_after_a_loss_that_is_no_number_the_weights_are_as_before_that_step(home, tmp_path, method):
    poisoner = Poisoner()
    with pytest.raises(NonFiniteLossError) as failed:
        train(config(home, method, guard=False), tmp_path / "run", [poisoner])
    assert failed.value.step == 4
    assert math.isfinite(failed.value.last_loss)
    assert not list((tmp_path / "run").glob("model/*.safetensors")), "there is no result"
    now = poisoner.job.optimizer.tuned_state()
    assert now.keys() == poisoner.state.keys()
    for name, value in now.items():  # in place: to the rounding of an add
        torch.testing.assert_close(value, poisoner.state[name], rtol=0, atol=1e-6 if method == "mezo" else 0)
    poisoner.norm(float(poisoner.before["model.decoder.final_layer_norm.bias"][0]))
    assert poisoner.dev_loss() == pytest.approx(poisoner.loss, abs=1e-6)


def test_free_text_is_learnt(home, tmp_path):
    data = write_rows(tmp_path / "text.jsonl", completion_rows(10))
    made = parse_config(
        {
            "model": str(home / "opt"),
            "data": {"train": str(data), "test": str(data)},
            "method": {"name": "tezo-cadam", "rank": 8, "lr": 3e-3},
            "train": {"steps": 150, "batch_size": 10},
        }
    )
    summary = train(made, tmp_path / "run")
    assert summary["after"]["loss"] < 0.9 * summary["before"]["loss"]


# Out of memory


def test_out_of_memory_at_the_first_step_says_what_to_lower(home, tmp_path):
    job = prepare(config(home, eval_every=0, data=("train", "dev", "test")))
    steps = []

    def allocate(*_: object) -> None:
        steps.append(1)
        if len(steps) > len(evaluations):
            torch.empty(1 << 60)  # more than any machine has: the allocator itself refuses

    evaluations: list[int] = []
    counter = job.model.register_forward_pre_hook(lambda *_: evaluations.append(1))
    size = job.config.train.eval_batch_size
    evaluate(job.model, job.objective, job.test, size)
    untuned(job.model, job.objective, job.train[:MOST_ROWS], job.test, size)
    counter.remove()
    job.model.register_forward_pre_hook(allocate)
    with pytest.raises(RunError) as caught:
        Loop(job, RunFolder(tmp_path / "run"), [], Interruption(), ProcessGroup()).run()
    assert str(caught.value).startswith("out of memory at step 0, with 4 rows of up to ")
    assert "Lower train.batch_size or data.max_length, or set model.dtype=bfloat16." in str(caught.value)
    assert caught.value.exit_code == 1


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught, memory_for("step 0", [], "key"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(caught.value, RunError)
    with pytest.raises(RunError, match="out of memory at step 0, with 0 rows"), memory_for("step 0", [], "key"):
        bytearray(1 << 60)


def test_a_model_whose_loss_is_not_finite_is_no_result(home, tmp_path):
    settings = config(home, "tezo-cadam", lr=1e30, steps=1, eval_every=0, data=("train", "test"))
    with pytest.raises(NonFiniteResultError, match=r"after 1 steps, so no result was saved\. Lower method\.lr"):
        train(settings, tmp_path / "run")
    assert not any((tmp_path / "run" / name).exists() for name in ("adapter", "model", "summary.json"))
