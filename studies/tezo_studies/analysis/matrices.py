"""Square matrices, and checks of their sizes, for analyses that need no model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tezo.directions.random import normal
from tezo.system.errors import RequestError


def require_at_least(least: int, **values: int) -> None:
    """Raises `RequestError` if one of `values` (options by name) is below `least`."""
    for key, value in values.items():
        if value < least:
            raise RequestError(f"{key} is {value}; it must be at least {least}.")


def require_sizes(sizes: Sequence[int], ranks: Sequence[int], rank_key: str) -> None:
    """Checks the sizes and ranks of matrices.

    Args:
        sizes: option `sizes`, numbers of rows and columns of square matrices.
        ranks: ranks that are used at each size.
        rank_key: name of the option of `ranks`, for messages.

    Raises:
        RequestError: there is no size or rank, one is below 1, or a rank is above a size.
    """
    for key, values in (("sizes", sizes), (rank_key, ranks)):
        if not values:
            raise RequestError(f"{key} is empty; give at least one whole number.")
        for value in values:
            require_at_least(1, **{key: value})
    if max(ranks) > min(sizes):
        raise RequestError(
            f"{rank_key}: {max(ranks)} is above {min(sizes)}, the smallest of sizes; lower it, or remove that size."
        )


def linear(size: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """A linear layer with a zero weight (size, size) and no bias; torch's global generator is not used."""
    with torch.device("meta"):
        layer = nn.Linear(size, size, bias=False, dtype=dtype)
    layer.weight = nn.Parameter(torch.zeros(size, size, dtype=dtype))
    return layer


def unit_gradient(size: int, seed: int) -> Tensor:
    """A Gaussian matrix (size, size) scaled to norm 1, in float64."""
    drawn = normal((size, size), seed=seed, step=0, name="gradient", role=f"{size}")
    scaled: Tensor = drawn / drawn.norm()
    return scaled
