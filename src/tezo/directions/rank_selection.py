"""The rank of each layer: a fixed number, or chosen by the paper's rule (Eq. 6 and 7).

    r_l = min({Rank(W) : W in the block of l}, max_rank),
    Rank(W) = number of singular values of W above threshold * (largest singular value).

The paper does not say whether "threshold" is a fraction of the largest singular value or of the energy; here it is a
fraction of the largest singular value, as in its figures. A block is one element of a numbered list of modules
("model.layers.3"); a parameter outside such a list is a block of its own.
"""

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tezo.directions.targets import Target, matrix_of
from tezo.errors import RequestError
from tezo.numerics.hashing import content_hash


@dataclass(frozen=True, kw_only=True)
class FixedRank:
    """The same rank for every matrix, or the smaller side of a matrix whose smaller side is below it."""

    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RequestError(f"method.rank is {self.rank}; it must be at least 1.")

    def ranks(self, targets: Sequence[Target]) -> dict[str, int]:
        """Name -> rank."""
        return {target.name: min(self.rank, *target.matrix_shape) for target in targets}


@dataclass(frozen=True, kw_only=True)
class LayerwiseRank:
    """The rank of each block by Eq. 6 and 7.

    Attributes:
        threshold: fraction of the largest singular value; the paper uses 0.25 or 0.30 and searches 0.20 to 0.35.
        max_rank: upper bound of the rank; the paper searches 32 to 256, "depends on tasks".
        cache: folder for the counts of singular values, keyed by a hash of the weights; None: no cache.
    """

    threshold: float = 0.25
    max_rank: int = 64
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise RequestError(f"method.rank_threshold is {self.threshold}; it must lie between 0 and 1.")
        if self.max_rank < 1:
            raise RequestError(f"method.max_rank is {self.max_rank}; it must be at least 1.")

    def ranks(self, targets: Sequence[Target]) -> dict[str, int]:
        """Name -> rank."""
        store = CountStore(self.cache) if self.cache is not None else None
        counts = {target.name: self._count(target, store) for target in targets}
        if store is not None:
            store.save()
        blocks: dict[str, int] = {}
        for name, count in counts.items():
            blocks[block_of(name)] = min(count, blocks.get(block_of(name), self.max_rank))
        return {name: blocks[block_of(name)] for name in counts}

    def _count(self, target: Target, store: "CountStore | None") -> int:
        if not target.is_writable and not (target.sites and target.is_linear):
            raise RequestError(
                f"method.rank: {target.name} is stored as {target.parameter.dtype}, so its singular values cannot be "
                "computed; give a fixed method.rank."
            )
        matrix = matrix_of(target)
        if not torch.isfinite(matrix).all():
            raise RequestError(f"model.name: {target.name} holds NaN or infinite values; download the model again.")
        if store is None:
            return significant_rank(matrix, self.threshold)
        key = f"{content_hash(matrix)}:{self.threshold!r}"
        if key not in store.counts:
            store.counts[key] = significant_rank(matrix, self.threshold)
        return store.counts[key]


RankRule = FixedRank | LayerwiseRank


def rank_rule(
    rank: int | None, rank_threshold: float = 0.25, max_rank: int = 64, cache: Path | None = None
) -> RankRule:
    """`FixedRank(rank)`, or the layer-wise rule where `rank` is None."""
    if rank is not None:
        return FixedRank(rank=rank)
    return LayerwiseRank(threshold=rank_threshold, max_rank=max_rank, cache=cache or default_cache())


def significant_rank(weight_MN: Tensor, threshold: float) -> int:
    """Number of singular values of a matrix above `threshold` times the largest one, at least 1.

    Computed from `squared_singular_values`, which takes a third of the time of an SVD and gives the same counts
    (benchmarks/results/rank_selection.json).
    """
    squares = squared_singular_values(weight_MN)
    return max(1, int((squares > threshold**2 * squares[-1]).sum()))


def squared_singular_values(weight_MN: Tensor) -> Tensor:
    """Eigenvalues of the smaller Gram matrix, W W^T or W^T W: (min(M, N),), float64, in ascending order."""
    wide = weight_MN if weight_MN.shape[0] <= weight_MN.shape[1] else weight_MN.T
    wide = wide.to(torch.float64)
    squares: Tensor = torch.linalg.eigvalsh(wide @ wide.T)
    return squares


def block_of(name: str) -> str:
    """The block of a parameter: its name up to and including the first number; the whole name if it has no number."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return found.group(0) if found else name


def default_cache() -> Path:
    """`$TEZO_CACHE` if set, else `tezo` in the user's cache folder."""
    chosen = os.environ.get("TEZO_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "tezo"


class CountStore:
    """Counts of singular values, cached in a JSON file. A file that cannot be read or written is ignored."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ranks.json"
        self.counts: dict[str, int] = {}
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
            self.counts = {str(key): int(count) for key, count in read.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            pass
        self._known = len(self.counts)

    def save(self) -> None:
        """Replaces the file atomically if a count was added."""
        if len(self.counts) == self._known:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                json.dump(self.counts, file)
            Path(file.name).replace(self.path)
        except OSError:
            pass
