"""Cut projected gradients: by how much a step can move, what is left alone, and that it goes on to the bit."""

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from cases import CASES, choose, effective_weights, every_method, run
from tiny import Regression, tiny_opt
from torch import Tensor

from tezo import RequestError
from tezo.directions.perturbations import DrawKey, Subspace
from tezo.directions.rank_selection import FixedRank
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import FactoredAdam

RHO, BETA = 1e-3, 0.99
USUAL = [1.0, -0.5, 2.0, -1.5, 0.7, 1.1, -0.9]


def scripted(optimizer: ZerothOrderOptimizer, kappas: Sequence[float]) -> Callable[[], float]:
    """An objective that runs the model, and whose projected gradients are these, one after the other."""
    losses: Iterator[float] = (sign * kappa * RHO for kappa in kappas for sign in (1, -1))

    def loss() -> float:
        optimizer.model.loss()
        return next(losses)

    return loss


def limit_after(steps: Sequence[Sequence[float]], clip: float) -> float:
    """The formula, on the kappas of earlier steps."""
    v, limit = 0.0, math.inf
    for t, kappas in enumerate(steps, start=1):
        cut = [math.copysign(min(abs(kappa), limit), kappa) for kappa in kappas]
        v = BETA * v + (1 - BETA) * sum(x**2 for x in cut) / len(cut)
        limit = clip * math.sqrt(v / (1 - BETA**t)) if v else math.inf
    return limit


def changes(optimizer: ZerothOrderOptimizer, before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight - before[name] for name, weight in effective_weights(optimizer).items()}


def zs(optimizer: ZerothOrderOptimizer, step: int, index: int = 0) -> dict[str, Tensor]:
    found = {}
    for target in optimizer.targets:
        z = torch.zeros(target.stored_shape, dtype=torch.float64)
        optimizer.perturbation.direction(target, DrawKey(optimizer.seed, step, index), {}).add_to_(z, 1.0)
        found[target.name] = z
    return found


@pytest.mark.parametrize("huge", [1e6, -1e12])
@choose("mezo", "lozo", "subzo", "tezo")
def test_a_huge_kappa_moves_the_parameter_by_the_limit_and_no_more(case, huge):
    optimizer = case.build(Regression(), lr=1e-2, rho=RHO, clip=3.0, targets=("all",))
    closure = scripted(optimizer, [*USUAL, huge, 1.0])
    for _ in USUAL:
        optimizer.step(closure)
    before, limit = effective_weights(optimizer), limit_after([[kappa] for kappa in USUAL], 3.0)
    assert 3 < limit < 5
    optimizer.step(closure)
    z = zs(optimizer, len(USUAL))
    for name, change in changes(optimizer, before).items():
        torch.testing.assert_close(change, -1e-2 * math.copysign(limit, huge) * z[name], rtol=1e-6, atol=1e-12)
    assert optimizer.last_step.projected_grads == pytest.approx((huge,), rel=1e-12), "the record has what was measured"
    before = effective_weights(optimizer)
    optimizer.step(closure)  # and the next one, which is usual, is left alone
    z = zs(optimizer, len(USUAL) + 1)
    for name, change in changes(optimizer, before).items():
        torch.testing.assert_close(change, -1e-2 * z[name], rtol=1e-6, atol=1e-12)


def test_each_direction_of_a_step_is_cut_by_itself():
    first, second = [1.0, -2.0], [1e5, 0.5]
    optimizer = CASES["mezo"].build(Regression(), lr=1e-2, rho=RHO, clip=2.0, num_directions=2)
    closure = scripted(optimizer, [*first, *second])
    optimizer.step(closure)
    before = effective_weights(optimizer)
    optimizer.step(closure)
    limit = limit_after([first], 2.0)
    (z,), (other,) = zs(optimizer, 1).values(), zs(optimizer, 1, 1).values()
    (change,) = changes(optimizer, before).values()
    torch.testing.assert_close(change, -1e-2 * (limit * z + 0.5 * other) / 2, rtol=1e-6, atol=1e-12)


