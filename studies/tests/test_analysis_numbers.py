"""The numbers of the analyses that need no model obey laws."""

import math

import pytest
import torch
from analyses import options_of
from cases import mostly_slow
from tezo_studies.analysis import Given, analysis
from tezo_studies.analysis import convergence as conv
from tezo_studies.analysis import estimator_variance as est
from tezo_studies.analysis import second_moment as second
from torch import Tensor

from tezo.directions.random import DrawKey
from tezo.methods import METHODS


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# second-moment


def test_the_separable_term_and_the_square_are_those_of_the_definition():
    u, v, tau = gaussian(4, 3, seed=1), gaussian(5, 3, seed=2), torch.tensor([1.0, -2.0, 0.5])
    full, kept = second.squares(u, v, tau)
    for i in range(4):
        for j in range(5):
            assert math.isclose(full[i, j], sum(tau[s] * u[i, s] * v[j, s] for s in range(3)) ** 2)
            assert math.isclose(kept[i, j], sum(tau[s] ** 2 * u[i, s] ** 2 * v[j, s] ** 2 for s in range(3)))


def test_at_rank_one_there_are_no_cross_terms_in_a_step_or_in_the_average():
    found = analysis("second-moment").run(options_of("second-moment", rank=1), Given())
    for row in found["sizes"]:
        for point in (row["one_step"], *row["averaged"]):
            assert point["entries"] < 1e-4 and point["norm"] < 1e-4 and point["correlation"] > 1 - 1e-6
        assert row["uniformity"]["closed"] == 0


