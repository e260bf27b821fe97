"""Stochastic rounding, so that updates far below a half-precision weight's spacing are not lost.

A bf16 weight near 1 has neighbours 2^-8 or 2^-7 away, an update may be 1e-7: rounded to the nearest it would
never arrive, rounded up with a probability in proportion to its size it does, on average.

Values beyond the format's largest finite one, infinities and NaN are rounded to the nearest, as `Tensor.to` does;
no finite value up to the largest ever becomes infinite.
"""

import torch
from torch import Tensor

from tezo.numerics.scratch import scratch


def add_(weight: Tensor, delta: Tensor, alpha: float, draw: torch.Generator) -> None:
    """Weight += alpha * delta, in place; without bias in bfloat16 and float16.

    Args:
        weight: any floating dtype.
        delta: same shape, float32 or wider.
        alpha: factor.
        draw: generator on the weight's device.
    """
    if weight.dtype in (torch.float32, torch.float64):
        weight.add_(delta.to(weight.dtype), alpha=alpha)
    else:
        exact = scratch("exact", weight.shape, torch.float32, weight.device)
        store_(weight, exact.copy_(weight).add_(delta, alpha=alpha), draw)


def stochastic(exact: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """float32 values rounded to one of their two neighbours in `dtype`, with E[result] = value."""
    rounded = torch.empty_like(exact, dtype=dtype)
    store_(rounded, exact.clone(), draw)
    return rounded


def store_(weight: Tensor, exact: Tensor, draw: torch.Generator) -> None:
    """Weight <- exact, rounded stochastically to the weight's dtype (bfloat16 or float16); overwrites `exact`.

    Args:
        weight: of any strides.
        exact: same shape, float32, without overlaps.
        draw: generator on the weight's device.
    """
    # Asking whether all values are in range waits for the device, which costs nothing on a CPU alone.
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _all_within(exact, weight.dtype):
        _store_bfloat16_(weight, exact, draw)
    else:
        weight.copy_(_to_a_neighbour(exact, weight.dtype, draw))


def _all_within(exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite, and no larger than the format's largest."""
    if exact.numel() == 0:
        return True
    largest = torch.finfo(dtype).max
    low, high = torch.aminmax(exact)
    return bool(low >= -largest) and bool(high <= largest)  # False of NaN


def _store_bfloat16_(weight: Tensor, exact: Tensor, draw: torch.Generator) -> None:
    """A bfloat16 is the upper half of a float32: add a uniform lower half to the pattern and cut it off.

    The pattern counts magnitudes in equal parts between two neighbours, subnormals included, so that the carry
    comes with probability (lower half) / 2^16, which is (|value| - |neighbour below|) / spacing.
    """
    bits = exact.view(torch.int32)
    # Signed noise and 2^15 make 0 .. 2^16 - 1; 2^15 goes first, or -0.0, the smallest int32, would run over.
    bits.add_(1 << 15).add_(_int16_noise(exact.numel(), draw).view(exact.shape)).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(bits)


def _int16_noise(count: int, draw: torch.Generator) -> Tensor:
    """(count,): uniform over all of int16. Four to a draw of 64 bits: the draw is what takes the time."""
    drawn = scratch("rounding", (-(-count // 4),), torch.int64, draw.device)
    return drawn.random_(-(2**63), None, generator=draw).view(torch.int16)[:count]


def _to_a_neighbour(exact: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """`stochastic` for any 16-bit format, any device and any value, by looking for the second neighbour."""
    nearest = exact.to(dtype)
    error = exact - nearest.float()
    # The neighbour on the far side of the value: one step of the bit pattern away from zero, or towards it.
    away = (error > 0) == (nearest > 0)
    bits = nearest.view(torch.int16)
    step = torch.where(away, 1, -1).to(torch.int16)
    smallest = torch.where(error > 0, 1, -32767).to(torch.int16)  # of either sign; -32767 is 0x8001
    other = torch.where(nearest == 0, smallest, bits + step).view(dtype)
    gap = other.float() - nearest.float()
    chance = torch.where(error == 0, 0.0, error / gap)
    move = torch.rand(exact.shape, generator=draw, device=exact.device) < chance
    return torch.where(move & torch.isfinite(other), other, nearest)
