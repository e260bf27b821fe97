"""Theorem 2's bound: the moments behind its constants, its proof's steps at a finite rho, and runs below it.

Bounds on means are five standard errors (two-sided 6e-7 each, for a normal), with fixed seeds.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from analyses import options_of
from tezo_studies.analysis import convergence as conv
from tezo_studies.analysis.theorem2 import Constants, delta_rho, norm_moment, printed_delta_rho
from torch import Tensor

SIZES = (1, 2, 3, 4, 7, 40)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_mean(samples: Tensor, expected: float, precision: float) -> None:
    error = float(samples.std()) / len(samples) ** 0.5
    assert error < precision * abs(expected), "too few samples to show anything"
    assert abs(float(samples.mean()) - expected) < 5 * error


def constants(**changes: float) -> Constants:
    given = {"rows": 4, "columns": 3, "rank": 2, "lipschitz": 3.0, "variance": 5.0, "gap": 7.0, "rho": 1e-3}
    return Constants(**(given | changes))  # type: ignore[arg-type]


# moments


@pytest.mark.parametrize("size", [1, 4, 7])
def test_moments_of_a_gaussian_vector_are_those_sampled_and_not_the_papers(size):
    norms = gaussian(400_000, size, seed=size).square().sum(dim=1)
    papers = {1: size, 2: size * (2 * size - 1), 3: size * (15 + 3 * (size - 1) + (size - 1) * (size - 2))}
    for k in (1, 2, 3):
        assert_mean(norms**k, norm_moment(size, k), 0.02)
        error = float((norms**k).std()) / len(norms) ** 0.5
        right = papers[k] == norm_moment(size, k)
        assert right == (k == 1 or (k == 3 and size == 1)), "4 and 7 entries tell all others apart"
        assert right or abs(float((norms**k).mean()) - papers[k]) > 20 * error


def test_the_papers_bounds_on_the_moments_hold_for_two_entries_or_more():
    for size in SIZES:
        assert norm_moment(size, 2) == size * (size + 2) and norm_moment(size, 3) == size * (size + 2) * (size + 4)
        assert norm_moment(size, 3) <= (size + 3) ** 3
        assert (norm_moment(size, 2) <= 2 * size**2) == (size >= 2)
    assert norm_moment(2, 2) == 2 * 2**2, "no slack at two"
    for m, n, r in itertools.product(SIZES, SIZES, (1, 2, 5, 40)):
        if min(m, n) >= max(2, r):
            assert delta_rho(m, n, r) < printed_delta_rho(m, n, r) < 8 * delta_rho(m, n, r)


def test_delta_rho_is_the_third_moment_that_it_stands_for():
    # Sampled over u and v; the mean over tau is exact, from E tau^2 = 1, E tau^4 = 3 and E tau^6 = 15.
    m, n, r = 5, 4, 3
    lengths = [gaussian(400_000, r, size, seed=size).square().sum(dim=2) for size in (m, n)]
    weights = lengths[0] * lengths[1]
    power = [(weights**k).sum(dim=1) for k in (1, 2, 3)]
    distinct = power[0] ** 3 - 3 * power[0] * power[1] + 2 * power[2]
    cubes = 15 * power[2] + 3 * 3 * (power[1] * power[0] - power[2]) + distinct
    assert_mean(r / 4 * cubes, delta_rho(m, n, r), 0.02)
    error = r / 4 * float(cubes.std()) / len(cubes) ** 0.5
    assert abs(r / 4 * float(cubes.mean()) - printed_delta_rho(m, n, r)) > 20 * error


def test_delta_rho_by_the_triple_sum_of_the_proof():
    m, n, r = 3, 5, 4
    total = 0
    for indices in itertools.product(range(r), repeat=3):
        counts = [indices.count(s) for s in set(indices)]
        total += math.prod(norm_moment(size, k) for k in counts for size in (1, m, n))
    assert delta_rho(m, n, r) == r * total / 4


# the proof's steps at a finite rho


def nodes() -> tuple[np.ndarray, np.ndarray]:
    """Values of z = tau u v for M = N = r = 1 with their probabilities; exact for polynomials of up to |z|^7."""
    points, weights = np.polynomial.hermite_e.hermegauss(8)
    z, p = (np.array([math.prod(of) for of in itertools.product(values, repeat=3)]) for values in (points, weights))
    return z, p / p.sum()


def kinked(w: np.ndarray) -> np.ndarray:
    """lambda w |w| / 2: its gradient lambda |w| has the Lipschitz constant lambda = 3, and is 0 at w = 0."""
    return 3 * w * np.abs(w) / 2


def test_the_bound_on_the_remainder_is_attained():
    z, p = nodes()
    rho = 0.1
    estimates = (kinked(rho * z) - kinked(-rho * z)) / (2 * rho) * z
    remainder = constants(rows=1, columns=1, rank=1, rho=rho).remainder(delta_rho(1, 1, 1))
    assert (p * estimates**2).sum() == pytest.approx(remainder)
    assert remainder == pytest.approx((rho * 3) ** 2 * 15**3 / 4)


def test_at_a_finite_rho_the_estimate_is_biased_where_the_gradient_is_zero():
    z, p = nodes()
    for rho in (0.1, 0.01):
        bias = (p * (kinked(rho * z) - kinked(-rho * z)) / (2 * rho) * z).sum()
        assert bias > rho and bias**2 < constants(rows=1, columns=1, rank=1, rho=rho).remainder(delta_rho(1, 1, 1))


@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("variance", [0.0, 5.0])
def test_the_bound_is_the_least_over_youngs_parameter(rho, variance):
    known, steps, lr = constants(rho=rho, variance=variance), 300, 2e-3
    delta = 1 + 12 + 12 + 6 * 7 / 2 + 10 / 2
    b = rho**2 * 9 * delta_rho(4, 3, 2)
    h = torch.logspace(-9, math.log10(0.499), 40_000, dtype=torch.float64)
    inner = 2 * 7.0 / (lr * steps) + b / h + lr * 3 * ((1 + h) * (delta + 1) * variance + (1 + 1 / h) * b)
    literal = inner / (1 - 2 * h)
    assert known.bound(steps, lr) == pytest.approx(float(literal.min()), rel=1e-5)
    assert (known.bound(steps, lr) <= literal * (1 + 1e-12)).all()


def test_the_printed_bound_and_rate_are_those_of_the_paper():
    known, steps = constants(), 50_000
    delta = 1 + 12 + 2 * 12 / 2 + 6 * 7 / 2 + 10 / 2
    papers = (15 * 4 * 7**3 * 6**3 + 36 * 8 * 4**3 * 3**3 + 16 * 4**3 * 3**3) / 4
    lr = math.sqrt(7 / (3 * steps * (1e-6 * 9 * papers + delta * 5)))
    assert lr < 1 / (3 * (delta + 1))
    assert known.rate(steps) == pytest.approx(lr)
    assert known.rate(1) == pytest.approx(1 / (3 * (delta + 1)))
    expected = 2 * 7 / (lr * steps) + lr * 3 * (1e-6 * 9 * papers + (delta + 1) * 5)
    assert known.printed_bound(steps, lr) == pytest.approx(expected)
    small = constants(rho=1e-9)
    assert small.bound(steps, lr) == pytest.approx(small.printed_bound(steps, lr), rel=1e-4), "they agree as rho falls"
    assert small.bound(steps, lr) > small.printed_bound(steps, lr)


# runs


def test_fresh_factors_stay_below_the_bound_and_factors_drawn_once_do_not():
    options = options_of("convergence", sizes=[3], rank=2, horizons=[240], noise=0.0, seeds=2)
    (row,) = conv._measure_bound(options)["rows"]
    assert row["bound"] == conv.constants(options).bound(240, row["rate"])
    highest, lowest = row["fresh"] + row["fresh_se"], row["fixed"] - row["fixed_se"]  # of two runs: each of them
    assert highest < row["printed"] < row["bound"] < lowest


def test_the_constants_are_those_of_the_objective():
    options = options_of("convergence", noise=0.5, rho=1e-4)
    known, bowl = conv.constants(options), conv.Bowl(4, 0)
    noise = gaussian(4000, 4, 4, seed=3) * 0.5
    d = -bowl.goal_MN
    assert_mean(noise.square().sum(dim=(1, 2)), known.variance, 0.02)
    assert known.gap == pytest.approx(float((d.square() + 1 - torch.cos(2 * d)).sum() / 2))
    assert known.rho == pytest.approx(1e-4 / 2**0.5) and known.lipschitz == conv.LIPSCHITZ


def test_the_steps_of_the_bound_are_the_theorems():
    # W_{t+1} = W_t - eta (1 / r) kappa Z with the unscaled Z at the theorem's rho, and new factors in every step.
    options = options_of("convergence", rho=1e-2, noise=0.0)
    known = conv.constants(options)
    model = conv.Bowl(4, 0)
    optimizer = conv.build("tezo", model, 0.01, options, **conv.FACTORS["fresh"])
    (target,) = optimizer.targets
    seen = []
    for step in range(3):
        before, z = model.distance().detach(), torch.zeros(4, 4, dtype=torch.float64)
        optimizer.step(lambda: model(torch.zeros(4, 4)))
        direction = optimizer.perturbation.direction(target, conv.DrawKey(0, step), {})
        direction.add_to_(z, 2**0.5)  # unit scale has the factor r^(-1/2)
        seen.append(direction.u_MR.clone())
        values = [
            float((d.square() + 1 - torch.cos(2 * d)).sum() / 2)
            for d in (before + known.rho * z, before - known.rho * z)
        ]
        expected = before - 0.01 / 2 * (values[0] - values[1]) / (2 * known.rho) * z
        torch.testing.assert_close(model.distance().detach(), expected)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
