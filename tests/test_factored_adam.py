"""TeZO-Adam's dense write against the formula in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tezo.optim import factored_adam
from tezo.optim.factored_adam import AdamFactors, factored_adam_

LR = 1e-3
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("height", "width", "rank"), [(70, 90, 5), (64, 128, 32), (1, 200, 1), (129, 3, 17)], ids=str
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(height: int, width: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, AdamFactors]:
    draw = generator(height + width)
    u, v = torch.randn(height, rank, generator=draw), torch.randn(width, rank, generator=draw)
    tau_m, tau_v = torch.randn(rank, generator=draw), torch.rand(rank, generator=draw)
    weight = torch.randn(height, width, generator=draw).to(dtype)
    return weight, AdamFactors(u, v, tau_m, tau_v, eps=1e-2, eps_in_sqrt=True)


def exact_step(weight: Tensor, factors: AdamFactors, lr: float = LR) -> Tensor:
    """W - lr M / sqrt(V + eps), as it is written, in float64."""
    u, v = factors.u_MR.double(), factors.v_NR.double()
    m = torch.einsum("ms,s,ns->mn", u, factors.tau_m_R.double(), v)
    s = torch.einsum("ms,s,ns->mn", u**2, factors.tau_v_R.double(), v**2)
    root = (s + factors.eps).sqrt() if factors.eps_in_sqrt else s.sqrt() + factors.eps
    return weight.double() - lr * m / root


def write(weight: Tensor, factors: AdamFactors, lr: float, seed: int) -> None:
    factored_adam_(weight, factors, lr, generator(seed))


@SHAPES
@pytest.mark.parametrize("eps_in_sqrt", [True, False])
def test_a_float32_write_is_the_formula(height, width, rank, eps_in_sqrt):
    weight, factors = problem(height, width, rank)
    factors = replace(factors, eps_in_sqrt=eps_in_sqrt)
    before, expected = [t.clone() for t in (factors.u_MR, factors.v_NR)], exact_step(weight, factors)
    moved = float((expected - weight.double()).norm())
    write(weight, factors, LR, 0)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)
    assert float((weight.double() - expected).norm()) < 1e-3 * moved
    assert torch.equal(factors.u_MR, before[0]) and torch.equal(factors.v_NR, before[1])


def test_a_transposed_weight_and_half_precision_factors_are_handled_by_strides():
    weight, factors = problem(70, 90, 5)
    factors = replace(factors, u_MR=factors.u_MR.bfloat16(), v_NR=factors.v_NR.bfloat16())
    stored = weight.T.contiguous()
    expected = exact_step(weight, factors)
    write(stored.T, factors, LR, 0)
    torch.testing.assert_close(stored.T.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "size", "lr"),
    [(torch.bfloat16, 1, 1e-5), (torch.float16, 1, 1e-5), (torch.float16, 2**-15, 5e-9)],
    ids=["bfloat16", "float16", "float16-subnormal"],
)
def test_a_half_precision_write_goes_to_a_neighbour_and_is_right_on_average(dtype, size, lr):
    # Each of 70 * 90 entries, 20 seeds: a number p of the way between two neighbours lands on the upper with
    # probability p. sum (seen - p) / sqrt(sum p (1 - p)) is standard normal: |z| < 5.5 (two-sided 4e-8). So it
    # is for the entries of each sign, and for those whose p is small: a step far below the spacing.
    seeds = 20
    weight, factors = problem(70, 90, 5, dtype)
    weight *= size
    exact = exact_step(weight, factors, lr)
    drawn = []
    for seed in range(seeds):
        drawn.append(weight.clone())
        write(drawn[-1], factors, lr, seed)
    assert not torch.equal(drawn[0], drawn[1])
    values = torch.stack(drawn).double()
    down = torch.nextafter(weight, torch.tensor(-torch.inf, dtype=dtype)).double()
    up = torch.nextafter(weight, torch.tensor(torch.inf, dtype=dtype)).double()
    below, above = torch.where(exact < weight, down, weight.double()), torch.where(exact < weight, weight.double(), up)
    sound = (below <= exact) & (exact <= above)
    assert sound.double().mean() > 0.9, "steps are not below the spacing"
    assert ((values == below) | (values == above))[:, sound].all()
    share = ((exact - below) / (above - below))[sound]
    seen = ((values - below) / (above - below)).mean(dim=0)[sound]
    for chosen in (share >= 0, weight[sound] > 0, weight[sound] < 0, share < 0.02, share > 0.98):
        p = share[chosen]
        z = (seen[chosen] - p).sum() * seeds**0.5 / (p * (1 - p)).sum().sqrt()
        assert p.numel() > 100 and abs(float(z)) < 5.5


def test_products_in_bfloat16_leave_a_step_within_its_rounding(monkeypatch):
    monkeypatch.setattr("tezo.optim.factored_adam.multiplies_bfloat16", lambda _: True)
    weight, factors = problem(70, 90, 5, torch.bfloat16)
    weight.zero_()
    exact = exact_step(weight, factors, 1.0)
    factored_adam_(weight, factors, 1.0, generator(0))
    assert 0 < float((weight.double() - exact).norm()) < 2**-6 * float(exact.norm())


@HALF
def test_values_beyond_the_range_and_nan_stay_what_they_are(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([[largest, -largest, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0]], dtype=dtype)
    _, factors = problem(1, 8, 3)
    weight = values.clone()
    write(weight, factors, 0.0, 0)
    assert torch.equal(weight.nan_to_num(7.0, 8.0, 9.0), values.nan_to_num(7.0, 8.0, 9.0))


def test_a_write_needs_no_more_than_its_tiles(monkeypatch):
    # In torch: whatever the shape, results do not depend on the size of tiles, and one buffer serves them all.
    weight, factors = problem(70, 90, 5)
    whole, parts = weight.clone(), weight.clone()
    factored_adam_(whole, factors, LR, generator(0))
    monkeypatch.setattr("tezo.optim.factored_adam.TILE", 200)
    buffers, scratch = [], factored_adam.scratch
    monkeypatch.setattr("tezo.optim.factored_adam.scratch", lambda *size: buffers.append(scratch(*size)) or buffers[-1])
    factored_adam_(parts, factors, LR, generator(0))
    assert len(buffers) > 30 and len({buffer.data_ptr() for buffer in buffers}) == 1
    assert {buffer.shape.numel() for buffer in buffers} <= {2 * 2 * 90, 2 * 90}
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)
