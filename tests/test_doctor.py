"""What `tezo doctor` says of a model: forecasts are what a step keeps, noise is what theory says of known functions."""

import itertools
import json
import statistics

import pytest
import torch
from folders import model_folder, refused, tezo
from torch import nn

from tezo.models.loading import load_model
from tezo.optim.estimate_error import AROUND, ENOUGH, EstimateError, measure_estimate_error, recommended
from tezo.optim.memory_forecast import forecasts
from tezo.optim.methods import METHODS
from tezo.optim.methods import tezo as plain_tezo

RHOS = (1e-1, 3e-2, 1e-2, 3e-3)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "bert", "roberta"):
        model_folder(root, family)
    return root


def line(directions=4):
    """A layer, and an optimizer of it: Z is the same function of (seed, step) at every scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False, dtype=torch.float64))
    return model, plain_tezo(model, rank=3, num_directions=directions, seed=1), torch.randn(7, 6, dtype=torch.float64)


def test_of_a_cubic_the_shift_is_that_of_rho_squared():
    # kappa(rho) = kappa + a rho^2 exactly, so the means at rho and rho' differ by a mean(factor^2) (rho^2 - rho'^2)
    model, optimizer, x = line()
    noise = measure_estimate_error(optimizer, lambda: model(x).pow(3).sum(), RHOS)
    gaps = [a**2 - b**2 for a, b in itertools.pairwise(RHOS)]
    squares = [factor**2 for factor in AROUND]
    for one, other, gap, wider in zip(noise[1:], noise, gaps[1:], gaps, strict=False):
        assert one.shift / other.shift == pytest.approx(gap / wider, rel=2e-3)
    for at, gap in zip(noise, gaps, strict=False):
        expected = at.rho**2 * statistics.stdev(squares) / (gap * statistics.fmean(squares))
        assert at.scatter / at.shift == pytest.approx(expected, rel=2e-2)
    assert noise[-1].shift == 0


def test_of_a_rounded_loss_the_scatter_is_that_of_the_grid():
    # Each loss is off by a uniform error of a grid's width q: variance q^2 / 12, of their difference twice that. Of a
    # square the central difference is exact, and plus and minus fall on the grid independently.
    model, optimizer, x = line(directions=64)
    q = 1e-5
    noise = measure_estimate_error(optimizer, lambda: (model(x).square().sum() / q).round() * q, (1e-2, 3e-3))
    exact = optimizer.measure(lambda: model(x).square().sum(), 1e-2)
    size = statistics.fmean(probe.projected_grad**2 for probe in exact) ** 0.5
    for at in noise:
        assert at.scatter * size == pytest.approx(q / 6**0.5 / (2 * at.rho), rel=0.2)  # 192 degrees of freedom: 5 %
    # what the scatter of the finer scale, three times as large, makes of the shift is taken off it
    assert noise[0].shift < 1.5 * noise[0].scatter


def test_measuring_takes_no_step():
    model, optimizer, x = line()
    before = model[0].weight.clone()
    first = optimizer.measure(lambda: model(x).sum(), 1e-3)
    assert optimizer.measure(lambda: model(x).sum(), 1e-3) == first
    assert optimizer.num_steps == 0 and torch.equal(model[0].weight, before) and torch.equal(model(x), x @ before.T)


def test_the_largest_scale_that_is_good_enough_is_recommended():
    def table(*errors):
        return [EstimateError(rho, error, 0.0) for rho, error in zip(RHOS, errors, strict=True)]

    assert recommended(table(0.5, ENOUGH, 0.001, 0.0)).rho == RHOS[1]
    assert recommended(table(0.5, 0.2, 0.1, 0.3)).rho == RHOS[2]


@pytest.mark.parametrize("family", ["opt", "bert"])
def test_forecasts_are_what_a_step_keeps(home, family):
    loaded = load_model(str(home / family))
    ids = torch.arange(5, 15).unsqueeze(0)
    for forecast in forecasts(loaded.model):
        options = {} if forecast.rank is None else {"rank": forecast.rank}
        model = load_model(str(home / family)).model
        optimizer = METHODS[forecast.method].build(model, seed=0, **options)
        optimizer.step(lambda model=model: model(input_ids=ids)[0].square().mean())
        state = {key: value for key, value in optimizer.resumable_state().items() if not key.startswith("weight/")}
        factors = (value for key, value in state.items() if key.startswith("change/") and not key.endswith("/born"))
        changes = sum(value.nbytes for value in factors)
        if not changes and forecast.method == "tezo-adam":  # keeps a zero coefficient that it never moves
            changes = sum(4 * optimizer.perturbation.rank_of(name) for name in optimizer.moving)
        moments = sum(value.nbytes for key, value in state.items() if key.startswith("update/"))
        assert forecast.kept == optimizer.factor_bytes + changes + moments, forecast.method
        assert forecast.trained == sum(target.parameter.numel() for target in optimizer.targets)
        assert not any(module._forward_hooks for module in loaded.model.modules()), "a forecast leaves nothing behind"


@pytest.mark.parametrize("family", ["opt", "bert", "roberta"])
def test_doctor_answers_for_every_kind_of_model(home, family):
    done = tezo("doctor", "--model", home / family, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["model"]
    assert {row["method"] for row in report["methods"]} == set(METHODS)
    shown = tezo("doctor", "--model", home / family).out
    assert "exact LoRA adapter" in shown
    if family == "roberta":  # its tokenizer has no word for the answers
        assert "is not a single token of this model" in report["noise"] and report["noise"] in shown
    else:
        scales = [row["rho"] for row in report["noise"]]
        assert scales == sorted(scales, reverse=True) and report["recommended_rho"] in scales
        assert "<- method.rho" in shown


def test_doctor_says_what_a_packed_model_cannot_take():
    done = tezo("doctor", "--model", "embedded:all-minilm-l6-v2", "--quantization", "nf4", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["model"]
    can = {row["method"] for row in report["methods"] if row["refusal"] is None}
    assert can == {"tezo", "tezo-m", "tezo-cadam", "lozo", "lozo-m", "lozo-adam", "subzo"}
    assert report["parameters"] == 22713216, "numbers, not bytes that hold two"


def test_doctor_refuses_what_train_refuses(home):
    refused(tezo("doctor", "--model", home / "opt", "--quantization", "nf5"), "model.quantization", "nf5")
    refused(tezo("doctor", "--model", home / "opt", "--set", "model.dtype=int4"), "model.dtype", "int4")
