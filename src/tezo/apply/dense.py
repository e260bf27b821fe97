"""Dense directions in the forward pass: a tile of W + rho Z at a time, made, used and thrown away.

W is read, never moved, so nothing drifts in half precision, and Z is drawn once for all the blocks of a pass:
a two-point step draws it twice, once for both signs and once for the update. No temporary is larger than a
few tiles.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tezo.apply.base import MovingParameter, Shift, require_writable
from tezo.apply.blocks import Blocks
from tezo.apply.interception import ADDMM, EMBEDDING, LINEAR, Interception, Replacement
from tezo.directions import Dense, Direction
from tezo.params import Layout, Target
from tezo.scratch import scratch


class DenseInForward(MovingParameter):
    """A matrix along dense directions, perturbed as its modules use it.

    On a CPU the products are taken in float32 at least: W + rho Z is not rounded to half precision, and CPUs
    without half-precision instructions multiply float32 faster. Elsewhere they are taken in the weight's dtype.
    """

    in_blocks = True
    draws_for_all_blocks = True

    def __init__(self, target: Target, blocks: Blocks) -> None:
        super().__init__(target)
        require_writable(target, "this method")
        self._blocks = blocks
        self._shifts: tuple[Shift, ...] = ()
        on_cpu = target.parameter.device.type == "cpu"
        self._dtype = target.state_dtype if on_cpu else target.parameter.dtype
        replacements: dict[Layout | None, dict[object, Replacement]] = {
            "linear": {LINEAR: self._linear},
            "transposed": {ADDMM: self._transposed},
            "embedding": {EMBEDDING: self._lookup},
        }
        self._handles += [
            Interception(site.module, target.parameter, replacements[site.layout], lambda: bool(self._shifts))
            for site in target.sites
        ]

    def show(self, shifts: Sequence[Shift]) -> None:
        self._shifts = tuple(shifts)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # out[:, rows] = x (W + scale Z)[rows]^T
        x_GTN = self._split(x)
        out_GTM = x_GTN.new_empty(*x_GTN.shape[:2], weight.shape[0])
        for rows, g, moved in self._tiles():
            torch.mm(x_GTN[g], moved.T, out=out_GTM[g, :, rows])
        out = out_GTM.view(*x.shape[:-1], -1)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def _transposed(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        # out = sum over tiles of x[:, rows] (W + scale Z)[rows]
        x_GTM = self._split(x)
        out_GTN = bias.to(self._dtype).expand(*x_GTM.shape[:2], weight.shape[1]).clone()
        for rows, g, moved in self._tiles():
            out_GTN[g].addmm_(x_GTM[g][:, rows], moved)
        return out_GTN.view(*x.shape[:-1], -1).to(x.dtype)

    def _lookup(self, ids: Tensor, *others: Any, **options: Any) -> Tensor:
        output: Tensor = EMBEDDING(ids, *others, **options)
        ids_GT = self._blocks.split(ids, len(self._shifts), 0)
        out_GTN = output.view(*ids_GT.shape, -1)
        for rows in self.row_tiles():
            met_GT = (ids_GT >= rows.start) & (ids_GT < rows.stop)
            if met_GT.any():
                drawn = self._draw(rows)
                for g, shift in enumerate(self._shifts):
                    z = drawn[id(shift.direction)][ids_GT[g][met_GT[g]] - rows.start]
                    out_GTN[g, met_GT[g]] += (z * shift.scale).to(output.dtype)
        return output

    def _split(self, x: Tensor) -> Tensor:
        return self._blocks.split(x, len(self._shifts), 1).to(self._dtype)

    def _tiles(self) -> Iterator[tuple[slice, int, Tensor]]:
        """(rows, g, (W + scale_g Z_g)[rows]) for every tile and block; the tensor is overwritten by the next."""
        for rows in self.row_tiles():
            base = self.weight[rows]
            moved = scratch("moved", tuple(base.shape), self._dtype, base.device)
            if base.dtype != self._dtype:
                base = scratch("base", tuple(base.shape), self._dtype, base.device).copy_(base)
            drawn = self._draw(rows)
            for g, shift in enumerate(self._shifts):
                yield rows, g, torch.add(base, drawn[id(shift.direction)], alpha=shift.scale, out=moved)

    def _draw(self, rows: slice) -> dict[int, Tensor]:
        """Z[rows] of every direction that is shown, by its id."""
        directions = {id(shift.direction): shift.direction for shift in self._shifts}
        return {key: _tile(direction, rows).to(self._dtype) for key, direction in directions.items()}


def _tile(direction: Direction, rows: slice) -> Tensor:
    assert isinstance(direction, Dense)
    return direction.tile(rows)