def test_a_comparison_worked_by_hand():
    found = second.comparison(torch.tensor([[4.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
    assert math.isclose(found["norm"], 3 / 17**0.5)
    assert math.isclose(found["norm_of_root"], 1 / 5**0.5)
    assert math.isclose(found["entries"], (9 / 2) ** 0.5)
    assert math.isclose(found["entries_of_root"], (1 / 2) ** 0.5)
    assert math.isclose(found["mean_ratio"], 2 / 5)
    assert math.isclose(found["paper"], 3 / 2)
    straight = second.comparison(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[3.0, 7.0, 5.0]]))
    assert math.isclose(straight["correlation"], 1)


def test_the_average_is_that_of_every_step():
    options = options_of("second-moment", sizes=[8], steps=12)
    (row,) = analysis("second-moment").run(options, Given())["sizes"]
    u, v, tau = second._drawn(8, options)
    full, kept = torch.zeros(8, 8), torch.zeros(8, 8)
    for t in range(12):
        full, kept = (
            0.99 * old + 0.01 * new for old, new in zip((full, kept), second.squares(u, v, tau[t]), strict=True)
        )
    assert row["averaged"][-1]["step"] == 12
    assert row["averaged"][-1]["entries"] == pytest.approx(second.comparison(full, kept)["entries"], rel=1e-4)


def test_errors_over_steps_are_those_of_independent_signs():
    # An entry's cross terms have the variance 2 (S^2 - sum_s a_s^2) W, a_s being the terms of S and W the sum of the
    # squared weights; sum_s a_s^2 is a few times S^2 / r. So the relative error is not far below sqrt(2 W).
    options = second.SecondMomentOptions(sizes=(96,), rank=48, steps=100)
    (row,) = analysis("second-moment").run(options, Given())["sizes"]
    weights = [0.01 * 0.99**k / (1 - 0.99**100) for k in range(100)]
    bound = (2 * sum(w * w for w in weights)) ** 0.5
    assert 0.85 * bound < row["averaged"][-1]["entries"] < 1.05 * bound
    assert 1.1 < row["one_step"]["entries"] < 2**0.5
    assert row["averaged"][-1]["norm_of_root"] == pytest.approx(row["averaged"][-1]["norm"] / 2, rel=0.1)


def test_the_expected_tau_v_is_its_closed_form_within_five_standard_errors():
    c, tau = gaussian(6, seed=4), gaussian(200_000, 6, seed=5)
    samples = (tau @ c).square()[:, None] * tau.square()
    closed = c.square().sum() + 2 * c.square()
    assert ((samples.mean(dim=0) - closed).abs() < 5 * samples.std(dim=0) / len(tau) ** 0.5).all()
    u, v, options = gaussian(7, 6, seed=6), gaussian(9, 6, seed=7), second.SecondMomentOptions(draws=200_000, steps=5)
    grad = gaussian(7, 9, seed=8)
    found = second.uniformity(u, v, grad, options)
    c = torch.stack([(grad * torch.outer(u[:, s], v[:, s])).sum() for s in range(6)])
    closed = c.square().sum() + 2 * c.square()
    assert found["closed"] == pytest.approx(float(closed.std(correction=0) / closed.mean()))
    assert found["relative"] == pytest.approx(sorted((closed / closed.mean()).tolist()))
    assert found["drawn"] == pytest.approx(found["closed"], rel=0.1)


def test_recorded_steps_rise_to_the_last():
    assert second.recorded_steps(1) == [1]
    assert second.recorded_steps(300)[-1] == 300 and 100 in second.recorded_steps(300)
    assert second.recorded_steps(300) == sorted(set(second.recorded_steps(300)))


# estimator


@pytest.mark.parametrize("name", mostly_slow(est.SECOND_MOMENTS, "tezo"))
def test_estimates_are_unbiased_and_as_large_as_the_closed_form_says(name):
    options = est.EstimatorOptions(sizes=(6,), ranks=(3,), draws=5000)
    found = est._over_all_draws(name, 6, 0 if name == "mezo" else 3, options)
    assert found["variance_se"] < 0.15 * found["variance_closed"], "too few samples to show anything"
    assert abs(found["variance"] - found["variance_closed"]) < 5 * found["variance_se"]
    assert abs(found["mean"] - 1) < 5 * found["mean_se"]
    assert found["distance"] == pytest.approx(found["distance_closed"], rel=0.5)


def test_tezos_closed_form_is_theorem_1():
    for m, n, r in ((4, 3, 2), (64, 32, 8)):
        delta = 1 + m * n + 2 * m * n / r + 6 * (m + n) / r + 10 / r
        assert est.tezo_second_moment(m, n, r) - 1 == pytest.approx(delta)


def test_closed_forms_at_their_ends():
    for m, n in ((4, 3), (30, 20)):
        assert est.lozo_second_moment(m, n, 1) == (m + 2) * (n + 2)  # u (G v) v: two Gaussian vectors
        assert est.tezo_second_moment(m, n, 1) == 3 * (m + 2) * (n + 2)  # and tau^4
        for form in (est.lozo_second_moment, est.tezo_second_moment):
            assert form(m, n, 10**9) == pytest.approx(est.mezo_second_moment(m, n, 1))  # Z becomes Gaussian
    assert est.subzo_second_moment(5, 5, 5) == 5 * 5 + 2  # all directions: MeZO in another basis
    assert est.subzo_cosine(5, 5, 5) == 1


def test_unit_scale_is_the_published_estimate_over_r():
    grad = gaussian(6, 6)
    raw = METHODS["tezo"].build(conv.Bowl(6, 0), rank=4, scale="raw")
    unit = METHODS["tezo"].build(conv.Bowl(6, 0), rank=4, scale="unit")
    for of_raw, of_unit in zip(*(est.estimates(o, grad, range(3)) for o in (raw, unit)), strict=True):
        torch.testing.assert_close(of_raw / 4, of_unit)


@pytest.mark.parametrize("name", mostly_slow(est.COSINES, "tezo"))
def test_the_mean_given_the_factors_is_that_of_many_steps(name):
    optimizer, grad = est.optimizer_for(name, 5, 2), gaussian(5, 5)
    (target,) = optimizer.targets
    samples = torch.zeros(4000, 5, 5, dtype=torch.float64)
    for index, z in enumerate(samples):  # several directions of one step have the factors in common
        optimizer.perturbation.direction(target, DrawKey(3, 0, index), {}).add_to_(z, 1.0)
        z *= (grad * z).sum()
    mean = est.mean_given_factors(optimizer.perturbation.direction(target, DrawKey(3, 0), {}), grad)
    error = samples.std(dim=0) / len(samples) ** 0.5
    assert error.norm() < 0.2 * mean.norm(), "too few samples to show anything"
    assert ((samples.mean(dim=0) - mean).abs() < 5 * error).all()


def test_the_cosine_of_tezos_mean_is_small_as_the_root_of_r_over_the_cells():
    found = est._given_factors("tezo", 128, 16, est.EstimatorOptions(fixed_draws=12))
    assert found["cosine"] == pytest.approx((16 / 128**2) ** 0.5, rel=0.2)
    assert found["cosine_closed"] == pytest.approx((16 / 128**2) ** 0.5, rel=0.02)


# convergence


def test_the_bowl_has_the_gradient_and_the_curvature_it_says():
    bowl = conv.Bowl(4, seed=1)
    noise = gaussian(4, 4, seed=9)
    (by_torch,) = torch.autograd.grad(bowl(noise), [bowl.layer.weight])
    loss, grad = bowl.loss_and_gradient()
    torch.testing.assert_close(by_torch, grad + noise)
    assert loss == bowl(torch.zeros(4, 4))
    with torch.no_grad():
        bowl.layer.weight += 0.3 * gaussian(4, 4, seed=10)
    hessian = torch.autograd.functional.hessian(
        lambda w: torch.func.functional_call(bowl, {"layer.weight": w}, (noise,)), bowl.layer.weight.detach()
    ).reshape(16, 16)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert eigenvalues.max() <= conv.LIPSCHITZ and -1 <= eigenvalues.min() < 0 and eigenvalues.max() > 2
    with torch.no_grad():
        bowl.layer.weight.copy_(bowl.goal_MN)
    loss, grad = bowl.loss_and_gradient()
    assert loss == 0 and not grad.any()


def test_a_slope_is_the_exponent():
    assert conv.slope([1, 10, 100], [5.0, 5 * 10**-0.5, 0.5]) == pytest.approx(-0.5)


def test_tezos_span_is_that_of_its_directions_and_the_others_have_none():
    options = options_of("convergence")
    bowl = conv.Bowl(4, 0)
    optimizer = conv.build("tezo", bowl, 0.1, options)
    basis = conv.span_basis(optimizer)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    with torch.no_grad():
        before = bowl.distance()
        for _ in range(3):
            optimizer.step(lambda: bowl(torch.zeros(4, 4)))
        change = (bowl.distance() - before).flatten()
    assert change.norm() > 1e-3
    torch.testing.assert_close(basis @ (basis.T @ change), change)
    assert conv.span_basis(conv.build("lozo", conv.Bowl(4, 0), 0.1, options)).shape == (16, 0)


def test_what_a_run_records_is_what_a_hand_written_run_sees():
    options = options_of("convergence", noise=0.0)
    bowl = conv.Bowl(4, 0)
    optimizer = METHODS["tezo"].build(bowl, lr=0.02, rank=2, scale="unit", rho=options.rho)
    seen, basis = [], conv.span_basis(optimizer)
    for _ in range(20):
        with torch.no_grad():
            loss, grad = bowl.loss_and_gradient()
        seen.append((loss, grad.square().sum(), (basis.T @ grad.flatten()).square().sum()))
        optimizer.step(lambda: bowl(torch.zeros(4, 4)))
    losses, norms, spans = torch.tensor(seen, dtype=torch.float64).T
    found = conv.run("tezo", 20, 0.02, options)
    assert found["full"] == pytest.approx(float(norms.mean() / norms[0]))
    assert found["last"] == pytest.approx(float(norms[-2:].mean() / norms[0]))
    assert found["loss"] == pytest.approx(float(losses[-2:].mean() / losses[0]))
    assert found["span"] == pytest.approx(float(spans.mean() / spans[0]))
    assert found["span_last"] == pytest.approx(float(spans[-2:].mean() / spans[0]))


def test_with_fixed_factors_only_the_part_in_their_span_vanishes_and_mezos_gradient_does():
    options = options_of("convergence", sizes=[6], rank=3, noise=0.0)
    of_tezo, of_mezo = (conv.run(name, 400, 0.01, options) for name in ("tezo", "mezo"))
    assert of_tezo["span_last"] < 0.01 and of_tezo["last"] > 0.5
    assert of_mezo["last"] < 0.2 and "span" not in of_mezo


def test_rates_fall_as_the_root_of_the_horizon_and_the_best_is_taken(monkeypatch):
    seen = []

    def run(name: str, steps: int, lr: float, options: object) -> dict:
        seen.append((steps, lr))
        return {"loss": abs(lr - 0.5), "full": 1 / steps, "last": 0.0}

    monkeypatch.setattr(conv, "run", run)
    monkeypatch.setitem(conv.UNITS, "mezo", lambda _: 0.5)
    found = conv._measure_method("mezo", options_of("convergence", horizons=[10, 40], rates=[0.5, 1.0, 2.0]))
    assert found["rate"] == 0.5 and found["rate_in_units"] == 1.0 and found["slope"] == pytest.approx(-1)
    assert seen == [(10, 0.25), (10, 0.5), (10, 1.0), (40, 0.25)]


def test_rates_that_all_diverge_are_refused():
    with pytest.raises(ValueError, match=r"rates is \[1e\+28\]; mezo diverges at all of them; give smaller ones\."):
        conv._measure_method("mezo", options_of("convergence", rates=[1e28], noise=1e300))
