"""Stochastic rounding, so that updates much smaller than the spacing of a half-precision weight are not lost.

A bfloat16 weight near 1 has neighbours at a distance of 2^-8 or 2^-7; an update may be 1e-7. Rounding to nearest would
lose every such update. Stochastic rounding picks each neighbour with a probability that makes the expected result equal
to the exact value.

Values beyond the largest finite value of the format, infinities and NaN are rounded to nearest, as `Tensor.to` does.
Values within the finite range never become infinite.
"""

import math

import torch
from torch import Tensor

from tezo.directions.scratch import scratch


def add_(weight: Tensor, delta: Tensor, alpha: float, draw: torch.Generator) -> None:
    """Adds alpha * delta to the weight, in place; unbiased in bfloat16 and float16.

    `delta` has the weight's shape and is float32 or wider; `draw` is on the weight's device.
    """
    if weight.dtype in (torch.float32, torch.float64):
        weight.add_(delta.to(weight.dtype), alpha=alpha)
    else:
        exact = scratch("exact", weight.shape, torch.float32, weight.device)
        store_(weight, exact.copy_(weight).add_(delta, alpha=alpha), draw)


def store_(weight: Tensor, exact: Tensor, draw: torch.Generator) -> None:
    """Stores `exact`, rounded stochastically to the weight's dtype (bfloat16 or float16); overwrites `exact`.

    The weight has any strides, `exact` is float32 of the same shape, without overlapping memory.
    """
    # the range check synchronises with the device, so it is done on a CPU only
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and exact.numel() > 0:
        (low, high), largest = torch.aminmax(exact), torch.finfo(weight.dtype).max
        if low >= -largest and high <= largest:  # comparisons with NaN are False
            _store_bfloat16_(weight, exact, draw)
            return
    weight.copy_(_to_a_neighbour(exact, weight.dtype, draw))


def _store_bfloat16_(weight: Tensor, exact: Tensor, draw: torch.Generator) -> None:
    """Rounds to bfloat16, the upper 16 bits of a float32: adds uniform noise to the lower 16 bits and drops them.

    Between two neighbours the bit pattern is linear in the magnitude, subnormals included. The probability of a carry
    is therefore (lower 16 bits) / 2^16 = (|value| - |lower neighbour|) / spacing.
    """
    bits = exact.view(torch.int32)
    bits.add_(_noise(exact.shape, draw)).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(bits)


POOL = 8
"""Rows of random bits that the rounding noise of a larger tile is made of."""


def _noise(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Returns integers, uniform over 0 ... 2^16 - 1 and pairwise independent, of this shape; int32.

    Entry (i, j) is pool[o_i + j] xor a_i, with a random offset o_i and random bits a_i for each row, because a draw for
    every entry would take longer than the rest of the write. Pairwise independence makes the errors of two entries
    uncorrelated, as with a draw for every entry. Rows begin at different places of the pool, so that the errors of a
    matrix are not close to a matrix of low rank, as they would be with noise of the form b_j xor a_i.
    """
    width = shape[-1] if shape else 1
    count = math.prod(shape) // max(1, width)
    pool = _bits(min(count, POOL) * width, draw)
    if count <= POOL:
        return pool.view(shape)
    windows = pool.as_strided((len(pool) - width + 1, width), (1, 1))
    offsets = torch.randint(len(windows), (count,), generator=draw, device=draw.device)
    noise = scratch("rounding", (count, width), torch.int32, draw.device)
    return torch.index_select(windows, 0, offsets, out=noise).bitwise_xor_(_bits(count, draw).unsqueeze(1)).view(shape)


def _bits(count: int, draw: torch.Generator) -> Tensor:
    """Returns `count` integers, uniform over 0 ... 2^16 - 1; int32. One 64-bit draw gives four."""
    drawn = torch.empty(-(-count // 4), dtype=torch.int64, device=draw.device).random_(-(2**63), None, generator=draw)
    return drawn.view(torch.int16)[:count].to(torch.int32).bitwise_and_(0xFFFF)


def _to_a_neighbour(exact: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Rounds any values to any 16-bit format on any device: to nearest, then by chance to the other neighbour."""
    nearest = exact.to(dtype)
    error = exact - nearest.float()
    # The other neighbour of the value is one step of the bit pattern away from zero or towards zero.
    away = (error > 0) == (nearest > 0)
    bits = nearest.view(torch.int16)
    step = torch.where(away, 1, -1).to(torch.int16)
    smallest = torch.where(error > 0, 1, -32767).to(torch.int16)  # +- smallest subnormal; -32767 is 0x8001
    other = torch.where(nearest == 0, smallest, bits + step).view(dtype)
    gap = other.float() - nearest.float()
    chance = torch.where(error == 0, 0.0, error / gap)
    move = torch.rand(exact.shape, generator=draw, device=exact.device) < chance
    return torch.where(move & torch.isfinite(other), other, nearest)
