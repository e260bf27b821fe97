"""The learning rate that a run chooses for itself: in closed form on a quadratic, and through the command line."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, effective_weights, every_method, every_method_fast_for_kinds, mostly_slow, run
from folders import Result, completion_rows, label_rows, model_folder, refused, tezo, write_rows
from tiny import Regression, lm_loss, tiny_opt, tokens
from torch import Tensor, nn

from tezo.optim import learning_rate as step_size
from tezo.optim.learning_rate import DIRECTIONS, StepSize, choose_lr
from tezo.optim.updates import SGD, Adam, AdaMU, FactoredAdam, NormalizedSGD
from tezo.runs.step_log import read_log
from tezo.training.config import read_config
from tezo.training.listeners import Listener
from tezo.training.loop import train

SIDE, BATCH, ROWS = 12, 16, 8
SIGNAL, NOISE, BEND = 8.0, 90.0, 0.75  # |mu|^2, the noise of one row's gradient, the curvature of every entry
TRACE = BEND * SIDE**2


class Quadratic(nn.Module):
    """<mu + e_part, W> + BEND |W|^2 / 2 around W_0, where e_part has the squared norm NOISE / ROWS in expectation."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.layer = nn.Linear(SIDE, SIDE, bias=False, dtype=torch.float64)
        self.start = self.layer.weight.detach().clone()
        mu = torch.randn(SIDE, SIDE, generator=draw, dtype=torch.float64)
        self.mu = mu * (SIGNAL**0.5 / mu.norm())

    def parts(self, count: int, seed: int, rows: int = ROWS) -> list[Callable[[], Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        size = (NOISE / rows / SIDE**2) ** 0.5
        grads = [self.mu + size * torch.randn(SIDE, SIDE, generator=draw, dtype=torch.float64) for _ in range(count)]
        return [lambda g=g: self.loss(g) for g in grads]

    def loss(self, grad: Tensor) -> Tensor:
        moved = self.layer(torch.eye(SIDE, dtype=torch.float64)).T - self.start
        return (grad * moved).sum() + BEND / 2 * moved.square().sum()


def chosen(seed: int = 0, count: int = 8, name: str = "mezo", **options: Any) -> StepSize:
    model = Quadratic()
    optimizer = CASES[name].build(model, rho=1e-2, seed=seed, **options)
    return choose_lr(optimizer, model.parts(count, seed), ROWS, BATCH)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std()) / math.sqrt(len(values))


@pytest.mark.parametrize("name", mostly_slow(["mezo", "lozo", "subzo", "tezo"], "tezo"))
def test_signal_noise_and_curvature_are_those_of_a_quadratic(name, monkeypatch):
    # The mean over seeds, that is over directions, their factors and noise, lies within four standard errors.
    monkeypatch.setattr(step_size, "DIRECTIONS", 16)
    more = {"rank": 8} if CASES[name].low_rank else {}
    found = [chosen(seed, name=name, **(CASES[name].options | more)) for seed in range(24)]
    for values, closed in (
        ([f.batch_sq - f.signal_sq for f in found], NOISE / BATCH),
        ([f.curvature for f in found], TRACE),
        ([f.signal_sq for f in found], SIGNAL),
    ):
        mean, error = mean_and_error(values)
        assert abs(mean - closed) < 4 * error, (mean, closed, error)
        assert error < 0.4 * closed, "the bound would let anything pass"


def test_noise_is_that_of_a_batch_and_not_of_a_part():
    model = Quadratic()
    optimizer = CASES["mezo"].build(model, rho=1e-2)
    one, four = (choose_lr(optimizer, model.parts(8, 0), ROWS, batch) for batch in (ROWS, 4 * ROWS))
    assert four.batch_sq - four.signal_sq == pytest.approx((one.batch_sq - one.signal_sq) / 4)


@pytest.mark.parametrize("q", [1, 4])
@every_method
def test_the_rate_is_the_minimiser_of_what_the_theory_says(case, q):
    if case.name == "zo-adamu" and q > 1:
        return
    found = chosen(3, name=case.name, **(case.options | {"num_directions": q}))
    model = Quadratic()
    update = case.build(model, num_directions=q).update
    s_sq, g_sq, h = found.signal_sq, found.batch_sq, found.curvature
    rates = torch.logspace(-6, 3, 90001, dtype=torch.float64)
    steps = rates / update.divisor(g_sq, q)  # along the plain estimate
    lowered = steps * s_sq - steps**2 / 2 * g_sq * h / q
    assert found.lr == pytest.approx(float(rates[lowered.argmax()]), rel=0.051)  # two digits
    assert found.lr == float(f"{found.lr:.1e}")


def test_the_formulas_of_plain_and_normalised_steps():
    g_sq, q = 9.0, 4
    adam = {"eps_in_sqrt": False, "bias_correction": True}
    assert SGD().divisor(g_sq, q) == AdaMU(1e-8).divisor(g_sq, q) == 1
    assert NormalizedSGD(0.99, 0.0).divisor(g_sq, q) == 3
    for kind in (Adam, FactoredAdam):
        assert kind((0.9, 0.99), 0.0, **adam).divisor(g_sq, q) == 1.5
        assert kind((0.9, 0.99), 1.75, **adam | {"eps_in_sqrt": True}).divisor(g_sq, q) == 2
        m = v = farthest = 0.0  # for estimates that are all 1.5, without bias correction
        for _ in range(200):
            m, v = 0.9 * m + 0.1 * 1.5, 0.99 * v + 0.01 * 1.5**2
            farthest = max(farthest, m / v**0.5)
        least = kind((0.9, 0.99), 0.0, eps_in_sqrt=True, bias_correction=False).divisor(g_sq, q)
        assert least == pytest.approx(1.5 / farthest) and farthest > 2


@pytest.mark.parametrize("q", mostly_slow([1, 4], 1))
def test_the_minimiser_lowers_the_loss_more_than_other_rates_do(q):
    # One step along dense noise, on the average of many, at the rate in closed form, a third of it and three times it.
    best = q * SIGNAL / ((SIGNAL + NOISE / BATCH) * TRACE)
    lowered = dict.fromkeys((1 / 3, 1.0, 3.0), 0.0)
    model = Quadratic()
    optimizer = CASES["mezo"].build(model, num_directions=q, rho=1e-2)
    noises = model.parts(250, seed=1, rows=BATCH)
    for factor in lowered:
        optimizer.param_groups[0]["lr"] = best * factor
        for noisy in noises:
            optimizer.step(noisy)
            lowered[factor] -= float(model.loss(model.mu).detach())
            with torch.no_grad():
                model.layer.weight.copy_(model.start)
    assert lowered[1.0] > 0
    assert lowered[1.0] > 1.2 * max(lowered[1 / 3], lowered[3.0]), lowered


@every_method_fast_for_kinds
def test_measuring_leaves_all_that_a_run_computes_as_it_was(case, monkeypatch):
    monkeypatch.setattr(step_size, "DIRECTIONS", 4)
    plain, measured = (case.build(tiny_opt(), targets=("all",)) for _ in range(2))
    halves = [lm_loss(measured.model, tokens(seed=100 + i)) for i in range(2)]
    choose_lr(measured, halves, 3, 3)
    assert run(plain, 0, 7) == run(measured, 0, 7)
    choose_lr(measured, halves, 3, 3)  # between steps too
    assert run(plain, 7, 12) == run(measured, 7, 12)
    for name, weight in effective_weights(plain).items():
        assert torch.equal(weight, effective_weights(measured)[name]), name


@every_method_fast_for_kinds
def test_other_directions_are_such_as_no_step_draws(case):
    model = tiny_opt()
    optimizer = case.build(model)
    loss = lm_loss(model, tokens())
    others = optimizer.measure(loss, 1e-3, others=5)
    assert optimizer.measure(loss, 1e-3, others=5) == others
    optimizer.step(loss)
    found = {probe.projected_grad for probe in (*others, *optimizer.last_step.probes)}
    assert len(found) == 6


def constant(model: Regression, value: float) -> Callable[[], float]:
    return lambda: value + 0 * float(model.loss())


def test_without_curvature_the_default_stays_and_that_is_said():
    model = Regression()
    optimizer = CASES["mezo"].build(model, lr=3e-5)
    flat = choose_lr(optimizer, [constant(model, 1.0), constant(model, 2.0)], 4, 4)
    assert flat.lr == 3e-5
    assert "chose 3.0e-05, the method's default, because the measured curvature" in flat.notice
    bent_down = choose_lr(optimizer, [lambda: -model.loss()] * 2, 4, 4)
    assert bent_down.curvature < 0 and bent_down.lr == 3e-5 and "the method's default" in bent_down.notice


def test_a_gradient_that_is_lost_in_noise_is_taken_for_its_error_and_that_is_said():
    model = Quadratic()
    optimizer = CASES["mezo"].build(model, rho=1e-2)
    grad = model.mu * 3
    found = choose_lr(optimizer, [lambda: model.loss(grad), lambda: model.loss(-grad)], ROWS, BATCH)
    assert "; the gradient is not above its error, so the error was used instead." in found.notice
    assert found.signal_sq > 0 and found.lr > 0
    assert "not above its error" not in choose_lr(optimizer, [lambda: model.loss(grad)] * 2, ROWS, BATCH).notice


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for number, name in enumerate(("train", "dev", "test")):
        write_rows(root / f"{name}.jsonl", label_rows(24, seed=number))
    model_folder(root, "opt")
    return root


def pairs(home: Path, **more: Any) -> list[tuple[str, Any]]:
    """Settings of a run that chooses its rate."""
    named = {name: home / f"{name}.jsonl" for name in ("train", "dev", "test")}
    options = {"method.rank": 4, "method.lr": "auto", "train.steps": 8, "train.checkpoint_every": 3}
    given = {"model.name": home / "opt", "train.batch_size": 4, **options, **more}
    return [(key, str(value)) for key, value in ({f"data.{k}": v for k, v in named.items()} | given).items()]


def command(output: Path, settings: Sequence[tuple[str, Any]], *flags: Any) -> Result:
    given = [part for key, value in settings for part in ("--set", f"{key}={value}")]
    return tezo("train", "--output", output, "--json", *flags, *given)


class Death(Listener):
    def stepped(self, progress: Any) -> None:
        if progress.record.step == 4:
            raise KeyboardInterrupt


def tuned(run: Path) -> bytes:
    return (run / "adapter/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("name", mostly_slow(["tezo", "tezo-cadam"], "tezo-cadam"))
def test_a_run_records_the_rate_it_chose_and_resumes_and_replays_to_the_bit(home, tmp_path, name):
    whole, cut, again, number = (tmp_path / name for name in ("whole", "cut", "again", "number"))
    auto = pairs(home, **{"method.name": name})
    done = command(whole, auto, "--lr", "auto")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    (notice,) = [notice for notice in summary["notices"] if notice.startswith("method.lr: auto chose ")]
    log = read_log(whole / "steps.log")
    lr = log.header["config"]["method"]["lr"]
    assert f"auto chose {lr:.1e}, from {DIRECTIONS} directions on 48 rows (204 forward passes)" in notice
    assert {step.lr for step in log.steps} == {lr}
    assert read_config(whole / "config.yaml", []).method.options["lr"] == lr
    assert math.isfinite(summary["after"]["loss"])
    with pytest.raises(KeyboardInterrupt):
        train(read_config(None, auto), cut, [Death()])
    resumed = command(cut, auto, "--resume")
    assert resumed.code == 0, resumed.err
    assert tezo("replay", whole, "--output", again).code == 0
    assert command(number, [*auto, ("method.lr", lr)]).code == 0, "the same run with the number"
    assert tuned(cut) == tuned(again) == tuned(number) == tuned(whole)
    assert (cut / "steps.log").read_bytes() == (number / "steps.log").read_bytes() == (whole / "steps.log").read_bytes()


def test_requests_that_have_no_rate_to_measure_are_refused(home, tmp_path):
    auto = pairs(home)
    for more, said in (
        ({"method.name": "adam"}, ("method.lr is auto, which is for zeroth-order methods; set a number for adam",)),
        ({"train.objective": "accuracy"}, ("method.lr is auto, which needs train.objective loss, not accuracy",)),
        ({"method.lr": "fast"}, ("method.lr is 'fast'", "a number")),
    ):
        kept = [(k, v) for k, v in auto if more.get("method.name") != "adam" or k != "method.rank"]
        refused(command(tmp_path / "run", [*kept, *more.items()]), *said)
    one = write_rows(tmp_path / "one.jsonl", completion_rows(1))
    few = [(key, value) for key, value in auto if key not in ("data.dev", "data.test")] + [("data.test", one)]
    refused(command(tmp_path / "run", [*few, ("data.train", one)]), "method.lr is auto, and there are 1 rows")
    assert not (tmp_path / "run").exists()
