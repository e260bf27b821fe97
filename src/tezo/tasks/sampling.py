"""Which rows are used: so many of each class, some held out for a dev set. Pure functions of the seed."""

import itertools
from collections.abc import Sequence
from typing import TypeVar

from tezo.errors import RequestError
from tezo.numerics.random import permutation

T = TypeVar("T")


def shares(available: int, wanted: Sequence[int]) -> list[int]:
    """`wanted` counts, or where there are fewer rows than they take together, in the same proportion."""
    total = sum(wanted)
    return [available * count // total for count in wanted] if available < total else list(wanted)


def parts(rows: Sequence[T], counts: Sequence[int], seed: int, name: str) -> list[list[T]]:
    """Disjoint random parts with so many rows each, in the order of the file; `name` is of the draw."""
    order = permutation(len(rows), seed=seed, step=0, name=name)
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [[rows[i] for i in sorted(order[a:b])] for a, b in itertools.pairwise(bounds)]


def per_class(
    labels: Sequence[int | None], counts: Sequence[int], names: Sequence[str], seed: int, *, fewer: bool = False
) -> list[list[int]]:
    """Disjoint parts, each with so many rows of every label.

    Args:
        labels: of the rows, as indices into `names`.
        counts: for each part, its rows of a label.
        names: of the labels.
        seed: of the draw.
        fewer: take what there is of a label with too few rows, in proportion; otherwise that is an error.

    Returns:
        For each part the indices of its rows, in order.
    """
    chosen: list[list[int]] = [[] for _ in counts]
    for index, label in enumerate(names):
        own = [i for i, found in enumerate(labels) if found == index]
        if len(own) < sum(counts) and not fewer:
            also = " and as many dev rows" if len(counts) > 1 else ""
            raise RequestError(
                f"data.per_class is {counts[0]}{also}, but label {label!r} has {len(own)} rows to draw from; "
                "lower it, or set data.allow_fewer."
            )
        for part, rows in zip(chosen, parts(own, shares(len(own), counts), seed, f"per_class.{label}"), strict=True):
            part += rows
    return [sorted(part) for part in chosen]


def hold_out(rows: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """(kept, held out): a random `share` of the rows, at least one and at most 500, for a dev set."""
    count = min(500, max(1, round(share * len(rows))))
    if count >= len(rows):
        raise RequestError(f"data.train has {len(rows)} row(s), too few to hold some out; give data.dev or data.test.")
    held, kept = parts(rows, (count, len(rows) - count), seed, "hold_out")
    return kept, held
