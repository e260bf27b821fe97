"""The interface of torch.optim: schedules, records, several directions, any scalar objective, requests refused."""

import math

import pytest
import torch
from cases import CASES, Case, choose, effective_weights, every_method, every_method_fast_for_kinds
from tiny import Regression, lm_loss, tiny_opt, tokens
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from tezo import RequestError
from tezo.directions.low_rank import Lazy, Subspace
from tezo.directions.perturbation import Annealing, DenseGaussian, SimulatedMomentum
from tezo.directions.random import DrawKey
from tezo.directions.ranks import FixedRank
from tezo.directions.targets import Target
from tezo.methods import AUTO, METHODS, method
from tezo.optim.factored_adam import FactoredAdam
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import SGD, Adam, AdaMU

RHO = 1e-3


def dense_z(optimizer: ZerothOrderOptimizer, target: Target, step: int, index: int = 0) -> Tensor:
    z = torch.zeros(target.stored_shape, dtype=torch.float64)
    optimizer.perturbation.direction(target, DrawKey(optimizer.seed, step, index), {}).add_to_(z, 1.0)
    return z


SCHEDULES = {
    "lambda": (lambda optimizer: LambdaLR(optimizer, lambda t: 0.5**t), lambda t: 0.5**t),
    "cosine": (lambda optimizer: CosineAnnealingLR(optimizer, T_max=8), lambda t: (1 + math.cos(math.pi * t / 8)) / 2),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@every_method
def test_torchs_schedulers_set_the_step_size(case, schedule):
    make, factor = SCHEDULES[schedule]
    model = Regression()
    optimizer = case.build(model, lr=1e-2, rho=RHO)
    scheduler = make(optimizer)
    for t in range(8):
        before = effective_weights(optimizer)
        optimizer.step(model.loss)
        lr = 1e-2 * factor(t)
        assert optimizer.last_step.lr == pytest.approx(lr, rel=1e-12)
        if case.plain:
            (kappa,) = optimizer.last_step.projected_grads
            for target in optimizer.targets:
                change = effective_weights(optimizer)[target.name] - before[target.name]
                torch.testing.assert_close(change, -lr * kappa * dense_z(optimizer, target, t), rtol=1e-7, atol=1e-12)
        scheduler.step()


@every_method_fast_for_kinds
def test_half_the_learning_rate_is_half_the_first_step(case):
    def change(lr: float) -> dict[str, Tensor]:
        model = tiny_opt()
        optimizer = case.build(model, lr=lr, targets=("all",))
        before = effective_weights(optimizer)
        optimizer.step(lm_loss(model, tokens()))
        return {name: weight - before[name] for name, weight in effective_weights(optimizer).items()}

    whole, half = change(2e-2), change(1e-2)
    torch.testing.assert_close({name: 2 * x for name, x in half.items()}, whole, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("q", [2, 5])
@choose("mezo", "lozo", "subzo", "tezo")
def test_several_directions_are_averaged_each_with_its_own_projected_gradient(case, q):
    model = Regression()
    optimizer = case.build(model, lr=1e-2, rho=RHO, num_directions=q, targets=("all",))
    targets = {target.name: target for target in optimizer.targets}
    before = {name: target.parameter.detach().clone() for name, target in targets.items()}
    zs = [{name: dense_z(optimizer, target, 0, i) for name, target in targets.items()} for i in range(q)]
    estimate = {name: torch.zeros_like(weight) for name, weight in before.items()}
    kappas = []
    for z in zs:  # measured here, on a model of its own
        losses = []
        for sign in (1, -1):
            twin = Regression()
            twin.load_state_dict({name: before[name] + sign * RHO * z[name] for name in before})
            losses.append(twin.loss().item())
        kappas.append((losses[0] - losses[1]) / (2 * RHO))
        for name in estimate:
            estimate[name] += kappas[-1] * z[name] / q
    optimizer.step(model.loss)
    assert optimizer.last_step.projected_grads == pytest.approx(kappas, rel=1e-4)  # the loss is float32
    assert len(set(kappas)) == q
    for name, weight in effective_weights(optimizer).items():
        torch.testing.assert_close(weight - before[name], -1e-2 * estimate[name], rtol=1e-3, atol=1e-5)


@every_method_fast_for_kinds
def test_an_objective_need_not_be_differentiable(case):
    # Minus the share of right answers, as a Python float: piecewise constant, its gradient is 0 everywhere.
    model = Regression()
    labels = model.y.argmax(dim=1)

    def minus_accuracy() -> float:
        return -float((model.layer(model.x).argmax(dim=1) == labels).double().mean())

    larger = {"lr": 0.2} if case.name == "mezo-conservative" else {}  # small steps change no answer, and are left out
    optimizer = case.build(model, rho=0.2, **larger)
    losses = [optimizer.step(minus_accuracy) for _ in range(300)]
    assert all(isinstance(loss, float) and -1 <= loss <= 0 for loss in losses)
    assert min(losses[-20:]) < losses[0] - 0.1


@pytest.mark.parametrize("make", [float, torch.tensor, lambda x: torch.tensor([[x]]), torch.DoubleTensor([1]).mul])
def test_any_scalar_is_a_loss_and_kappa_is_a_double(make):
    model, losses, scales = Regression(), iter([2.5, 1.25]), []
    optimizer = CASES["mezo"].build(model)
    (moving,) = optimizer.parameters.values()
    perturb = moving.set_perturbations
    moving.set_perturbations = lambda shifts: (scales.append([shift.scale for shift in shifts]), perturb(shifts))
    (probe,) = optimizer.measure(lambda: (model.loss(), make(next(losses)))[1], 1e-3)
    assert (probe.loss_plus, probe.loss_minus) == (2.5, 1.25)
    assert probe.projected_grad == 1.25 / 2e-3
    assert scales == [[1e-3], [-1e-3], []]


def test_a_step_is_recorded_as_it_was():
    model = Regression()
    optimizer = CASES["tezo"].build(model, num_directions=3, lr=1e-3)
    assert optimizer.last_step is None and optimizer.num_forward_passes == 0
    seen = []

    def closure() -> Tensor:
        seen.append(float(model.loss().detach()))
        return model.loss()

    for step in range(4):
        seen.clear()
        loss = optimizer.step(closure)
        record = optimizer.last_step
        assert (record.step, record.lr) == (step, 1e-3)
        assert [x for probe in record.probes for x in (probe.loss_plus, probe.loss_minus)] == seen
        assert loss == record.loss == pytest.approx(sum(seen) / 6)
        assert record.projected_grads == tuple((a - b) / 2e-3 for a, b in zip(seen[::2], seen[1::2], strict=True))
    assert optimizer.num_steps == 4 and optimizer.num_forward_passes == 24


def test_the_loss_returned_is_the_loss_of_the_model_up_to_rho_squared():
    errors = []
    for rho in (1e-1, 1e-2):
        model = Regression()
        model.double()
        optimizer = CASES["mezo"].build(model, rho=rho, lr=0.0)

        def loss(model: Regression = model) -> Tensor:
            return (model.layer(model.x) - model.y).square().mean()

        errors.append(abs(optimizer.step(loss) - loss().item()))
    assert errors[1] < errors[0] / 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"method\.lr is -1\.0"),
        ({"lr": math.nan}, r"method\.lr is nan"),
        ({"rho": 0.0}, r"method\.rho is 0\.0"),
        ({"rho": math.nan}, r"method\.rho is nan"),
        ({"weight_decay": -0.1}, r"method\.weight_decay is -0\.1"),
        ({"lr": 3.0, "weight_decay": 0.34}, r"method\.weight_decay is 0\.34, and times the learning rate, 3,"),
        ({"num_directions": 0}, r"method\.num_directions is 0"),
        ({"scale": "units"}, r"method\.scale is 'units'; it must be one of unit, raw"),
        ({"rank": 0}, r"method\.rank is 0"),
        ({"targets": ("nothing",)}, r"method\.targets: the pattern 'nothing' matches no"),
    ],
)
def test_settings_out_of_range_are_refused_by_their_key(options, message):
    model = Regression()
    with pytest.raises(RequestError, match=message):
        CASES["tezo"].build(model, **options)
    assert not model.layer._forward_hooks


