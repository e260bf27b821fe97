"""Sparse-MeZO: noise on the entries of each parameter that are small in magnitude."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from tezo.directions.perturbation import Perturbation, dense
from tezo.directions.random import DrawKey, fill_normal_
from tezo.directions.spaces import Dense, row_tiles
from tezo.directions.targets import Target
from tezo.optim.method import Method
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import SGD
from tezo.system.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class MaskedNoise(Dense):
    """z with zeros where the mask has zeros; `masks` has the mask of each tile, packed into bits."""

    masks: Mapping[int, Tensor]

    def fill_(self, out: Tensor, rows: slice) -> Tensor:
        mask = unpacked(self.masks[rows.start], out.numel())
        return fill_normal_(out, **self.key(rows, self.role)).mul_(mask.view(out.shape))


class SmallEntries(Perturbation):
    """Sparse-MeZO's perturbation: draws `MaskedNoise` with the mask m_ij = 1 where |w_ij| <= h.

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
                    "be written in place; use head-feedback, tezo or a plain float base."
                )
        self._bounds = {}  # measured by the first refresh: of a large model that takes seconds

    def state(self) -> dict[str, Tensor]:
        return {f"bound/{name}": torch.tensor(bound, dtype=torch.float64) for name, bound in self._bounds.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        start = "bound/"
        self._bounds |= {key.removeprefix(start): float(v) for key, v in state.items() if key.startswith(start)}

    def refresh(self, target: Target, key: DrawKey) -> None:
        del key
        if target.name not in self._bounds:  # nothing has been written yet
            self._bounds[target.name] = small_bound(target.parameter.data, self.sparsity)

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> MaskedNoise:
        del state
        known = self._bounds.get(target.name)
        bound = small_bound(target.parameter.data, self.sparsity) if known is None else known
        weight = target.parameter.data.view(target.stored_shape)
        tiles = row_tiles(target.stored_shape, weight.device)
        masks = {rows.start: packed(weight[rows].abs() <= bound) for rows in tiles}
        return MaskedNoise(**vars(dense(target, key)), masks=masks)


def small_bound(weight: Tensor, sparsity: float) -> float:
    """Returns the bound h between the small entries and the others, half way between the two nearest; inf for all."""
    sizes = weight.flatten().abs().to(torch.promote_types(weight.dtype, torch.float32))
    count = sizes.numel() - int(sparsity * sizes.numel())
    if count == sizes.numel():
        return float("inf")
    return (float(sizes.kthvalue(count).values) + float(sizes.kthvalue(count + 1).values)) / 2


def packed(mask: Tensor) -> Tensor:
    """Packs a boolean tensor into bits in its order, eight to a byte: (ceil(entries / 8),), uint8."""
    flat = mask.flatten().to(torch.uint8)
    bits = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (bits << _places(bits)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, count: int) -> Tensor:
    """Returns the first `count` bits of a `packed` tensor: (count,), bool."""
    return (bits.unsqueeze(1) >> _places(bits) & 1).flatten()[:count].bool()


def _places(bits: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=bits.device)


@with_settings
def sparse_mezo(
    model: nn.Module, *, lr: float = 1e-6, sparsity: float = 0.75, **common: Unpack[Common]
) -> ZerothOrderOptimizer:
    """Sparse-MeZO: MeZO on the entries of each parameter that are small in magnitude.

        z ~ N(0, I),   m_ij = 1 where |w_ij| <= h, else 0,   W <- W - lr kappa (m * z).

    A baseline of Liu et al. 2024; not in the paper. h is set for each parameter before the first step, so that a part
    `sparsity` of its entries is above it; the mask is that of the weights at each step. State: h, one number for each
    parameter, and during a step one bit for each entry. `lr` is MeZO's and `sparsity` ours; their paper searches both.

    Deviations: the mask is kept in bits for the length of a step, instead of being computed in each pass.
    """
    return ZerothOrderOptimizer(model, SmallEntries(sparsity), SGD(), lr=lr, **common)


METHOD = Method("sparse-mezo", sparse_mezo, in_paper=False)
