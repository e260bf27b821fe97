"""Dense directions in the forward pass: W + rho Z is computed tile by tile and never stored as a whole.

W is read but not written, so it does not drift in half precision. Z is drawn once for all blocks of a pass: a two-point
step with both signs in one pass draws it twice, once for the evaluations and once for the update. The temporaries are
tiles of Z, and a tile of W + rho Z for every block.

bfloat16 weights on a CPU that multiplies bfloat16 are treated in one of two ways. With few rows of inputs the weight is
multiplied as it is, and rho times a product with Z is added. With more rows two products take longer than making
W + rho Z, which is then rounded stochastically: rounded to nearest it would be W wherever rho is far below the spacing.

Biases and norm weights in the forward pass: the stored vector is read, not written by perturbations.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from tezo.directions.products import (
    SharedTiles,
    Tiles,
    add_tiled_linear_,
    add_tiled_transposed_,
    multiplies_bfloat16,
    scratch,
    tiled_linear,
    tiled_transposed,
)
from tezo.directions.random import generator
from tezo.directions.spaces import Dense
from tezo.directions.targets import Layout, Site, Target, only_input
from tezo.forward import rounding
from tezo.forward.blocks import Blocks
from tezo.forward.interception import ADDMM, EMBEDDING, LINEAR, Interception, Replacement, unintercepted, untraced
from tezo.forward.moving_parameter import MovingParameter, Shift, require_writable

PRODUCT_ENTRIES = 5 << 18
"""Entries of the perturbed tiles of all blocks together, for each byte of an entry of the weight. Smaller tiles make
the products slower, larger ones need more memory. In float32, both signs of OPT-125M's largest matrices fit into one
tile, whose product is written contiguously."""

FEW_ROWS = 160
"""Largest number of input rows for which bfloat16 products with W and Z are computed separately."""


class DenseInForward(MovingParameter):
    """A matrix with dense directions, perturbed inside the forward of its modules.

    On a CPU without instructions for the weight's dtype the products are computed in float32 or wider, which is faster,
    and W + rho Z is not rounded to half precision. Elsewhere they are computed in the weight's dtype.
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
        self._in_bfloat16 = multiplies_bfloat16(target.parameter)
        widens = target.parameter.device.type == "cpu" and not self._in_bfloat16
        self._dtype = target.state_dtype if widens else target.parameter.dtype
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
        if self._adds_products(x):
            out: Tensor = LINEAR(x, weight, bias).contiguous()
            add_tiled_linear_(self._split(out), self._scaled(x), self._shifts[0].scale, self._noise_tiles())
            return out
        # out[:, rows] = x (W + scale Z)[rows]^T
        out_GTM = tiled_linear(self._split(x), bias, weight.shape[0], self._tiles())
        return out_GTM.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    @unintercepted
    def _transposed(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if self._adds_products(x):
            out: Tensor = ADDMM(bias, x, weight).contiguous()
            add_tiled_transposed_(self._split(out), self._scaled(x), self._shifts[0].scale, self._noise_tiles())
            return out
        # out = sum over tiles of x[:, rows] (W + scale Z)[rows]
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
                drawn = self._draw(rows, self.target.state_dtype)
                for g, shift in enumerate(self._shifts):
                    z = drawn[id(shift.direction)][ids_GT[g][in_tile_GT[g]] - rows.start]
                    out_GTN[g, in_tile_GT[g]] += (z * shift.scale).to(output.dtype)
        return output

    def _split(self, x: Tensor) -> Tensor:
        return self._blocks.split(x, len(self._shifts), 1).to(self._dtype)

    def _adds_products(self, x: Tensor) -> bool:
        return self._in_bfloat16 and x.dtype == self._dtype and x.numel() <= FEW_ROWS * x.shape[-1]

    def _scaled(self, x: Tensor) -> Tensor:
        # X_g scale_g / scale_0: one product serves all blocks with the same Z; exact for both signs of one rho
        return self._split(x) * (self._scales_G11 / self._scales_G11[0])

    def _tiles(self) -> Tiles:
        """Yields (rows, g, (W + scale_g Z_g)[rows])."""
        count, fill = len(self._shifts), self._fill_rounded if self._in_bfloat16 else self._fill
        for rows, moved_GTN in self._large_tiles(count, fill):
            for g in range(count):
                yield rows, g, moved_GTN[g]

    def _noise_tiles(self) -> SharedTiles:
        """Yields (rows, blocks, Z_g[rows])."""
        own = [id(shift.direction) for shift in self._shifts]
        drawn = list(self._directions())
        for rows, z_DTN in self._large_tiles(len(drawn), self._fill_noise):
            for direction, run in itertools.groupby(range(len(own)), own.__getitem__):
                first, *others = run
                yield rows, slice(first, first + 1 + len(others)), z_DTN[drawn.index(direction)]

    def _large_tiles(self, count: int, fill: Callable[[Tensor, slice], None]) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, `count` tiles of these rows): large tiles, for fast products, filled from smaller draws."""
        width = self.target.stored_shape[1]
        most = PRODUCT_ENTRIES * self.weight.element_size() // (count * width)
        for parts in _groups(self.row_tiles(), most):
            rows = slice(parts[0].start, parts[-1].stop)
            tiles = scratch("moved", (count, rows.stop - rows.start, width), self._dtype, self.weight.device)
            for part in parts:
                fill(tiles[:, part.start - rows.start : part.stop - rows.start], part)
            yield rows, tiles

    def _fill_noise(self, z_DTN: Tensor, rows: slice) -> None:
        self.was_called = True
        for z, direction in zip(z_DTN, self._directions().values(), strict=True):
            direction.fill_(z, rows)

    def _fill_rounded(self, moved_GTN: Tensor, rows: slice) -> None:
        wide = self.target.state_dtype
        base, exact = scratch("base", (2, *moved_GTN.shape[1:]), wide, self.weight.device)
        base.copy_(self.weight[rows])
        drawn, name = self._draw(rows, wide), self.target.name
        key, device = self._key, self.weight.device
        noise = generator(device, seed=key.seed, step=key.step, name=name, role=f"perturbed.{rows.start}")
        for moved, shift in zip(moved_GTN, self._shifts, strict=True):
            torch.add(base, drawn[id(shift.direction)], alpha=shift.scale, out=exact)
            rounding.store_(moved, exact, noise.clone_state())  # the same noise as in a pass of its own

    def _fill(self, moved_GTN: Tensor, rows: slice) -> None:
        base = self.weight[rows]
        if base.dtype != self._dtype:
            base = scratch("base", tuple(base.shape), self._dtype, base.device).copy_(base)
        drawn = self._draw(rows, self._dtype)
        if len(drawn) == 1:  # all blocks have the same Z: one operation fills them all
            (z,) = drawn.values()
            torch.addcmul(base, z, self._scales_G11, out=moved_GTN)
            return
        for moved, shift in zip(moved_GTN, self._shifts, strict=True):
            torch.add(base, drawn[id(shift.direction)], alpha=shift.scale, out=moved)

    def _draw(self, rows: slice, dtype: torch.dtype) -> dict[int, Tensor]:
        """id(direction) -> Z[rows], for every direction of the current perturbations."""
        self.was_called = True
        return {key: direction.tile(rows).to(dtype) for key, direction in self._directions().items()}

    def _directions(self) -> dict[int, Dense]:
        """id(direction) -> direction, for the current perturbations."""
        directions: dict[int, Dense] = {}
        for shift in self._shifts:
            assert isinstance(shift.direction, Dense)
            directions[id(shift.direction)] = shift.direction
        return directions


def _groups(tiles: Iterable[slice], most: int) -> Iterator[list[slice]]:
    """Groups of adjacent tiles with at most about `most` rows each: as few groups as possible, of similar size."""
    tiles = list(tiles)
    total = tiles[-1].stop
    count = -(-total // max(1, most))
    for _, group in itertools.groupby(tiles, lambda tile: tile.start * count // total):
        yield list(group)


class VectorInForward(MovingParameter):
    """A vector whose effect on its module's output is known: the effect of a perturbation is added to the output.

    A perturbation of 1e-3 is lost when it is added to a bfloat16 weight near 1, whose neighbours are 2^-8 away. Here it
    is applied in float32 and only the output is rounded.
    """

    in_blocks = True

    def __init__(self, target: Target, blocks: Blocks) -> None:
        require_writable(target, "training 1-D parameters")
        super().__init__(target)
        self._blocks = blocks
        self._shift_GN: Tensor | None = None
        self._handles += [self._hook(site) for site in target.sites]

    def _hook(self, site: Site) -> RemovableHandle:
        assert site.layout is not None
        perturbed = _PERTURBED[site.layout]

        @unintercepted
        def move(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            if self._shift_GN is None:
                return output
            self.was_called = True
            count = self._shift_GN.shape[0]
            x = only_input(args, kwargs)
            x_GTK, out_GTN = (self._blocks.split(values, count, 1) for values in (x, output))
            moved = perturbed(module, x_GTK, out_GTN, self._shift_GN.unsqueeze(1))
            return moved.to(output.dtype).view(output.shape)

        return site.module.register_forward_hook(untraced(move), with_kwargs=True)

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        moved = [_vectors(shift) * shift.scale for shift in shifts]
        self._shift_GN = torch.cat(moved) if moved else None


def _vectors(shift: Shift) -> Tensor:
    assert isinstance(shift.direction, Dense)
    return shift.direction.vectors(shift.examples)


def _bias(module: nn.Module, x: Tensor, out: Tensor, shift: Tensor) -> Tensor:
    """Out + d."""
    del module, x
    return out + shift


def _layer_norm(module: nn.Module, x: Tensor, out: Tensor, shift: Tensor) -> Tensor:
    """Out + d * (x - mean) / sqrt(var + eps)."""
    assert isinstance(module, nn.LayerNorm)
    return out + functional.layer_norm(x.to(shift.dtype), module.normalized_shape, eps=module.eps) * shift


def _norm(module: nn.Module, x: Tensor, out: Tensor, shift: Tensor) -> Tensor:
    """Recomputes the norm of each block with the perturbed weight, because modules use the weight in different ways."""
    del out
    parameter = module.get_parameter("weight")
    stored = parameter.data
    try:
        moved = []
        for x_TN, shift_1N in zip(x, shift, strict=True):
            parameter.data = stored + shift_1N[0]
            moved.append(module.forward(x_TN))
    finally:
        parameter.data = stored
    return torch.stack(moved)


_PERTURBED: dict[Layout, Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]] = {
    "bias": _bias,
    "layer_norm": _layer_norm,
    "norm": _norm,
}
