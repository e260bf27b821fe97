"""Stochastic rounding, so that updates far below a half-precision weight's spacing are not lost.

A bf16 weight near 1 has neighbours 2^-8 or 2^-7 away, an update may be 1e-7: rounded to the nearest it would
never arrive, rounded up with a probability in proportion to its size it does, on average.
"""

import torch
from torch import Tensor


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
        weight.copy_(stochastic(weight.float().add_(delta, alpha=alpha), weight.dtype, draw))


def stochastic(exact: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """float32 values rounded to one of their two neighbours in `dtype`, with E[result] = value."""
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