def test_the_limit_is_the_formula_over_many_steps_and_outliers_do_not_lift_it_at_once():
    draw = torch.Generator().manual_seed(1)
    kappas = torch.randn(40, generator=draw, dtype=torch.float64).tolist()
    kappas[20:23] = [1e9, 1e9, -1e9]
    optimizer = CASES["mezo"].build(Regression(), lr=1e-4, rho=RHO, clip=2.5)
    closure = scripted(optimizer, kappas)
    for t in range(len(kappas)):
        before = effective_weights(optimizer)
        optimizer.step(closure)
        expected = math.copysign(min(abs(kappas[t]), limit_after([[k] for k in kappas[:t]], 2.5)), kappas[t])
        (z,), (change,) = zs(optimizer, t).values(), changes(optimizer, before).values()
        torch.testing.assert_close(change, -1e-4 * expected * z, rtol=1e-5, atol=1e-11)
    assert limit_after([[k] for k in kappas], 2.5) < 10


def test_a_start_on_a_plateau_does_not_shut_the_limit_for_good():
    optimizer = CASES["mezo"].build(Regression(), lr=1e-2, rho=RHO, clip=2.0)
    closure = scripted(optimizer, [0.0, 0.0, 0.0, 5.0])
    before = effective_weights(optimizer)
    for _ in range(3):
        optimizer.step(closure)
    assert all(not change.any() for change in changes(optimizer, before).values())
    optimizer.step(closure)
    (z,), (change,) = zs(optimizer, 3).values(), changes(optimizer, before).values()
    torch.testing.assert_close(change, -5e-2 * z, rtol=1e-6, atol=1e-12)


@every_method
def test_without_outliers_nothing_changes_by_a_bit(case):
    plain, clipped = (case.build(tiny_opt(), targets=("all",), **more) for more in ({}, {"clip": 1e9}))
    assert run(plain, 0, 12) == run(clipped, 0, 12)
    for name, weight in effective_weights(plain).items():
        assert torch.equal(weight, effective_weights(clipped)[name]), name


@every_method
def test_a_clipped_run_goes_on_to_the_bit_from_the_middle(case):
    def build() -> ZerothOrderOptimizer:
        return case.build(tiny_opt(), clip=1.05, targets=("all",))

    whole, loose = build(), case.build(tiny_opt(), targets=("all",))
    losses = run(whole, 0, 6)
    saved, model = whole.state_dict(), {k: v.clone() for k, v in whole.model.state_dict().items()}
    fresh = build()
    fresh.model.load_state_dict(model)
    fresh.load_state_dict(saved)
    assert run(fresh, 6, 12) == (later := run(whole, 6, 12))
    assert run(loose, 0, 12) != losses + later, "nothing was cut"
    for name, weight in effective_weights(whole).items():
        assert torch.equal(weight, effective_weights(fresh)[name]), name


@pytest.mark.parametrize("clip", [1.0, 0.5, -3.0, math.nan, math.inf])
def test_a_clip_out_of_range_is_refused_by_its_key(clip):
    model = Regression()
    with pytest.raises(RequestError, match=rf"method\.clip is {clip}; it must be above 1"):
        CASES["tezo"].build(model, clip=clip)
    assert not model.layer._forward_hooks


def test_what_the_inner_rule_refuses_and_writes_is_so_for_the_clipped_one():
    update = FactoredAdam((0.9, 0.99), 1e-5, eps_in_sqrt=True, bias_correction=False)
    perturbation = Subspace(FixedRank(rank=2), "unit", interval=5)
    with pytest.raises(RequestError, match="takes directions of type Dense, CP; Subspace draws Core"):
        ZerothOrderOptimizer(Regression(), perturbation, update, lr=1e-3, clip=2.0)
    for name, adapter in (("tezo-cadam", True), ("tezo-adam", False)):
        assert (CASES[name].build(Regression(), clip=2.0).why_no_adapter() is None) == adapter
