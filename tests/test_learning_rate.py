"""The learning rate that a run chooses for itself: by trials that leave no trace, and through the command line."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, effective_weights, mostly_slow, run
from folders import Result, completion_rows, label_rows, model_folder, refused, tezo, write_rows
from tezo_methods.mezo_norm import NormalizedSGD
from tiny import Regression, lm_loss, tiny_opt, tokens
from torch import Tensor

from tezo.methods import METHODS
from tezo.optim.factored_adam import FactoredAdam
from tezo.optim.learning_rate import CAUTION, ENOUGH, MOST_PASSES, MOST_TRIALS, TRIAL_STEPS, ChosenRate, choose_lr
from tezo.optim.updates import SGD, Adam, AdaMU
from tezo.runs.step_log import read_log
from tezo.system.errors import NonFiniteModelError
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import read_config

HELD_OUT, HELD_OUT_PASSES = 8, 2


class Noisy(Regression):
    """Least squares with batches of 12 of 48 rows; 16 more are held out."""

    def batch(self, step: int) -> Callable[[], Tensor]:
        draw = torch.Generator().manual_seed(step)
        chosen = torch.randperm(48, generator=draw)[:12]
        return lambda: (self.layer(self.x[chosen]) - self.y[chosen]).square().mean()

    def held_out(self) -> list[float]:
        errors = (self.layer(self.x[48:]) - self.y[48:]).square().mean(1)
        return errors.unflatten(0, (HELD_OUT, -1)).mean(1).tolist()

    def start(self) -> float:
        return sum(self.held_out()) / HELD_OUT


def chosen(model: Noisy, optimizer: Any, steps: int = 200, scale: float = 1.0) -> ChosenRate:
    def batch(step: int) -> Callable[[], Tensor]:
        loss = model.batch(step)
        return lambda: scale * loss()

    with torch.no_grad():
        return choose_lr(optimizer, batch, lambda: [scale * loss for loss in model.held_out()], HELD_OUT_PASSES, steps)


def progress(name: str, lr: float, steps: int, **options: Any) -> float:
    """The held-out loss after a run over that before."""
    model = Noisy()
    before = model.start()
    optimizer = CASES[name].build(model, **(CASES[name].options | options | {"lr": lr}))
    for step in range(steps):
        optimizer.step(model.batch(step))
    return model.start() / before


RATED = [name for name in CASES if name != "sparse-mezo"]
"""Not sparse-mezo: entries that grow are left out from then on, which a few steps do not show."""


@pytest.mark.parametrize("case", mostly_slow([CASES[name] for name in RATED], CASES["tezo-cadam"]), ids=RATED)
def test_a_run_at_the_chosen_rate_is_as_good_as_the_best_of_a_grid(case):
    # 15 dimensions: with one direction a step, luck decides. With four, about one seed of eight is short for lozo-m.
    steps, model, options = 120, Noisy(), {"num_directions": 1 if case.single_direction else 4, "seed": 1}
    options |= {"scale": "unit"} if "scale" in METHODS[case.name].options() else {}
    found = chosen(model, case.build(model, **options), steps)
    grid = {found.lr * 3.0**k: progress(case.name, found.lr * 3.0**k, steps, **options) for k in range(-3, 4)}
    assert 1 - grid[found.lr] > 0.75 * (1 - min(grid.values())), grid


@pytest.mark.parametrize("case", mostly_slow(CASES.values(), CASES["lozo-m"], CASES["tezo-cadam"]), ids=CASES)
def test_trials_leave_all_that_a_run_computes_as_it_was(case):
    plain, measured = (case.build(tiny_opt(), targets=("all",)) for _ in range(2))
    model = measured.model
    held = [lm_loss(model, tokens(seed=100 + i)) for i in range(4)]
    found = choose_lr(
        measured, lambda step: lm_loss(model, tokens(seed=step)), lambda: [float(loss()) for loss in held], 4, 60
    )
    assert {group["lr"] for group in measured.param_groups} == {found.lr}
    assert measured.num_steps == measured.num_forward_passes == 0 and measured.last_step is None
    for group in plain.param_groups:
        group["lr"] = found.lr
    assert run(plain, 0, 7) == run(measured, 0, 7)
    for name, weight in effective_weights(plain).items():
        assert torch.equal(weight, effective_weights(measured)[name]), name


@pytest.mark.parametrize("name", ["mezo", "tezo-cadam"])
def test_the_search_halves_from_a_rate_that_raises_the_loss_and_ends_when_it_gets_worse(name):
    model = Noisy()
    optimizer = CASES[name].build(model)
    found = chosen(model, optimizer)
    rates = [trial.lr for trial in found.trials]
    assert all(low == pytest.approx(high / 2) for high, low in itertools.pairwise(rates))
    changes = [trial.change for trial in found.trials]
    best = min(range(len(changes)), key=changes.__getitem__)
    assert best == len(changes) - 2 or found.num_forward_passes >= MOST_PASSES
    assert found.lr == pytest.approx(CAUTION * rates[best], rel=0.05) and found.lr == float(f"{found.lr:.1e}")
    assert found.trials[best].steps == TRIAL_STEPS and changes[best] < 0 and len(rates) <= MOST_TRIALS
    assert progress(name, 8 * rates[0], 2) > 1, "above the first rate a step raises the loss"


def test_a_trial_is_the_start_of_the_run_at_its_rate():
    model = Noisy()
    before, found = model.start(), chosen(model, CASES["tezo-cadam"].build(model))
    for trial in found.trials:
        assert trial.change == pytest.approx(before * (progress("tezo-cadam", trial.lr, trial.steps) - 1), rel=1e-6)


@pytest.mark.parametrize(("name", "power"), [("mezo", -1), ("tezo", -1), ("mezo-norm", 0)])
def test_a_loss_in_other_units_has_the_rate_in_these_units(name, power):
    # c f has c times the gradient: plain steps need lr / c; normalised steps, and these alone, need lr itself.
    def rate(scale: float) -> float:
        model = Noisy()
        options = {"eps": 1e-30} if power == 0 else {}
        return chosen(model, CASES[name].build(model, **options), 200, scale).lr

    assert rate(64.0) == pytest.approx(rate(1.0) * 64.0**power, rel=0.051)  # two digits each


def test_all_passes_are_counted():
    model, calls = Noisy(), 0

    def batch(step: int) -> Callable[[], Tensor]:
        loss = model.batch(step)

        def counted() -> Tensor:
            nonlocal calls
            calls += 1
            return loss()

        return counted

    def held_out() -> list[float]:
        nonlocal calls
        calls += HELD_OUT_PASSES
        return model.held_out()

    with torch.no_grad():
        found = choose_lr(CASES["mezo"].build(model), batch, held_out, HELD_OUT_PASSES, 200)
    assert found.num_forward_passes == calls
    assert f"({calls} forward passes)" in found.notice and calls < 1.5 * MOST_PASSES


def test_short_runs_have_short_trials():
    model = Noisy()
    found = chosen(model, CASES["mezo"].build(model), steps=20)
    assert max(trial.steps for trial in found.trials) == 4


def test_a_loss_that_no_direction_changes_leaves_the_default_and_that_is_said():
    model = Noisy()
    optimizer = CASES["mezo"].build(model, lr=3e-5)
    flat = choose_lr(optimizer, lambda _: lambda: 1.0 + 0 * model.loss(), lambda: [1.0], 1, 100)
    assert (flat.lr, flat.trials) == (3e-5, ()) and "method.lr: 3.0e-05, the method's default" in flat.notice


@pytest.mark.parametrize("name", ["mezo", "tezo-cadam"])
def test_a_search_that_is_interrupted_leaves_the_model_as_before(name):
    model, counted = Noisy(), itertools.count()
    optimizer = CASES[name].build(model)
    before, lr = {key: value.clone() for key, value in model.state_dict().items()}, optimizer.param_groups[0]["lr"]

    def interrupted() -> Tensor:
        if next(counted) == 30:  # in a trial
            raise KeyboardInterrupt
        return model.loss()

    with pytest.raises(KeyboardInterrupt):
        choose_lr(optimizer, lambda _: interrupted, lambda: [float(model.loss())] * 2, 1, 200)
    assert optimizer.num_steps == 0 and optimizer.param_groups[0]["lr"] == lr
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


@pytest.mark.parametrize("name", mostly_slow(["mezo", "tezo", "tezo-cadam", "lozo"], "mezo", "tezo-cadam"))
def test_a_loss_that_cannot_rise_far_bounds_the_rate_all_the_same(name):
    top, case = Noisy().start(), CASES[name]

    def bounded(loss: Any) -> float:  # at the start 0.96 of its bound
        return math.tanh(2 * float(loss) / top)

    def batch(model: Noisy, step: int) -> Callable[[], float]:
        loss = model.batch(step)
        return lambda: bounded(loss())

    def after(lr: float) -> float:
        model = Noisy()
        optimizer = case.build(model, **(case.options | {"lr": lr}))
        for step in range(120):
            optimizer.step(batch(model, step))
        return sum(map(bounded, model.held_out())) / HELD_OUT

    model = Noisy()
    with torch.no_grad():
        found = choose_lr(
            case.build(model),
            lambda step: batch(model, step),
            lambda: [bounded(loss) for loss in model.held_out()],
            HELD_OUT_PASSES,
            200,
        )
    grid = {found.lr * 4.0**k: after(found.lr * 4.0**k) for k in range(-6, 3)}
    best = min(grid, key=grid.__getitem__)
    assert best / 4**3 < found.lr < best * 4**3, grid  # without a bound it is above 1e5


def test_where_no_trial_lowers_the_loss_the_rate_is_low_and_that_is_said():
    model = Noisy()
    optimizer = CASES["mezo"].build(model)
    start = model.layer.weight.detach().clone()

    def rising() -> list[float]:  # with the distance from the start, whatever the direction
        return [1 + float((model.layer.weight - start).square().sum())] * 8

    def apart() -> list[float]:  # and as much for one half of the rows as it falls for the other
        return [1 + float((model.layer.weight - start).norm()) * (-1.0) ** row for row in range(8)]

    with torch.no_grad():
        up, none = (choose_lr(optimizer, model.batch, held_out, 1, 100) for held_out in (rising, apart))
    assert "all trials failed, so it is below the lowest" in up.notice
    assert all(trial.failed for trial in up.trials) and up.lr == pytest.approx(CAUTION * up.trials[-1].lr, rel=0.05)
    assert "no trial lowered the loss, so it is below the highest that did not fail" in none.notice
    assert len(none.trials) == ENOUGH and none.lr == pytest.approx(CAUTION**2 * none.trials[0].lr, rel=0.05)


def test_a_held_out_loss_that_is_not_finite_is_an_error():
    model = Noisy()
    with pytest.raises(NonFiniteModelError, match="the loss of the untuned model is nan"):
        choose_lr(CASES["mezo"].build(model), model.batch, lambda: [math.nan], 1, 100)


def test_the_formulas_of_plain_and_normalised_steps():
    g_sq, q = 9.0, 4
    adam = {"eps_in_sqrt": False, "bias_correction": True}
    assert SGD().divisor(g_sq, q) == AdaMU(1e-8).divisor(g_sq, q) == 1
    assert NormalizedSGD(0.99, 1e-30).divisor(g_sq, q) == 3
    for kind in (Adam, FactoredAdam):
        assert kind((0.9, 0.99), 1e-30, **adam).divisor(g_sq, q) == 1.5
        assert kind((0.9, 0.99), 1.75, **adam | {"eps_in_sqrt": True}).divisor(g_sq, q) == 2
        m = v = farthest = 0.0  # for estimates that are all 1.5, without bias correction
        for _ in range(200):
            m, v = 0.9 * m + 0.1 * 1.5, 0.99 * v + 0.01 * 1.5**2
            farthest = max(farthest, m / v**0.5)
        least = kind((0.9, 0.99), 1e-30, eps_in_sqrt=True, bias_correction=False).divisor(g_sq, q)
        assert least == pytest.approx(1.5 / farthest) and farthest > 2


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
    auto = pairs(
        home,
        **{
            "method.name": name,
            "train.steps": 60,
            "train.batch_size": 24,
            "train.guard": False,
            "train.checkpoint_every": 3,
        },
    )
    done = command(whole, auto, "--lr", "auto")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    (notice,) = [notice for notice in summary["notices"] if notice.startswith("method.lr: ")]
    log = read_log(whole / "steps.log")
    lr = log.header["config"]["method"]["lr"]
    assert f"method.lr: {lr:.1e} was chosen by " in notice and "of at most 4 steps" in notice
    assert {step.lr for step in log.steps} == {lr}
    assert read_config(whole / "config.yaml", []).method.options["lr"] == lr
    assert math.isfinite(summary["after"]["loss"])
    with pytest.raises(KeyboardInterrupt):
        train(read_config(None, auto), cut, [Death()])
    resumed = command(cut, auto, "--resume")
    assert resumed.code == 0, resumed.err
    assert tezo("replay", whole, "--output", again).code == 0
    assert command(number, [*(dict(auto) | {"method.lr": lr}).items()]).code == 0, "the same run with the number"
    assert tuned(cut) == tuned(again) == tuned(number) == tuned(whole)
    assert (cut / "steps.log").read_bytes() == (whole / "steps.log").read_bytes()
    same = read_log(number / "steps.log")
    assert same.steps == log.steps
    own = {"sources": log.header["sources"] | {"lr": "given"}, "notices": []}
    assert same.header == log.header | own and log.header["notices"] == [notice]


def test_requests_that_have_no_rate_to_measure_are_refused(home, tmp_path):
    auto = pairs(home)
    for more, said in (
        ({"method.name": "adam"}, ("method.lr is 'auto'; it must be a number",)),
        ({"train.objective": "accuracy"}, ("method.lr is auto, which needs train.objective loss, not accuracy",)),
        ({"method.lr": "fast"}, ("method.lr is 'fast'", "a number")),
    ):
        kept = {k: v for k, v in auto if more.get("method.name") != "adam" or k != "method.rank"}
        refused(command(tmp_path / "run", [*(kept | more).items()]), *said)
    one = write_rows(tmp_path / "one.jsonl", completion_rows(1))
    few = {key: value for key, value in auto if key != "data.dev"}
    few |= {"data.test": one, "data.train": one, "data.hold_out": 0, "method.name": "head-feedback"}
    refused(command(tmp_path / "run", [*few.items()]), "method.lr is auto, and there are no rows to compare rates on")
    assert not (tmp_path / "run").exists()