@choose("lozo", "lozo-m", "subzo")
def test_an_interval_is_at_least_one_step(case):
    with pytest.raises(RequestError, match=r"method\.lazy_update_interval is 0"):
        case.build(Regression(), lazy_update_interval=0)
    optimizer = case.build(Regression(), lazy_update_interval=1, lr=1e-2)  # new factors every step
    losses = [optimizer.step(optimizer.model.loss) for _ in range(150)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_method_that_is_defined_for_one_direction_refuses_two():
    with pytest.raises(RequestError, match=r"num_directions is 2; this method is defined for 1 only"):
        CASES["zo-adamu"].build(Regression(), num_directions=2)


@pytest.mark.parametrize(
    ("perturbation", "update", "message"),
    [
        (
            Lazy(FixedRank(rank=2), "unit", interval=5),
            FactoredAdam((0.9, 0.99), 1e-5, eps_in_sqrt=True, bias_correction=False),
            "FactoredAdam takes directions of type Dense, CP; Lazy draws LowRank",
        ),
        (
            Subspace(FixedRank(rank=2), "unit", interval=5),
            AdaMU(1e-8),
            "AdaMU takes directions of type MomentumNoise; Subspace",
        ),
        (DenseGaussian(), AdaMU(1e-8), "DenseGaussian draws Dense for layer.weight"),
        (
            Subspace(FixedRank(rank=2), "unit", interval=5),
            FactoredAdam((0.9, 0.99), 1e-5, eps_in_sqrt=True, bias_correction=False),
            "FactoredAdam takes directions of type Dense, CP; Subspace draws Core",
        ),
    ],
)
def test_an_update_refuses_directions_that_it_is_not_defined_for(perturbation, update, message):
    with pytest.raises(RequestError, match=message):
        ZerothOrderOptimizer(Regression(), perturbation, update, lr=1e-3)


def test_new_combinations_of_a_perturbation_and_an_update_are_methods_too():
    model = Regression()
    subspace_adam = ZerothOrderOptimizer(
        model,
        Subspace(FixedRank(rank=3), "unit", interval=1000),
        Adam((0.9, 0.99), 1e-5, eps_in_sqrt=True, bias_correction=False),
        lr=2e-2,
    )
    losses = [subspace_adam.step(model.loss) for _ in range(300)]
    assert losses[-1] < 0.3 * losses[0]
    noisy = ZerothOrderOptimizer(Regression(), SimulatedMomentum(Annealing(start=1, stop=4)), SGD(), lr=1e-3)
    assert noisy.step(noisy.model.loss) > 0


def test_a_parameter_group_cannot_be_added():
    optimizer = CASES["tezo"].build(Regression())
    with pytest.raises(RequestError, match="determined by `targets`"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 2))]})
    assert len(optimizer.param_groups) == 1


