"""Theorem 1 on a linear objective f(W) = <G, W>, where the limit rho -> 0 is exact.

With unit variance the estimate ghat = <G, Z> Z has mean G over (tau, u, v), and
E|ghat - G|^2 = delta |G|^2 with delta = 1 + mn + 2mn/r + 6(m + n)/r + 10/r. The factors, though, are drawn
once a run: given them the mean is only sum_s <G, u_s v_s^T> u_s v_s^T.
Bounds are five standard errors of the mean (two-sided 6e-7 each, for a normal), with fixed seeds.
"""

import pytest
import torch
from cases import CASES, effective_weights, mostly_slow
from torch import Tensor, nn

from tezo.directions.random import DrawKey
from tezo.methods import METHODS
from tezo.optim.optimizer import ZerothOrderOptimizer

M, N, R = 4, 3, 2
G = torch.randn(M, N, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Contraction(nn.Module):
    """f(W) = <G, W>, by a forward pass of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(N, M, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.zero_()

    def forward(self) -> Tensor:
        return (self.layer(torch.eye(N, dtype=torch.float64)).T * G).sum()


def build(name: str = "tezo", seed: int = 0, **options: object) -> ZerothOrderOptimizer:
    rank = {"rank": R, "scale": "unit"} if CASES[name].low_rank else {}
    return METHODS[name].build(Contraction(), lr=1.0, seed=seed, **rank | options)


def estimates(optimizer: ZerothOrderOptimizer, moments: list[DrawKey]) -> Tensor:
    (target,) = optimizer.targets
    found = torch.zeros(len(moments), M, N, dtype=torch.float64)
    for ghat, moment in zip(found, moments, strict=True):
        optimizer.perturbation.direction(target, moment, {}).add_to_(ghat, 1.0)
        ghat *= (G * ghat).sum()
    return found


def assert_mean(samples: Tensor, expected: Tensor, precision: float) -> None:
    standard_error = samples.std(dim=0) / len(samples) ** 0.5
    assert standard_error.norm() < precision * expected.norm(), "too few samples to show anything"
    assert ((samples.mean(dim=0) - expected).abs() < 5 * standard_error).all()


@pytest.fixture(scope="module")
def unconditional() -> Tensor:
    """Estimates over the draw of tau, u and v: 12 000 seeds (rows), 15 blocks of one large matrix each.

    The blocks on the diagonal of a matrix of 15 M x 15 N have factors of their own and tau in common, so
    the mean of a row is one sample.
    """
    blocks = 15
    model = nn.Sequential(nn.Linear(blocks * N, blocks * M, bias=False, dtype=torch.float64))
    optimizer = METHODS["tezo"].build(model, rank=R, scale="unit")
    (target,) = optimizer.targets
    rows = []
    for seed in range(12_000):
        z = optimizer.perturbation.direction(target, DrawKey(seed, 0), {})
        u, v = z.u_MR.view(blocks, M, R), z.v_NR.view(blocks, N, R)
        z_BMN = torch.einsum("s,bms,bns->bmn", z.coefficient, u, v)
        rows.append((z_BMN * G).sum(dim=(1, 2), keepdim=True) * z_BMN)
    return torch.stack(rows)


def test_the_estimate_is_unbiased_over_tau_u_and_v(unconditional):
    assert_mean(unconditional.mean(dim=1), G, 0.03)


def test_the_variance_is_that_of_theorem_1(unconditional):
    delta = 1 + M * N + 2 * M * N / R + 6 * (M + N) / R + 10 / R
    squared_error = (unconditional - G).square().sum(dim=(2, 3)).mean(dim=1) / G.square().sum()
    assert_mean(squared_error[:, None], torch.tensor([delta], dtype=torch.float64), 0.03)


def test_mezos_variance_is_its_own_so_the_theorem_tells_the_two_apart():
    # For dense Gaussian noise E|ghat - G|^2 = (mn + 1) |G|^2.
    ghat = estimates(build("mezo"), [DrawKey(0, step) for step in range(4000)])
    squared_error = (ghat - G).square().sum(dim=(1, 2)) / G.square().sum()
    assert_mean(squared_error[:, None], torch.tensor([M * N + 1.0], dtype=torch.float64), 0.06)


@pytest.mark.parametrize("name", mostly_slow(["mezo", "lozo", "subzo"], "lozo"))
def test_the_baselines_are_unbiased_under_unit_scale_too(name):
    assert_mean(estimates(build(name), [DrawKey(seed, 0) for seed in range(4000)]), G, 0.2)


@pytest.mark.slow
def test_the_raw_scale_has_mean_r_times_the_gradient():
    assert_mean(estimates(build(scale="raw"), [DrawKey(seed, 0) for seed in range(4000)]), R * G, 0.2)


@pytest.mark.slow
def test_steps_are_unbiased_end_to_end_over_seeds():
    def change(seed: int) -> Tensor:
        optimizer = build(seed=seed)
        optimizer.step(optimizer.model)
        return -effective_weights(optimizer)["layer.weight"]

    assert_mean(torch.stack([change(seed) for seed in range(2500)]), G, 0.2)


@pytest.mark.slow
def test_given_the_factors_the_mean_is_the_projection_on_them_and_not_the_gradient():
    optimizer = build(seed=3)
    steps, walked = 4000, [torch.zeros(M, N, dtype=torch.float64)]
    for _ in range(steps):
        optimizer.step(optimizer.model)
        walked.append(effective_weights(optimizer)["layer.weight"])
    samples = -torch.stack(walked).diff(dim=0)
    (moving,) = optimizer.parameters.values()
    u, v = moving.change.u_MR, moving.change.v_NR
    terms = torch.einsum("ms,ns->smn", u, v)
    projection = sum((G * term).sum() * term for term in terms)
    assert_mean(samples, projection, 0.15)
    standard_error = samples.std(dim=0) / steps**0.5
    assert ((samples.mean(dim=0) - G).abs() > 10 * standard_error).any()
    # Whatever the number of steps, the run stays in the span of r rank-one matrices: r numbers, not mn.
    assert torch.linalg.matrix_rank(samples.flatten(1), rtol=1e-9) == R
