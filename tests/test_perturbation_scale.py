"""The perturbation scale that a run chooses: the paper's in float32, by its error where a model rounds its losses."""

import json

import pytest
import torch
from cases import CASES
from folders import completion_rows, model_folder, refused, train, write_rows
from tezo.optim.estimate_error import ENOUGH, measure_estimate_error, recommended

from tezo.optim.methods import METHODS
from tezo.training.configuration.config import parse_config, read_config
from tezo.training.preparation.job import make_optimizer, prepare
from tezo.training.preparation.perturbation_scale import DEFAULT_RHO, SCALES


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for dtype in (torch.float32, torch.bfloat16):
        model_folder(root, "opt", dtype=dtype)
    write_rows(root / "rows.jsonl", completion_rows(24))
    return root


def prepared(home, model, method="tezo", **options):
    options = {"name": method, "lr": 1e-3, **({"rank": 4} if CASES[method].low_rank else {}), **options}
    return prepare(parse_config({"model": {"name": str(home / model)}, "data": {"train": str(home / "rows.jsonl")},
                                 "method": options, "train": {"batch_size": 8}}))  # fmt: skip


@pytest.mark.parametrize("method", ["tezo", "mezo"])
def test_in_float32_it_is_the_papers_and_nothing_is_measured(home, method):
    job = prepared(home, "opt", method)
    assert job.optimizer.rho == job.config.method.options["rho"] == DEFAULT_RHO
    assert not any("method.rho" in notice for notice in job.notices)


@pytest.mark.parametrize("method", ["tezo", "lozo-adam", "mezo"])
def test_in_half_precision_it_is_the_scale_of_least_or_acceptable_error(home, method):
    job = prepared(home, "optbfloat16", method)
    rho = job.config.method.options["rho"]
    assert rho in SCALES and job.optimizer.rho == rho
    assert any(f"method.rho: {rho:g} was chosen" in notice for notice in job.notices)
    job.optimizer.close()
    cheap = {"basis": "gaussian"} if "basis" in METHODS[method].options() else {}
    fresh = make_optimizer(job.config.with_options(rho=DEFAULT_RHO, **cheap), job.loaded, job.untrained)
    loss = job.objective.closure(job.model, job.objective.batches(job.train[:8]))
    errors = measure_estimate_error(fresh, loss, SCALES)
    fresh.close()
    assert recommended(errors).rho == rho
    least = min(error.error for error in errors)
    assert next(e for e in errors if e.rho == rho).error <= max(least, ENOUGH)


def test_a_number_is_taken_as_it_is(home):
    assert prepared(home, "optbfloat16", rho=0.02).optimizer.rho == 0.02


def test_a_metric_has_no_scale_to_measure(home, tmp_path):
    named = {"method__rho": "auto", "train__objective": "token_accuracy"}
    refused(train(home / "optbfloat16", home / "rows.jsonl", tmp_path / "run", **named), "method.rho is auto")


def test_a_run_records_it_and_goes_on_with_it(home, tmp_path):
    done = train(home / "optbfloat16", home / "rows.jsonl", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    rho = read_config(tmp_path / "run/config.yaml", []).method.options["rho"]
    assert rho in SCALES
    (tmp_path / "run/summary.json").unlink()
    again = train(home / "optbfloat16", home / "rows.jsonl", tmp_path / "run", "--json", "--resume")
    assert again.code == 0, again.err
    assert not any("method.rho" in notice for notice in json.loads(again.out)["notices"]), "measured once"
