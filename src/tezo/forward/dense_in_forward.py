"""Dense directions in the forward pass: W + rho Z is computed tile by tile and never stored as a whole.

W is read but not written, so it does not drift in half precision. Z is drawn once for all blocks of a pass: a two-point
step with both signs in one pass draws it twice, once for the evaluations and once for the update. The temporaries are
tiles of Z, and a tile of W + rho Z for every block.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tezo.directions.spaces import Dense, Direction
from tezo.directions.targets import Layout, Target
from tezo.forward.blocks import Blocks
from tezo.forward.interception import ADDMM, EMBEDDING, LINEAR, Interception, Replacement, unintercepted
from tezo.forward.moving_parameter import MovingParameter, Shift, require_writable
from tezo.numerics.products import Tiles, tiled_linear, tiled_transposed
from tezo.numerics.scratch import scratch

PRODUCT_ENTRIES = 5 << 18
"""Entries of the perturbed tiles of all blocks together, for each byte of an entry of the weight. Smaller tiles make
the products slower, larger ones need more memory. In float32, both signs of OPT-125M's largest matrices fit into one
tile, whose product is written contiguously."""


class DenseInForward(MovingParameter):
    """A matrix with dense directions, perturbed inside the forward of its modules.

    On a CPU the products are computed in float32 or wider: W + rho Z is not rounded to half precision, and CPUs without
    half-precision instructions multiply float32 faster. On other devices they are computed in the weight's dtype.
    """

    in_blocks = True
    draws_for_all_blocks = True
    layouts: ClassVar[tuple[Layout, ...]] = ("linear", "transposed", "embedding")
    """The layouts whose product or lookup can be replaced."""

    def __init__(self, target: Target, blocks: Blocks) -> None:
        require_writable(target, "this method")
        super().__init__(target)
        self._blocks = blocks
        self._shifts: tuple[Shift, ...] = ()
        self._scales_G11 = torch.empty(0)
        on_cpu = target.parameter.device.type == "cpu"
        self._dtype = target.state_dtype if on_cpu else target.parameter.dtype
        replacements: dict[Layout | None, dict[object, Replacement]] = {
            "linear": {LINEAR: self._linear},
            "transposed": {ADDMM: self._transposed},
            "embedding": {EMBEDDING: self._lookup},
        }
        self._handles += [
            Interception(site.module, replacements[site.layout], lambda: bool(self._shifts)) for site in target.sites
        ]

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        self._shifts = tuple(shifts)
        scales = [shift.scale for shift in shifts]
        self._scales_G11 = torch.tensor(scales, dtype=self._dtype, device=self.weight.device).view(-1, 1, 1)

    @unintercepted
    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # out[:, rows] = x (W + scale Z)[rows]^T
        out_GTM = tiled_linear(self._split(x), bias, weight.shape[0], self._tiles())
        return out_GTM.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    @unintercepted
    def _transposed(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        # out = sum over tiles of x[:, rows] (W + scale Z)[rows]
        del weight
        width = self.target.stored_shape[1]
        return tiled_transposed(self._split(x), bias, self._tiles()).view(*x.shape[:-1], width).to(x.dtype)

    @unintercepted
    def _lookup(self, ids: Tensor, *others: Any, **options: Any) -> Tensor:
        output: Tensor = EMBEDDING(ids, *others, **options)
        ids_GT = self._blocks.split(ids, len(self._shifts), 0)
        out_GTN = output.view(*ids_GT.shape, output.shape[-1])
        for rows in self.row_tiles():
            in_tile_GT = (ids_GT >= rows.start) & (ids_GT < rows.stop)
            if in_tile_GT.any():
                drawn = self._draw(rows)
                for g, shift in enumerate(self._shifts):
                    z = drawn[id(shift.direction)][ids_GT[g][in_tile_GT[g]] - rows.start]
                    out_GTN[g, in_tile_GT[g]] += (z * shift.scale).to(output.dtype)
        return output

    def _split(self, x: Tensor) -> Tensor:
        return self._blocks.split(x, len(self._shifts), 1).to(self._dtype)

    def _tiles(self) -> Tiles:
        """Yields (rows, g, (W + scale_g Z_g)[rows]): large tiles, for fast products, filled from smaller draws."""
        width, count = self.target.stored_shape[1], len(self._shifts)
        most = PRODUCT_ENTRIES * self.weight.element_size() // (count * width)
        for parts in _groups(self.row_tiles(), most):
            rows = slice(parts[0].start, parts[-1].stop)
            moved_GTN = scratch("moved", (count, rows.stop - rows.start, width), self._dtype, self.weight.device)
            for part in parts:
                self._fill(moved_GTN[:, part.start - rows.start : part.stop - rows.start], part)
            for g in range(count):
                yield rows, g, moved_GTN[g]

    def _fill(self, moved_GTN: Tensor, rows: slice) -> None:
        base = self.weight[rows]
        if base.dtype != self._dtype:
            base = scratch("base", tuple(base.shape), self._dtype, base.device).copy_(base)
        drawn = self._draw(rows)
        if len(drawn) == 1:  # all blocks have the same Z: one operation fills them all
            (z,) = drawn.values()
            torch.addcmul(base, z, self._scales_G11, out=moved_GTN)
            return
        for moved, shift in zip(moved_GTN, self._shifts, strict=True):
            torch.add(base, drawn[id(shift.direction)], alpha=shift.scale, out=moved)

    def _draw(self, rows: slice) -> dict[int, Tensor]:
        """id(direction) -> Z[rows], for every direction of the current perturbations."""
        self.was_called = True
        directions = {id(shift.direction): shift.direction for shift in self._shifts}
        return {key: _tile(direction, rows).to(self._dtype) for key, direction in directions.items()}


def _groups(tiles: Iterable[slice], most: int) -> Iterator[list[slice]]:
    """Groups of adjacent tiles with at most about `most` rows each: as few groups as possible, of similar size."""
    tiles = list(tiles)
    total = tiles[-1].stop
    count = -(-total // max(1, most))
    for _, group in itertools.groupby(tiles, lambda tile: tile.start * count // total):
        yield list(group)


def _tile(direction: Direction, rows: slice) -> Tensor:
    assert isinstance(direction, Dense)
    return direction.tile(rows)