def test_a_state_of_another_method_is_refused_by_name():
    model = tiny_opt(torch.float32)
    optimizer = CASES["tezo"].build(model)
    optimizer.step(lm_loss(model, tokens()))
    state = optimizer.state_dict()
    optimizer.close()
    with pytest.raises(RequestError, match="it is of SGD over Temporal, and this optimizer is Adam over Temporal"):
        CASES["tezo-cadam"].build(model).load_state_dict(state)


def test_a_step_without_a_closure_says_what_it_needs():
    with pytest.raises(RequestError, match=r"optimizer\.step\(lambda: loss_of\(batch\)\)"):
        CASES["tezo"].build(Regression()).step()


def test_a_state_of_other_parameters_is_refused_by_name():
    model = tiny_opt()
    state = CASES["tezo"].build(model, targets=("fc1",)).state_dict()
    with pytest.raises(RequestError, match=r"tunes other parameters than this optimizer, .*\.fc1\.bias for one"):
        CASES["tezo"].build(tiny_opt(), targets=("fc2",)).load_state_dict(state)


@every_method
def test_a_learning_rate_set_by_a_schedule_comes_back_with_the_state(case: Case):
    model = Regression()
    optimizer = case.build(model, lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda t: 0.5**t)
    for _ in range(3):
        optimizer.step(model.loss)
        scheduler.step()
    fresh = case.build(Regression(), lr=7.0)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)


def test_methods_are_found_by_name_and_a_wrong_name_gets_the_nearest():
    assert method("tezo-cadam") is METHODS["tezo-cadam"]
    with pytest.raises(RequestError, match=r"method\.name: there is no method 'tezo-adm'\. Did you mean 'tezo-adam'\?"):
        method("tezo-adm")


@every_method
def test_every_option_of_a_method_can_be_given_and_has_its_stated_default(case):
    options, defaults = METHODS[case.name].options(), METHODS[case.name].defaults()
    assert options.keys() == defaults.keys() and {"lr", "rho", "targets", "weight_decay"} <= options.keys()
    open_ones = [name for name, value in defaults.items() if value == AUTO]
    assert sorted(open_ones) == sorted(METHODS[case.name].chosen)
    numbers = {name: value for name, value in defaults.items() if name not in open_ones}
    given = METHODS[case.name].build(Regression(), **numbers | case.options)
    for name, value in {"lr": given.param_groups[0]["lr"], "rho": given.rho}.items():
        assert value == METHODS[case.name].default_in_python(name)
    assert METHODS[case.name].summary
