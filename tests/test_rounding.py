"""Stochastic rounding: to one of two neighbours, right on average.

Neighbours are looked up in a table of all values of the format, made from its bit patterns.
"""

import pytest
import torch
from torch import Tensor, nn

from tezo.forward import rounding
from tezo.methods.tezo import tezo_adam

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
DRAWS = 40_000


def stochastic(exact: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    rounded = torch.empty_like(exact, dtype=dtype)
    rounding.store_(rounded, exact.clone(), draw)
    return rounded


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grid(dtype: torch.dtype) -> Tensor:
    """All finite values of the format, in float64, in order; one zero."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).double()
    return torch.unique(values[torch.isfinite(values)])


def neighbours(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest value of the format at or below, and the smallest at or above."""
    values, exact = grid(dtype), exact.double()
    above = torch.searchsorted(values, exact)
    below = torch.searchsorted(values, exact, right=True) - 1
    return values[below], values[above]


def numbers(dtype: torch.dtype) -> Tensor:
    """float32 values of all kinds: normal, subnormal, near zero, of both signs, exact, near the largest."""
    tiny, smallest = torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    some = [1.0, 1.0 + 1e-4, 1.003, 0.02, 3.14159, 0.99999, 777.7, 1.5 * smallest, 0.3 * smallest, 1.01 * tiny]
    some += [0.999 * tiny, tiny, smallest, 0.0, 0.9 * torch.finfo(dtype).max, torch.finfo(dtype).max]
    spread = torch.randn(100, generator=generator(1)) * torch.logspace(-4, 3, 100)
    return torch.cat([torch.tensor(some), -torch.tensor(some), spread])


@DTYPES
def test_a_number_goes_to_one_of_its_two_neighbours_and_on_average_stays(dtype):
    # Of n draws with P(up) = p, the mean is within 5.5 sqrt(p (1 - p) / n) of p (two-sided 4e-8 each).
    exact = numbers(dtype)
    below, above = neighbours(exact, dtype)
    drawn = stochastic(exact.repeat(DRAWS, 1), dtype, generator())
    assert drawn.dtype == dtype
    drawn = drawn.double()
    assert ((drawn == below) | (drawn == above)).all()
    gap = above - below
    share = torch.where(gap > 0, (exact.double() - below) / gap, 0.0)
    seen = torch.where(gap > 0, (drawn.mean(dim=0) - below) / gap, 0.0)
    assert ((seen - share).abs() <= 5.5 * (share * (1 - share) / DRAWS).sqrt() + 1e-12).all()
    assert ((share > 0.01) & (share < 0.99)).sum() > 60, "hardly any of the numbers needs rounding"


@DTYPES
def test_every_value_of_the_format_stays_where_it_is(dtype):
    values = grid(dtype).float()
    for seed in range(3):
        assert torch.equal(stochastic(values, dtype, generator(seed)).float(), values)


def test_a_value_beyond_the_largest_neither_wraps_nor_becomes_nan():
    largest = torch.finfo(torch.float16).max
    odd = torch.tensor([largest + 10, -largest - 10, 1e6, -1e6, float("inf"), float("-inf")])
    for seed in range(20):
        drawn = stochastic(odd, torch.float16, generator(seed)).float()
        assert (drawn[:2].abs() == largest).all() and (drawn[2:].abs() == float("inf")).all()
        assert torch.equal(torch.sign(drawn), torch.sign(odd))
    assert stochastic(torch.tensor([float("nan")]), torch.bfloat16, generator()).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_full_precision_is_added_plainly_and_draws_nothing(dtype):
    weight, delta = torch.randn(50, generator=generator(1)).to(dtype), torch.randn(50, generator=generator(2))
    expected, draw = weight + 0.3 * delta.to(dtype), generator()
    state = draw.get_state()
    rounding.add_(weight, delta, 0.3, draw)
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(draw.get_state(), state)


@DTYPES
def test_many_small_steps_arrive_on_average_where_rounding_to_nearest_stands_still(dtype):
    # 400 steps of a sixtieth of the spacing at 1, on 2000 entries. A walk by whole spacings has variance of at
    # most distance * spacing an entry; the mean is within 5.5 standard errors (4e-8).
    entries, steps, spacing = 2000, 400, torch.finfo(dtype).eps
    delta = torch.full((entries,), spacing / 60)
    weight, nearest, draw = torch.ones(entries, dtype=dtype), torch.ones(entries, dtype=dtype), generator()
    for _ in range(steps):
        rounding.add_(weight, delta, 1.0, draw)
        nearest += delta.to(dtype)
    assert (nearest == 1).all()
    distance = steps * spacing / 60
    standard_error = (distance * spacing / entries) ** 0.5
    assert standard_error < 0.05 * distance
    assert abs(float(weight.double().mean()) - 1 - distance) < 5.5 * standard_error


class Slope(nn.Module):
    """f(W) = <G, W>: the gradient is the same everywhere, so runs in two precisions have one course."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 192, bias=False, dtype=dtype)
        nn.init.ones_(self.layer.weight)
        self.g = torch.randn(192, 256, generator=generator(3))

    def forward(self) -> Tensor:
        out = self.layer(torch.eye(256, dtype=self.layer.weight.dtype))
        return (out.T.float() * self.g).sum()


def change_of_a_run(dtype: torch.dtype, steps: int = 60) -> Tensor:
    """W - W_0, in float32, after so many steps of TeZO-Adam."""
    model = Slope(dtype)
    optimizer = tezo_adam(model, lr=1e-5, rank=4, rho=0.1)
    for _ in range(steps):
        optimizer.step(model)
    return model.layer.weight.detach().float() - 1


def test_a_bfloat16_run_with_tiny_updates_goes_as_far_as_a_float32_run(monkeypatch):
    exact, rounded = change_of_a_run(torch.float32), change_of_a_run(torch.bfloat16)
    assert 0 < exact.abs().max() / 60 < 2**-9 / 4, "a step is not far below half the spacing; this shows nothing"
    # Share of the way: its standard error, from spacing 2^-7 and the distance of each entry, is below 3 %;
    # 5 of them are a chance of 6e-7.
    share = float((rounded * exact).sum() / exact.square().sum())
    standard_error = float((exact.abs() * 2**-7 * exact.square()).sum().sqrt() / exact.square().sum())
    assert standard_error < 0.03
    assert abs(share - 1) < 5 * standard_error
    # The same run, rounded to the nearest, never leaves.
    monkeypatch.setattr(rounding, "store_", lambda weight, exact, _: weight.copy_(exact))
    assert not change_of_a_run(torch.bfloat16).any()


def test_bfloat16_beyond_its_largest_and_nan_are_rounded_as_to_the_nearest():
    largest = torch.finfo(torch.bfloat16).max
    odd = torch.tensor([largest * (1 + 2**-10), torch.finfo(torch.float32).max, torch.inf, torch.nan])
    odd = torch.cat([odd, -odd, torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)])  # NaN of a GPU
    for seed in range(20):
        drawn = stochastic(odd, torch.bfloat16, generator(seed))
        torch.testing.assert_close(drawn, odd.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_the_patterns_method_and_the_neighbours_method_agree_on_the_chance():
    # Two ways to the same distribution; the first takes bfloat16 on a CPU. Sums over draws of each number differ
    # by 5.5 sqrt(2 p (1 - p) n) at most (4e-8 each).
    exact, draws = numbers(torch.bfloat16), 10_000
    many = exact.repeat(draws, 1)
    fast = stochastic(many, torch.bfloat16, generator(1)).double()
    slow = rounding._to_a_neighbour(many, torch.bfloat16, generator(2)).double()
    below, above = neighbours(exact, torch.bfloat16)
    gap = torch.where(above > below, above - below, 1.0)
    p = (exact.double() - below) / gap
    assert ((fast - slow).mean(dim=0).div(gap).abs() <= 5.5 * (2 * p * (1 - p) / draws).sqrt() + 1e-12).all()


@pytest.mark.parametrize("rows", [3, 9], ids=["drawn-each", "from-a-pool"])
def test_the_noise_of_two_entries_is_independent(rows):
    # n draws of every entry: with independent pairs, means, correlations and counts of both below a bound are within
    # 5.5 standard errors (4e-8 each).
    n, shape, draw = 40_000, torch.Size((rows, 4)), generator()
    noise = torch.stack([rounding._noise(shape, draw).flatten().clone() for _ in range(n)]).double() / 2**16
    assert noise.min() >= 0 and noise.max() < 1
    assert ((noise.mean(0) + 2**-17 - 0.5).abs() < 5.5 * (12 * n) ** -0.5).all()
    correlations = torch.corrcoef(noise.T) - torch.eye(noise.shape[1], dtype=torch.float64)
    assert correlations.abs().max() < 5.5 * n**-0.5
    for p in (0.1, 0.5, 0.9):
        low = (noise < p).double()
        both = low.T @ low / n - p * p
        assert (both - both.diag().diag()).abs().max() < 5.5 * (p * p * (1 - p * p) / n) ** 0.5


@pytest.mark.parametrize("chance", ["alike", "random"])
def test_rounding_errors_of_a_matrix_are_not_close_to_low_rank(chance):
    # The largest singular value of an M x N matrix of independent errors of variance s^2 is close to
    # s (sqrt(M) + sqrt(N)). Noise b_j xor a_i has the same variances, and a singular value near s sqrt(M N).
    size, p = 512, torch.tensor(0.5)
    if chance == "random":
        p = torch.rand(size, size, generator=generator(1))
    exact = (1 + p * 2.0**-7).expand(size, size).contiguous()
    rounded = stochastic(exact, torch.bfloat16, generator())
    errors = (rounded.double() - exact.double()) * 2**7
    largest = float(torch.linalg.matrix_norm(errors, 2))
    assert largest < 1.3 * float(errors.square().mean().sqrt()) * 2 * size**0.5


@DTYPES
def test_a_transposed_weight_is_stored_in_its_places(dtype):
    exact = torch.randn(30, 50, generator=generator(1))
    stored = torch.zeros(50, 30, dtype=dtype)
    rounding.store_(stored.T, exact.clone(), generator())
    assert ((stored.T.float() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps).all()
