"""Sparse-MeZO's perturbation: noise for the small entries of each parameter, zero for the large ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tezo.directions.perturbations.perturbation import DrawKey, Perturbation, dense
from tezo.directions.spaces import Dense, row_tiles
from tezo.directions.targets import Target
from tezo.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class MaskedNoise(Dense):
    """z with zeros where the mask has zeros; `masks` has the mask of each tile, packed into bits."""

    masks: Mapping[int, Tensor]

    def fill_(self, out: Tensor, rows: slice) -> Tensor:
        mask = unpacked(self.masks[rows.start], out.numel())
        return super().fill_(out, rows).mul_(mask.view(out.shape))


class SmallEntries(Perturbation):
    """Draws `MaskedNoise` with the mask m_ij = 1 where |w_ij| <= h.

    h is the (1 - sparsity) quantile of |w| over the parameter, before the first step; the mask is that of the weights
    at the start of each step.

    Args:
        sparsity: part of each parameter's entries above h at the start, which are neither perturbed nor trained.

    Raises:
        RequestError: the sparsity is out of range; raised by `prepare`, too, for weights that cannot be read.
    """

    draws = MaskedNoise

    def __init__(self, sparsity: float) -> None:
        if not 0 <= sparsity < 1:
            raise RequestError(f"method.sparsity is {sparsity}; it must be at least 0 and below 1.")
        self.sparsity = sparsity
        self._bounds: dict[str, float] = {}

    def prepare(self, targets: Sequence[Target]) -> None:
        for target in targets:
            if not target.is_writable:
                raise RequestError(
                    f"this method chooses entries by their size, and {target.name} ({target.parameter.dtype}) cannot "
                    "be written in place; use lozo-adam, tezo or a plain float base."
                )
        self._bounds = {target.name: small_bound(target.parameter.data, self.sparsity) for target in targets}

    def state(self) -> dict[str, Tensor]:
        return {f"bound/{name}": torch.tensor(bound, dtype=torch.float64) for name, bound in self._bounds.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._bounds |= {key.removeprefix("bound/"): float(value) for key, value in state.items()}

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> MaskedNoise:
        del state
        weight, bound = target.parameter.data.view(target.stored_shape), self._bounds[target.name]
        masks = {rows.start: packed(weight[rows].abs() <= bound) for rows in row_tiles(target.stored_shape)}
        return MaskedNoise(**vars(dense(target, key)), masks=masks)


def small_bound(weight: Tensor, sparsity: float) -> float:
    """The bound h between the entries that are small and the others, half way between the two nearest; inf for all."""
    sizes = weight.flatten().abs().to(torch.promote_types(weight.dtype, torch.float32))
    count = sizes.numel() - int(sparsity * sizes.numel())
    if count == sizes.numel():
        return float("inf")
    return (float(sizes.kthvalue(count).values) + float(sizes.kthvalue(count + 1).values)) / 2


def packed(mask: Tensor) -> Tensor:
    """The bits of a boolean tensor in its order, eight to a byte: (ceil(entries / 8),), uint8."""
    flat = mask.flatten().to(torch.uint8)
    bits = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (bits << _places(bits)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, count: int) -> Tensor:
    """The first `count` bits of a `packed` tensor: (count,), bool."""
    return (bits.unsqueeze(1) >> _places(bits) & 1).flatten()[:count].bool()


def _places(bits: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=bits.device)
