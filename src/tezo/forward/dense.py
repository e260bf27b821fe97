"""Dense directions in the forward pass: the stored tensor is read but not written, so it does not drift.

W + rho Z is computed tile by tile and never stored as a whole. Z is drawn once for all blocks of a pass: a two-point
step with both signs in one pass draws it twice, once for the evaluations and once for the update. The temporaries are
tiles of Z, and a tile of W + rho Z for every block.

bfloat16 weights on a CPU that multiplies bfloat16 are treated in one of two ways. With few rows of inputs the weight is
multiplied as it is, and rho times a product with Z is added. With more rows two products take longer than making
W + rho Z, which is then rounded stochastically: rounded to nearest it would be W wherever rho is far below the spacing.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from tezo.directions import spaces
from tezo.directions.products import multiplies_bfloat16
from tezo.directions.random import generator
from tezo.directions.scratch import row_slices, scratch
from tezo.directions.spaces import Dense, SignedDense, row_tiles
from tezo.directions.targets import Layout, Site, Target, only_input
from tezo.forward import rounding
from tezo.forward.blocks import Blocks
from tezo.forward.interception import ADDMM, EMBEDDING, LINEAR, Interception, untraced
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift, require_writable

PRODUCT_ENTRIES = 5 << 18
"""Entries of the perturbed tiles of all blocks together, for each byte of an entry of the weight. Smaller tiles make
the products slower, larger ones need more memory. In float32, both signs of OPT-125M's largest matrices fit into one
tile, whose product is written contiguously."""

FEW_ROWS = 160
"""Largest number of input rows for which bfloat16 products with W and Z are computed separately."""


class DenseInForward(PerturbedParameter):
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
        self._directions: dict[int, Dense] = {}
        self._scales_G11 = torch.empty(0)
        self._in_bfloat16 = multiplies_bfloat16(target.parameter)
        widens = target.parameter.device.type == "cpu" and not self._in_bfloat16
        self._dtype = target.state_dtype if widens else target.parameter.dtype
        replacements: dict[Any, Callable[..., Tensor]] = {
            LINEAR: self._linear,
            ADDMM: self._transposed,
            EMBEDDING: self._lookup,
        }
        self._handles += [Interception(site.module, replacements, lambda: bool(self.shifts)) for site in target.sites]

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        self.shifts, self._directions = tuple(shifts), {}
        for shift in shifts:
            assert isinstance(shift.direction, Dense)
            self._directions[id(shift.direction)] = shift.direction
        scales = [shift.scale for shift in shifts]
        self._scales_G11 = torch.tensor(scales, dtype=self._dtype, device=self.weight.device).view(-1, 1, 1)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with torch._C.DisableTorchFunction():  # it saves its overhead on every call of torch in here
            x_GTN = self._split(x)
            if self._adds_products(x):
                out: Tensor = LINEAR(x, weight, bias).contiguous()
                out_GTM, x_GTN = self._split(out), x_GTN * self._relative_scales
                for rows, blocks, z in self._noise_tiles():
                    # out[:, rows] += scale x Z[rows]^T
                    part = out_GTM[blocks].flatten(0, 1)[:, rows]
                    part.addmm_(x_GTN[blocks].flatten(0, 1), z.T, alpha=self.shifts[0].scale)
                return out
            out_GTM = x_GTN.new_empty(*x_GTN.shape[:2], weight.shape[0])
            for rows, moved_GRN in self._moved_tiles():
                for g, moved in enumerate(moved_GRN):
                    # out[:, rows] = x (W + scale Z)[rows]^T
                    torch.mm(x_GTN[g], moved.T, out=out_GTM[g, :, rows])
            if bias is not None:
                out_GTM.add_(bias)
            return out_GTM.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    def _transposed(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            x_GTM = self._split(x)
            if self._adds_products(x):
                out: Tensor = ADDMM(bias, x, weight).contiguous()
                out_GTN, x_GTM = self._split(out), x_GTM * self._relative_scales
                for rows, blocks, z in self._noise_tiles():
                    # out += scale x[:, rows] Z[rows]
                    part = x_GTM[blocks].flatten(0, 1)[:, rows]
                    out_GTN[blocks].flatten(0, 1).addmm_(part, z, alpha=self.shifts[0].scale)
                return out
            out_GTN = bias.to(x_GTM.dtype).expand(*x_GTM.shape[:2], -1).clone()
            for rows, moved_GRN in self._moved_tiles():
                for g, moved in enumerate(moved_GRN):
                    # out = bias + sum over tiles of x[:, rows] (W + scale Z)[rows]
                    out_GTN[g].addmm_(x_GTM[g][:, rows], moved)
            return out_GTN.view(*x.shape[:-1], weight.shape[1]).to(x.dtype)

    def _lookup(self, ids: Tensor, *others: Any, **options: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            output: Tensor = EMBEDDING(ids, *others, **options)
            ids_GT = self._blocks.split(ids, len(self.shifts), 0)
            out_GTN = output.view(*ids_GT.shape, output.shape[-1])
            self.was_called = True
            for rows in row_tiles(self.target.stored_shape, self.weight.device):
                in_tile_GT = (ids_GT >= rows.start) & (ids_GT < rows.stop)
                if in_tile_GT.any():
                    for key, direction in self._directions.items():
                        z_TN = direction.fill_(direction.buffer(rows, direction.role), rows)
                        for g, shift in enumerate(self.shifts):
                            if id(shift.direction) == key:
                                z = z_TN[ids_GT[g][in_tile_GT[g]] - rows.start]
                                out_GTN[g, in_tile_GT[g]] += (z * shift.scale).to(output.dtype)
            return output

    def _split(self, x: Tensor) -> Tensor:
        return self._blocks.split(x, len(self.shifts), 1).to(self._dtype)

    def _adds_products(self, x: Tensor) -> bool:
        return self._in_bfloat16 and x.dtype == self._dtype and x.numel() <= FEW_ROWS * x.shape[-1]

    @property
    def _relative_scales(self) -> Tensor:
        """scale_g / scale_0: one product serves all blocks with the same Z; exact for both signs of one rho."""
        return self._scales_G11 / self._scales_G11[0]

    def _noise_tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields (rows, blocks, Z_g[rows]), the same for all these blocks."""
        keys, drawn = [id(shift.direction) for shift in self.shifts], list(self._directions)
        self.was_called = True
        for parts, rows, z_DRN in self._groups(len(drawn)):
            for part in parts:
                for z, direction in zip(z_DRN, self._directions.values(), strict=True):
                    direction.fill_(z[part.start - rows.start : part.stop - rows.start], part)
            for key, run in itertools.groupby(range(len(keys)), keys.__getitem__):
                first, *others = run
                yield rows, slice(first, first + 1 + len(others)), z_DRN[drawn.index(key)]

    def _moved_tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, (W + scale_g Z_g)[rows] for each block g): large tiles, for fast products, of smaller draws."""
        self.was_called = True
        dtype = self.target.state_dtype if self._in_bfloat16 else self._dtype
        for parts, rows, tiles_GRN in self._groups(len(self.shifts)):
            for part in parts:
                moved_GTN = tiles_GRN[:, part.start - rows.start : part.stop - rows.start]
                base = self.weight[part]
                if base.dtype != dtype:
                    base = scratch("base", tuple(base.shape), dtype, base.device).copy_(base)
                drawn = {}
                for key, direction in self._directions.items():
                    z = direction.fill_(direction.buffer(part, direction.role), part).to(dtype)
                    drawn[key] = z
                if self._in_bfloat16:
                    self._round(moved_GTN, base, drawn, part)
                elif len(drawn) == 1:  # all blocks have the same Z: one operation fills them all
                    torch.addcmul(base, z, self._scales_G11, out=moved_GTN)
                else:
                    for moved, shift in zip(moved_GTN, self.shifts, strict=True):
                        torch.add(base, drawn[id(shift.direction)], alpha=shift.scale, out=moved)
            yield rows, tiles_GRN

    def _round(self, moved_GTN: Tensor, base: Tensor, drawn: dict[int, Tensor], rows: slice) -> None:
        exact = scratch("moved exactly", tuple(base.shape), base.dtype, base.device)
        key, role = self.key, f"perturbed.{rows.start}"
        noise = generator(base.device, seed=key.seed, step=key.step, name=self.target.name, role=role)
        for moved, shift in zip(moved_GTN, self.shifts, strict=True):
            torch.add(base, drawn[id(shift.direction)], alpha=shift.scale, out=exact)
            rounding.store_(moved, exact, noise.clone_state())  # the same noise as in a separate pass

    def _groups(self, count: int) -> Iterator[tuple[list[slice], slice, Tensor]]:
        """Yields (adjacent tiles, their rows together, memory for `count` tiles of these rows)."""
        shape, tile = self.target.stored_shape, spaces.tile_entries(self.weight.device)
        for parts in grouped(shape, tile, PRODUCT_ENTRIES * self.weight.element_size() // (count * shape[1])):
            rows = slice(parts[0].start, parts[-1].stop)
            buffer = count, rows.stop - rows.start, shape[1]
            yield parts, rows, scratch("moved", buffer, self._dtype, self.weight.device)


@functools.lru_cache(maxsize=256)
def grouped(shape: tuple[int, ...], tile: int, most: int) -> list[list[slice]]:
    """Groups the tiles of a matrix, of at most `tile` entries, into as few groups of about `most` rows as possible."""
    count = -(-shape[0] // max(1, most))
    tiles = row_slices(shape, tile)
    return [list(group) for _, group in itertools.groupby(tiles, lambda rows: rows.start * count // shape[0])]


class SignedInForward(DenseInForward):
    """A matrix with a dense direction of each example, perturbed inside the forward of its modules.

    With Z_i = diag(r_i) Z diag(s_i) the effect of all B perturbations is one product with Z more, tile by tile:

        x_i (W + scale_i Z_i)^T = x_i W^T + scale_i r_i * ((s_i * x_i) Z^T).
    """

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        super().set_perturbations(shifts)
        if not shifts:
            return
        (z,) = self._directions.values()  # one direction a pass, of many examples
        assert isinstance(z, SignedDense)
        self._z = z
        examples = [example for shift in shifts for example in shift.examples]
        scales = [shift.scale for shift in shifts for _ in shift.examples]
        left_GM, right_GN = self._z.signs(examples)
        self._scales_G11 = torch.tensor(scales, dtype=self._dtype, device=self.weight.device).view(-1, 1, 1)
        self._left_G1M = left_GM.to(self._dtype).unsqueeze(1) * self._scales_G11
        self._right_G1N = right_GN.to(self._dtype).unsqueeze(1)

    def _split(self, x: Tensor) -> Tensor:
        return self._blocks.split(x, len(self._scales_G11), 1).to(self._dtype)

    def _tiles(self) -> Iterator[tuple[slice, Tensor]]:
        self.was_called = True
        for rows in row_tiles(self.target.stored_shape, self.weight.device):
            yield rows, self._z.fill_(self._z.buffer(rows, self._z.role), rows).to(self._dtype)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with torch._C.DisableTorchFunction():
            out: Tensor = LINEAR(x, weight, bias)
            out_GTM, x_GTN = self._split(out), self._split(x) * self._right_G1N
            moved = [x_GTN @ z_RN.T for _, z_RN in self._tiles()]
            return torch.addcmul(out_GTM, torch.cat(moved, -1), self._left_G1M).to(x.dtype).view(out.shape)

    def _transposed(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            out: Tensor = ADDMM(bias, x, weight)
            out_GTN, x_GTM = self._split(out), self._split(x) * self._left_G1M
            moved_GTN = torch.zeros_like(out_GTN)
            for rows, z_RN in self._tiles():
                moved_GTN += x_GTM[..., rows] @ z_RN
            return torch.addcmul(out_GTN, moved_GTN, self._right_G1N).to(x.dtype).view(out.shape)

    def _lookup(self, ids: Tensor, *others: Any, **options: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            output: Tensor = EMBEDDING(ids, *others, **options)
            ids_GT = self._blocks.split(ids, len(self._scales_G11), 0)
            out_GTN, left_GM = self._split(output), self._left_G1M.squeeze(1)
            moved_GTN = torch.zeros_like(out_GTN)
            for rows, z_RN in self._tiles():
                in_tile_GT = (ids_GT >= rows.start) & (ids_GT < rows.stop)
                moved_GTN[in_tile_GT] = z_RN[ids_GT[in_tile_GT] - rows.start]
            moved_GTN *= torch.take_along_dim(left_GM, ids_GT, 1).unsqueeze(-1)
            return torch.addcmul(out_GTN, moved_GTN, self._right_G1N).to(output.dtype).view(output.shape)


class VectorInForward(PerturbedParameter):
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
        def move(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            if self._shift_GN is None:
                return output
            self.was_called = True
            with torch._C.DisableTorchFunction():
                count, shift_G1N = self._shift_GN.shape[0], self._shift_GN.unsqueeze(1)
                x_GTK = self._blocks.split(only_input(args, kwargs), count, 1)
                moved = self._blocks.split(output, count, 1)
                if site.layout == "bias":
                    moved = moved + shift_G1N
                elif isinstance(module, nn.LayerNorm):
                    # out + d * (x - mean) / sqrt(var + eps)
                    x_GTK = x_GTK.to(shift_G1N)  # not moved yet, where this module is the first on its device
                    moved = moved + functional.layer_norm(x_GTK, module.normalized_shape, eps=module.eps) * shift_G1N
                else:
                    moved = _norm(module, x_GTK, shift_G1N)
                return moved.to(output.dtype).view(output.shape)

        return site.module.register_forward_hook(untraced(move), with_kwargs=True)

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        moved = []
        for shift in shifts:
            assert isinstance(shift.direction, Dense)
            moved.append(shift.direction.vectors(shift.examples) * shift.scale)
        self._shift_GN = torch.cat(moved) if moved else None


def _norm(module: nn.Module, x: Tensor, shift: Tensor) -> Tensor:
    """Computes the norm of each block with the perturbed weight, because modules use the weight in different ways."""
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
