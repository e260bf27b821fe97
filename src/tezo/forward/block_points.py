"""The points D + scale_g Z_g at which the blocks of rows of a pass are computed.

Both signs of a direction share one draw. The points of many examples are computed in parts, which stay in the
processor's cache.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from tezo.directions.coefficients import CoefficientDraw, Stack
from tezo.directions.spaces import Direction, FixedFactors, LowRank
from tezo.forward.moving_parameter import Shift

STACK = 1 << 19
"""Largest number of coefficient entries of points that are computed together, if examples have directions of their
own."""

Points = tuple[slice | None, FixedFactors]
"""(blocks or None for all, the points of these blocks or one point for all of them)."""


def block_points(change: FixedFactors, moved: bool, shifts: Sequence[Shift], dtype: torch.dtype) -> Iterator[Points]:
    """Yields terms whose sum is D + scale_g Z_g for each block g.

    Args:
        change: D.
        moved: whether D is not zero.
        shifts: scale and direction of the blocks; none: all blocks are at D.
        dtype: that of the products.
    """
    # In half precision c + rho u would lose u once c is large, so they are separate terms where a product rounds them.
    apart = change.casts_coefficient and dtype.itemsize < 4
    origin = None if apart or not moved else change.coefficient
    if shifts and all(len(shift.examples) == 1 for shift in shifts):
        yield from _shared(change, origin, shifts, change.coefficient if apart and moved else None)
        return
    if moved and (apart or not shifts):
        yield None, change
    if shifts:
        yield from _of_examples(replace(change, v_NR=change.v_NR.to(dtype)), origin, shifts)  # cast for all parts


def _shared(
    change: FixedFactors, origin: Tensor | None, shifts: Sequence[Shift], beside: Tensor | None
) -> Iterator[Points]:
    start = 0
    for _, group in groupby(shifts, key=lambda shift: (id(shift.direction), *shift.examples)):
        own = list(group)
        blocks, start = slice(start, start + len(own)) if len(own) < len(shifts) else None, start + len(own)
        z, scales = _draw(own[0].direction).of(own[0].examples[0]), [shift.scale for shift in own]
        if beside is not None:
            assert isinstance(change, LowRank)
            yield blocks, replace(change.with_coefficient(z).scaled(scales), beside=beside)
        elif origin is None:
            yield blocks, change.with_coefficient(z).scaled(scales)
        else:
            yield (
                blocks,
                change.with_coefficient(torch.addcmul(origin, z, _column(tuple(scales), z.ndim, z.dtype, z.device))),
            )


@functools.lru_cache(maxsize=32)  # a copy to a device for each layer and step would take longer than the product
def _column(scales: tuple[float, ...], ndim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scales as (G, 1, ...), to be multiplied by points of `ndim` dimensions."""
    with torch.inference_mode(mode=False):
        return torch.tensor(scales, dtype=dtype, device=device).view(-1, *[1] * ndim)


def _of_examples(change: FixedFactors, origin: Tensor | None, shifts: Sequence[Shift]) -> Iterator[Points]:
    directions = {id(shift.direction): shift for shift in shifts}
    stacks = {key: _draw(shift.direction).stack(shift.examples) for key, shift in directions.items()}
    size, start = change.coefficient.numel(), 0
    if size * sum(len(shift.examples) for shift in shifts) <= STACK:  # one product for all
        moved = [_moved(stacks[id(shift.direction)], origin, shift.scale, slice(None)) for shift in shifts]
        yield None, change.with_coefficient(torch.cat(moved))
        return
    part = max(1, STACK // size)
    for shift in shifts:
        for first in range(0, len(shift.examples), part):
            some = _moved(stacks[id(shift.direction)], origin, shift.scale, slice(first, first + part))
            yield slice(start, start + len(some)), change.with_coefficient(some)
            start += len(some)


def _moved(stack: Stack, origin: Tensor | None, scale: float, part: slice) -> Tensor:
    return stack.scaled(scale, part) if origin is None else stack.added(origin, scale, part)


def _draw(direction: Direction) -> CoefficientDraw:
    assert isinstance(direction, FixedFactors)
    return direction.draw
