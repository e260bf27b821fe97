"""A range finder gives the leading directions of the vectors that pass by, however many there are."""

import pytest
import torch
from tiny import sines
from torch import Tensor

from tezo.directions.bases.activation import EXACT, RangeFinder, width

RANK = 4


def decaying(size: int, count: int, seed: int = 0) -> Tensor:
    """(count, size): vectors whose singular values fall by a third from one direction to the next."""
    draw = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))
    scale = torch.tensor(1.5, dtype=torch.float64) ** -torch.arange(size, dtype=torch.float64).clamp_max(40)
    return (torch.randn(count, size, generator=draw, dtype=torch.float64) * scale) @ turn


def test_a_sketch_that_keeps_all_second_moments_is_their_eigendecomposition():
    x = decaying(60, 300)
    finder = RangeFinder(60, width(60, RANK), x.device, x.dtype, "x")
    for part in x.split(37):  # however the vectors come
        finder.add(part)
    found = finder.leading(RANK)
    right_II = torch.linalg.svd(x, full_matrices=False)[2]
    for place in range(RANK):  # each at its own place, in descending order
        assert sines(found[:, [place]], right_II[[place]].T).max() < 1e-6
    torch.testing.assert_close(found.T @ found, torch.eye(RANK, dtype=torch.float64), rtol=0, atol=1e-7)
    assert (found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all()


def test_a_narrow_sketch_finds_the_same_directions_in_a_fraction_of_the_memory():
    size = 1224
    x = decaying(size, 400)
    columns = width(size, RANK)
    assert columns <= size // 16
    finder = RangeFinder(size, columns, x.device, x.dtype, "x")
    finder.add(x)
    found = finder.leading(RANK)
    right_II = torch.linalg.svd(x, full_matrices=False)[2]
    for place in range(RANK):
        assert sines(found[:, [place]], right_II[[place]].T).max() < 1e-2
    assert sines(found, right_II[:RANK].T).max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [96, EXACT + 100])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_fewer_vectors_than_a_sketch_has_columns_lose_nothing(dtype, size, mean):
    """As a layer sees them that is called once a row; the sums are then far from full rank."""
    few, rank = 24, 40  # more directions than there are vectors
    x = decaying(size, few) + mean
    finder = RangeFinder(size, width(size, rank), x.device, dtype, "x")
    finder.add(x.to(dtype))
    found = finder.leading(rank)
    reached = (x @ found[:, :8]).square().sum() / torch.linalg.svdvals(x)[:8].square().sum()
    assert reached > 0.9999
    torch.testing.assert_close(found.T @ found, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-6)
