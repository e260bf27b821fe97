"""Square matrices of no model, for analyses that need none."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tezo.errors import RequestError
from tezo.numerics.random import normal


def require_at_least(least: int, **values: int) -> None:
    """An error where one of `values`, options by name, is below `least`."""
    for key, value in values.items():
        if value < least:
            raise RequestError(f"{key} is {value}; it must be at least {least}.")


def require_sizes(sizes: Sequence[int], ranks: Sequence[int], rank_key: str) -> None:
    """An error where there is no size or rank, one is below 1, or a rank is above a size.

    Args:
        sizes: option `sizes`, rows and columns of square matrices.
        ranks: all that will be drawn at each size.
        rank_key: the option they come from.
    """
    for key, values in (("sizes", sizes), (rank_key, ranks)):
        if not values:
            raise RequestError(f"{key} is empty; give at least one whole number.")
        for value in values:
            require_at_least(1, **{key: value})
    if max(ranks) > min(sizes):
        raise RequestError(
            f"{rank_key}: {max(ranks)} is above {min(sizes)}, the smallest of sizes; lower it, or leave that size out."
        )


def linear(size: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """A linear layer with a weight of zeros, (size, size), and no bias; torch's global generator is not touched."""
    with torch.device("meta"):
        layer = nn.Linear(size, size, bias=False, dtype=dtype)
    layer.weight = nn.Parameter(torch.zeros(size, size, dtype=dtype))
    return layer


def unit_gradient(size: int, seed: int) -> Tensor:
    """A Gaussian matrix (size, size) scaled to norm 1, in float64."""
    drawn = normal((size, size), seed=seed, step=0, name="gradient", role=f"{size}")
    scaled: Tensor = drawn / drawn.norm()
    return scaled
