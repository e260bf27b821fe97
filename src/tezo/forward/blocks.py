"""Several perturbed models in one forward pass: the rows of a batch form equal blocks, and block g uses model g."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.directions.spaces import CoefficientDraw, Direction, FixedFactors, LowRank
from tezo.forward.interception import Uncopied, untraced
from tezo.forward.perturbed_parameter import Shift


class NotInBlocksError(Exception):
    """A tensor inside the model cannot be split into blocks, because its leading dimension is not the pass's rows."""


class Blocks(Uncopied):
    """Records the number of rows of a forward pass of `model`, and splits inputs of its modules into blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: int | None = None
        """Leading dimension of the first tensor argument of the model; None outside a pass."""
        self.tokens: int | None = None
        """`rows` times the second dimension of that tensor; None outside a pass."""
        self._begin: Callable[[int], object] | None = None
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del model
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
        self.rows = tensors[0].shape[0] if tensors else None
        self.tokens = tensors[0].shape[:2].numel() if tensors else None
        if self._begin is not None and self.rows is not None:
            self._begin(self.rows)

    @contextmanager
    def before_each_pass(self, begin: Callable[[int], object]) -> Iterator[None]:
        """Calls `begin` before each forward pass, with its number of rows, while open."""
        self._begin = untraced(begin)
        try:
            yield
        finally:
            self._begin = None

    def _leave(self, *_: object) -> None:
        self.rows = self.tokens = None

    def split(self, values: Tensor, count: int, keep: int) -> Tensor:
        """Returns `values` as `count` equal, contiguous blocks of rows: (count, T, *the last `keep` dimensions).

        Raises:
            NotInBlocksError: the leading dimension is neither the pass's rows nor its tokens (for example the tokens
                routed to one expert), or lookup ids (`keep` = 0) of shape (L,) or (L, L), which may be positions or
                position differences instead of token ids, differ between blocks.
        """
        leading = values.shape[0] if values.ndim > keep else 1
        known = self.rows is None or leading in (self.rows, self.tokens)
        if count > 1 and (leading % count or not known):
            raise NotInBlocksError
        blocks = values.reshape(count, -1, *values.shape[values.ndim - keep :])
        square = values.ndim == 1 or values.shape[0] == values.shape[1]
        if count > 1 and keep == 0 and square and not (blocks == blocks[:1]).all():  # may be positions
            raise NotInBlocksError
        return blocks

    def close(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()


STACK, DEVICE_STACK = 1 << 19, 1 << 24
"""Largest number of coefficient entries of points that are computed together, if examples or members have separate
directions: on a CPU, where more are computed in parts that stay in the processor's cache, and on other devices, where
each operation has a fixed price."""

Points = tuple[slice | None, FixedFactors]
"""(blocks or None for all, the points of these blocks or one point for all of them)."""


def block_points(change: FixedFactors, moved: bool, shifts: Sequence[Shift], dtype: torch.dtype) -> Iterator[Points]:
    """Returns terms whose sum is D + scale_g Z_g for each block g; both signs of a direction share one draw.

    D is `change`, zero unless `moved`; without `shifts` all blocks are at D. `dtype` is that of the products.
    """
    # In half precision c + rho u would lose u once c is large, so they are separate terms where a product rounds them.
    apart = change.casts_coefficient and dtype.itemsize < 4
    origin = change.coefficient if moved else None
    if not shifts:
        return iter([(None, change)] if moved else [])
    if all(len(shift.examples) == 1 for shift in shifts):
        return _shared(change, origin, shifts, apart=apart)
    cast = replace(change, v_NR=change.v_NR.to(dtype))  # for all parts
    if apart and moved:
        return chain([(None, change)], _of_examples(cast, None, shifts))
    return _of_examples(cast, origin, shifts)


def _shared(change: FixedFactors, origin: Tensor | None, shifts: Sequence[Shift], *, apart: bool) -> Iterator[Points]:
    groups, start = [list(group) for _, group in groupby(shifts, key=_draw_key)], 0
    if len(groups) > 1 and len(shifts) * change.coefficient.numel() <= _most_together(change):  # one product for all
        yield None, _stacked(change, origin, shifts, apart=apart)
        return
    for group in groups:
        blocks, start = slice(start, start + len(group)) if len(groups) > 1 else None, start + len(group)
        z, scales = draw_of(group[0].direction).of(group[0].examples[0]), [shift.scale for shift in group]
        if origin is None:
            yield blocks, change.with_coefficient(z).scaled(scales)
        elif apart:
            assert isinstance(change, LowRank)
            yield blocks, replace(change.with_coefficient(z).scaled(scales), beside=origin)
        else:
            column = column_of(tuple(scales), z.ndim, z.dtype, z.device)
            yield blocks, change.with_coefficient(torch.addcmul(origin, z, column))


def _draw_key(shift: Shift) -> tuple[int, ...]:
    return id(shift.direction), *shift.examples


def _stacked(change: FixedFactors, origin: Tensor | None, shifts: Sequence[Shift], *, apart: bool) -> FixedFactors:
    """Returns the points of all blocks as one, with a draw for each direction."""
    draws = {_draw_key(shift): shift for shift in shifts}
    drawn = {key: draw_of(shift.direction).of(shift.examples[0]) for key, shift in draws.items()}
    z, scales = torch.stack([drawn[_draw_key(shift)] for shift in shifts]), tuple(s.scale for s in shifts)
    if apart:
        assert isinstance(change, LowRank)
        beside = None if origin is None else origin.expand_as(z)
        return replace(change.with_coefficient(z).scaled(scales), beside=beside)
    column = column_of(scales, z.ndim - 1, z.dtype, z.device)
    return change.with_coefficient(z.mul_(column) if origin is None else torch.addcmul(origin, z, column))


@functools.lru_cache(maxsize=32)  # a copy to a device for each layer and step would take longer than the product
def column_of(scales: tuple[float, ...], ndim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the scales as (G, 1, ...), to be multiplied by points of `ndim` dimensions."""
    with torch.inference_mode(mode=False):
        return torch.tensor(scales, dtype=dtype, device=device).view(-1, *[1] * ndim)


def _of_examples(change: FixedFactors, origin: Tensor | None, shifts: Sequence[Shift]) -> Iterator[Points]:
    directions = {id(shift.direction): shift for shift in shifts}
    points = {key: draw_of(shift.direction).points(shift.examples) for key, shift in directions.items()}
    size, start = change.coefficient.numel(), 0
    most = _most_together(change)
    if size * sum(len(shift.examples) for shift in shifts) <= most:  # one product for all
        moved = [points[id(shift.direction)](shift.scale, slice(None), origin) for shift in shifts]
        yield None, change.with_coefficient(torch.cat(moved))
        return
    part = max(1, most // size)
    for shift in shifts:
        for first in range(0, len(shift.examples), part):
            some = points[id(shift.direction)](shift.scale, slice(first, first + part), origin)
            yield slice(start, start + len(some)), change.with_coefficient(some)
            start += len(some)


def _most_together(change: FixedFactors) -> int:
    """Returns the most coefficient entries of points that are computed together."""
    return STACK if change.v_NR.device.type == "cpu" else DEVICE_STACK


def draw_of(direction: Direction) -> CoefficientDraw:
    """Returns the draw of the coefficients of a low-rank direction."""
    assert isinstance(direction, FixedFactors)
    return direction.draw
