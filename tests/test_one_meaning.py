"""A name means one method, and a request one result, in Python, in runs and in Trainer."""

from dataclasses import replace

import pytest
import torch
from folders import completion_rows, model_folder, write_rows
from tiny import Regression
from trainers import trainer

import tezo
from tezo.methods import AUTO, BASELINES, ES, GAUSS_NEWTON, HEAD_FEEDBACK, METHODS, POLICY_GRADIENT
from tezo.optim.settings import DEFAULT, GIVEN, RESOLVED
from tezo.runs.step_log import read_log
from tezo.training.job import prepare
from tezo.training.rows_of_steps import RunRows, default_counts
from tezo.training.settings import Config, parse_config

OURS = (ES, HEAD_FEEDBACK, GAUSS_NEWTON, POLICY_GRADIENT, "probe", "tezo-cadam")
PUBLISHED = [name for name in METHODS if name not in OURS]
CHOSEN = ("lr", "rho", "directions")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", completion_rows(40))
    write_rows(root / "dev.jsonl", completion_rows(12, seed=3))
    return root


def request(home, name: str, **options) -> Config:
    data = {"train": str(home / "rows.jsonl"), "dev": str(home / "dev.jsonl")}
    return parse_config({"model": {"name": str(home / "opt")}, "data": data, "method": {"name": name, **options},
                         "train": {"steps": 100, "batch_size": 4}})  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_name_has_its_papers_settings_in_every_door(home, tmp_path, name):
    own = METHODS[name].build(Regression()).settings
    job = prepare(request(home, name))
    of_run = job.optimizer.settings
    job.optimizer.close()
    options = {"rank": 4} if "rank" in own else {}
    of_trainer = trainer(tmp_path, method=name, lr=None, max_steps=1, method_options=options)
    of_trainer.train()
    for key in (key for key in ("lr", "rho", "directions", "scale") if key in own):
        assert own[key].value == of_run[key].value == of_trainer.tuner.settings[key].value, key
        assert {own[key].source, of_run[key].source, of_trainer.tuner.settings[key].source} == {DEFAULT}, key
    directions = "per-example" if name == "grzo" else "shared"
    assert own["rho"].value == 1e-3 and ("directions" not in own or own["directions"].value == directions)
    assert job.config.train.guard is False and (job.config.train.feedback_first, job.config.train.feedback_last) == (
        0,
        0,
    )


def test_a_loop_of_ones_own_resolves_to_what_a_run_does(home):
    config = request(home, HEAD_FEEDBACK, rank=4)
    job = prepare(config)
    expected = {key: setting.value for key, setting in job.optimizer.settings.items()}
    job.optimizer.close()
    rows = RunRows(replace(job.config.train), job.model, job.objective, job.train, job.dev)
    held_out = job.objective.closure(job.model, job.objective.batches(job.dev))
    optimizer = tezo.prepare(job.model, lambda step: rows.step(step, per_example=True), steps=100, held_out=held_out,
                             rank=4, targets=optimizer_targets(job))  # fmt: skip
    found = {key: setting.value for key, setting in optimizer.settings.items()}
    for key in ("directions", "feedback_first", "feedback_last", "rank", "scale", "basis"):
        assert found[key] == expected[key], key
    assert {key for key, setting in optimizer.settings.items() if setting.source == RESOLVED} == {
        *CHOSEN, "feedback_first", "feedback_last"
    }  # fmt: skip
    assert found["rho"] in (expected["rho"], expected["rho"] * 3, expected["rho"] / 3), "of other calibration rows"
    optimizer.close()


def optimizer_targets(job) -> tuple[str, ...]:
    return tuple(target.name for target in job.optimizer.targets)


def test_the_steps_of_a_plan_are_those_of_a_run():
    model = Regression()
    optimizer = tezo.tezo(model, rank=2, lr=1e-3)
    optimizer.plan = lambda step: ("two-point", 3.0 if step < 2 else 1.0)
    rates = []
    for _ in range(4):
        optimizer.step(model.loss)
        rates.append(optimizer.last_step.lr)
    assert rates == pytest.approx([3e-3, 3e-3, 1e-3, 1e-3])


def test_what_a_run_takes_where_it_takes_feedback_steps(home, tmp_path):
    run = tezo.train(home / "opt", home / "rows.jsonl", method="head-feedback", rank=4, lr=1e-3, rho=1e-3, steps=100,
                     batch_size=4, output=tmp_path / "run", progress=False)  # fmt: skip
    first, last = default_counts(100)
    kinds = [record.rule for record in read_log(tmp_path / "run/steps.log").steps]
    assert (run.config.train.feedback_first, run.config.train.feedback_last) == (first, last)
    assert kinds == ["feedback"] * first + ["two-point"] * (100 - first - last) + ["feedback"] * last


def test_what_is_given_is_given_and_the_number_that_a_run_uses(home):
    job = prepare(request(home, HEAD_FEEDBACK, rank=4, lr=2e-3, directions="shared"))
    settings = job.optimizer.settings
    assert {key: setting.value for key, setting in settings.items() if setting.source == GIVEN} == {
        "rank": 4, "lr": 2e-3, "directions": "shared"
    }  # fmt: skip
    assert settings["rho"].source == RESOLVED and settings["rho"].value == job.optimizer.rho
    assert settings["targets"].source == settings["seed"].source == DEFAULT
    job.optimizer.close()


def test_a_method_that_needs_more_than_forward_passes_says_so():
    for known in (*METHODS.values(), *BASELINES.values()):
        more = known.needs != "forward passes"
        assert more == (known.name in (HEAD_FEEDBACK, GAUSS_NEWTON, POLICY_GRADIENT, *BASELINES)), known.name
    assert "output head" in METHODS[GAUSS_NEWTON].needs
    summary = METHODS[HEAD_FEEDBACK].summary
    assert "head" in HEAD_FEEDBACK and "gradient" in summary and "gradient" in METHODS[HEAD_FEEDBACK].needs


def test_settings_say_who_chose_and_print_as_a_table():
    optimizer = tezo.head_feedback(Regression(), rank=2)
    assert optimizer.settings["rank"].source == GIVEN and optimizer.settings["lr"].source == DEFAULT
    lines = str(optimizer.settings).splitlines()
    assert len(lines) == len(optimizer.settings) and len({line.rindex("  ") for line in lines}) == 1
    assert METHODS[HEAD_FEEDBACK].defaults()["lr"] == AUTO
    assert torch.is_tensor(optimizer.targets[0].parameter)
