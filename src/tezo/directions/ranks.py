"""The rank of each layer: a fixed number, or chosen by the paper's rule (Eq. 6 and 7).

    r_l = min({Rank(W) : W in the block of l}, max_rank),

where Rank(W) counts the leading singular values of W by one of the paper's two criteria (`CRITERIA`); it does not say
which its experiments use. A block is one element of a numbered list of modules ("model.layers.3"); a parameter outside
such a list is a separate block. Matrices of zeros, such as B of a new LoRA adapter, have no singular values to
count, and are left out of the minimum.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tezo.directions.targets import Target, matrix_of
from tezo.system.digests import content_hash
from tezo.system.errors import RequestError, nearest
from tezo.system.files import NumberCache, default_cache


@dataclass(frozen=True, kw_only=True)
class FixedRank:
    """The same rank for every matrix, or the smaller side of a matrix whose smaller side is below it."""

    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RequestError(f"method.rank is {self.rank}; it must be at least 1.")

    def ranks(self, targets: Sequence[Target]) -> dict[str, int]:
        """Returns the rank of each matrix by name."""
        return {target.name: min(self.rank, *target.matrix_shape) for target in targets}


RankCriterion = Literal["ratio", "energy"]


@dataclass(frozen=True, kw_only=True)
class LayerwiseRank:
    """The rank of each block by Eq. 6 and 7."""

    criterion: RankCriterion = "ratio"
    threshold: float = 0.25
    """Of the criterion; the paper uses 0.25 or 0.30 and searches 0.20 to 0.35."""
    max_rank: int = 64
    """Upper bound of the rank; the paper searches 32 to 256, "depends on tasks"."""
    cache: Path | None = None
    """Folder for the counts of singular values, keyed by a hash of the weights; None: no cache."""

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise RequestError(
                f"method.rank_rule: there is no rule {self.criterion!r}. " + nearest(str(self.criterion), CRITERIA)
            )
        if not 0 < self.threshold < 1:
            raise RequestError(f"method.rank_threshold is {self.threshold}; it must lie between 0 and 1.")
        if self.max_rank < 1:
            raise RequestError(f"method.max_rank is {self.max_rank}; it must be at least 1.")

    def ranks(self, targets: Sequence[Target]) -> dict[str, int]:
        """Returns the rank of each matrix by name."""
        store = NumberCache(self.cache, "ranks") if self.cache is not None else None
        counts = store.numbers if store is not None else {}
        blocks: dict[str, int] = {}
        for target in targets:
            if not is_zero(target):
                block, count = block_of(target.name), self._count(target, counts)
                blocks[block] = min(count, blocks.get(block, self.max_rank))
        if store is not None:
            store.save()
        return {
            target.name: min(blocks.get(block_of(target.name), self.max_rank), *target.matrix_shape)
            for target in targets
        }

    def _count(self, target: Target, counts: dict[str, int]) -> int:
        if not target.is_writable and not (target.sites and target.is_linear):
            raise RequestError(
                f"method.rank: {target.name} is stored as {target.parameter.dtype}, so its singular values cannot be "
                "computed; give a fixed method.rank."
            )
        matrix = matrix_of(target)
        if not torch.isfinite(matrix).all():
            raise RequestError(f"model.name: {target.name} holds NaN or infinite values; download the model again.")
        key = f"{content_hash(matrix)}:{self.criterion}:{self.threshold!r}"
        if key not in counts:
            counts[key] = CRITERIA[self.criterion](matrix, self.threshold)
        return counts[key]


RankRule = FixedRank | LayerwiseRank


def chosen_rank(
    rank: int | None,
    rank_rule: RankCriterion = LayerwiseRank.criterion,
    rank_threshold: float = LayerwiseRank.threshold,
    max_rank: int = LayerwiseRank.max_rank,
) -> RankRule:
    """Returns `FixedRank(rank)`, or the layer-wise rule where `rank` is None.

    Raises:
        RequestError: there is a rank, and something of the rule is given too.
    """
    if rank is not None:
        for name, value, default in (
            ("rank_rule", rank_rule, LayerwiseRank.criterion),
            ("rank_threshold", rank_threshold, LayerwiseRank.threshold),
            ("max_rank", max_rank, LayerwiseRank.max_rank),
        ):
            if value != default:
                raise RequestError(
                    f"method.{name} is {value}, which counts where ranks are chosen, and method.rank is {rank}; set "
                    "method.rank=null too."
                )
        return FixedRank(rank=rank)
    return LayerwiseRank(criterion=rank_rule, threshold=rank_threshold, max_rank=max_rank, cache=default_cache())


def is_zero(target: Target) -> bool:
    """Returns whether the matrix is zero everywhere; a packed one is not."""
    return target.is_writable and not target.parameter.count_nonzero()


def significant_rank(weight_MN: Tensor, threshold: float) -> int:
    """Returns the number of singular values of a matrix above `threshold` times the largest one, at least 1.

    Computed from `squared_singular_values`, which takes a third of the time of an SVD and gives the same counts
    (benchmarks/results/rank_selection.json).
    """
    squares = squared_singular_values(weight_MN)
    return max(1, int((squares > threshold**2 * squares[-1]).sum()))


def energy_rank(weight_MN: Tensor, threshold: float) -> int:
    """Returns the least k whose k largest singular values have `threshold` of the energy, the sum of squares."""
    energy = squared_singular_values(weight_MN).clamp(min=0).flip(0).cumsum(0)
    return int((energy < threshold * energy[-1]).sum()) + 1


CRITERIA: Mapping[str, Callable[[Tensor, float], int]] = {"ratio": significant_rank, "energy": energy_rank}
"""Rank(W) of a matrix (M, N), at a threshold: by the ratio of a singular value to the largest one, as in the paper's
figures, or by the share of the leading ones in the energy."""


def squared_singular_values(weight_MN: Tensor) -> Tensor:
    """Returns the eigenvalues of W W^T or W^T W, the smaller one: (min(M, N),), float64, in ascending order."""
    wide = (weight_MN if weight_MN.shape[0] <= weight_MN.shape[1] else weight_MN.T).to(torch.float64)
    squares: Tensor = torch.linalg.eigvalsh(wide @ wide.T)
    return squares


def block_of(name: str) -> str:
    """Returns the block of a parameter: its name up to the first number, or the whole name if it has no number."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return found.group(0) if found else name
