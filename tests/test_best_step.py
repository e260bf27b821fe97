"""A run is evaluated at its steps, and keeps the best of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mostly_slow
from folders import model_and_rows, read_jsonl
from long_steps import DENSE, FACTORED, config
from short_runs import result

from tezo.tasks.evaluation import evaluate
from tezo.tasks.row_sources import read_rows
from tezo.tasks.setup import make_format, make_objective
from tezo.training.loop import train
from tezo.training.opening import open_model, run_config
from tezo.training.rows_of_steps import interval
from tezo.training.settings import TrainConfig


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return model_and_rows(tmp_path_factory.mktemp("home"), 14)


def dev_losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_jsonl(run / "metrics.jsonl") if line.get("split") == "dev"}


def wavering(home: Path, folder: Path, method: str) -> tuple[int, dict[str, Any]]:
    """A run whose best evaluation is neither the first nor the last, and its seed."""
    for seed in range(30):
        summary = train(config(home, method, seed=seed), folder / str(seed))
        losses = dev_losses(folder / str(seed))
        best = min(losses, key=losses.get)
        if 1 < best < 8 and losses[8] - losses[best] > 1e-3:
            return seed, summary
    raise AssertionError("no such run")


@pytest.mark.parametrize("method", mostly_slow([*DENSE, *FACTORED], "mezo", "tezo-cadam"))
def test_the_result_is_that_of_the_best_evaluation(home, tmp_path, method):
    seed, summary = wavering(home, tmp_path, method)
    run = tmp_path / str(seed)
    losses = dev_losses(run)
    best = min(losses, key=losses.get)
    assert list(losses) == list(range(9))
    assert (summary["kept_step"], summary["steps"], summary["dev_loss"]) == (best, 8, losses[best])
    assert summary["result"]["kind"] == ("model" if method in DENSE else "adapter")
    assert tuned_loss(home, run, method) == pytest.approx(losses[best], abs=1e-5)
    # The same run, ended at its best step, leaves the same numbers.
    train(config(home, method, seed=seed, steps=best, keep_best=False), tmp_path / "short")
    kept, short = result(run), result(tmp_path / "short")
    assert kept.keys() == short.keys()
    for name, value in short.items():
        torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-5)


def tuned_loss(home: Path, run: Path, method: str) -> float:
    """The dev loss of what a run saved."""
    settings = run_config(str(run), [])
    loaded = open_model(str(run), settings)
    rows = read_rows(str(home / "dev.jsonl"), key="data")
    form = make_format(settings.data, loaded, rows)
    objective = make_objective(settings.data, loaded, form)
    assert settings.method.name == method
    return evaluate(loaded.model, objective, [objective.encode(form.example(row)) for row in rows], 64)[0]["loss"]


@pytest.mark.parametrize("method", mostly_slow(["tezo-cadam", "mezo"], "mezo"))
def test_without_keep_best_the_result_is_that_of_the_last_step(home, tmp_path, method):
    seed, _ = wavering(home, tmp_path, method)
    summary = train(config(home, method, seed=seed, keep_best=False), tmp_path / "last")
    assert dev_losses(tmp_path / "last") == dev_losses(tmp_path / str(seed))
    assert (summary["kept_step"], summary["dev_loss"]) == (8, dev_losses(tmp_path / "last")[8])
    assert tuned_loss(home, tmp_path / "last", method) == pytest.approx(dev_losses(tmp_path / "last")[8], abs=1e-5)


@pytest.mark.parametrize("data", [("train", "dev"), ("train",)], ids=["dev rows", "held-out rows"])
def test_a_run_without_evaluations_keeps_its_last_step(home, tmp_path, data):
    summary = train(config(home, data=data, eval_every=0), tmp_path / "run")
    assert summary["kept_step"] == summary["steps"] == 8
    assert summary["before"] != summary["after"]


@pytest.mark.parametrize(("steps", "every", "expected"), [(8, 3, [0, 3, 6, 8]), (20, None, list(range(0, 21, 2)))])
def test_evaluations_fall_on_every_so_many_steps_and_on_the_last(home, tmp_path, steps, every, expected):
    train(config(home, steps=steps, eval_every=every), tmp_path / "run")
    assert list(dev_losses(tmp_path / "run")) == expected
    assert interval(None, TrainConfig(steps=4)) == 1
