"""Random choice of rows: parts of given sizes, rows per class, rows held out for a dev set. Functions of the seed."""

import itertools
from collections.abc import Sequence
from typing import TypeVar

from tezo.errors import RequestError
from tezo.numerics.random import permutation

T = TypeVar("T")

LEAST_HELD_OUT, SHARE_OF_FEW, MOST_HELD_OUT = 32, 0.3, 500
"""Rows held out by default: at least so many, or this share where there are few, and at most so many. The accuracy on
32 rows has a standard error of at most 9 points."""


def shares(available: int, wanted: Sequence[int]) -> list[int]:
    """The counts `wanted`; scaled down in proportion if their sum exceeds `available`."""
    total = sum(wanted)
    return [available * count // total for count in wanted] if available < total else list(wanted)


def parts(rows: Sequence[T], counts: Sequence[int], seed: int, name: str) -> list[list[T]]:
    """Disjoint random parts of `rows`, in the order of `rows`.

    Args:
        rows: the rows to draw from.
        counts: number of rows of each part; their sum is at most `len(rows)`.
        seed: seed of the draw.
        name: name of the draw; draws of different names are independent.
    """
    order = permutation(len(rows), seed=seed, step=0, name=name)
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [[rows[i] for i in sorted(order[a:b])] for a, b in itertools.pairwise(bounds)]


def per_class(
    labels: Sequence[int | None], counts: Sequence[int], names: Sequence[str], seed: int, *, fewer: bool = False
) -> list[list[int]]:
    """Disjoint random parts with the same number of rows of every label.

    Args:
        labels: labels of the rows, as indices into `names`.
        counts: for each part, its number of rows per label.
        names: names of the labels.
        seed: seed of the draw.
        fewer: if a label has too few rows, divide them among the parts in proportion; otherwise that is an error.

    Returns:
        For each part the indices of its rows, ascending.

    Raises:
        RequestError: a label has too few rows, and `fewer` is False.
    """
    chosen: list[list[int]] = [[] for _ in counts]
    for index, label in enumerate(names):
        own = [i for i, row_label in enumerate(labels) if row_label == index]
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
    """(kept rows, held-out rows): a random fraction `share` is held out, at least 1 and at most 500 rows."""
    count = min(MOST_HELD_OUT, max(1, round(share * len(rows))))
    if count >= len(rows):
        raise _too_few(len(rows), count)
    held, kept = parts(rows, (count, len(rows) - count), seed, "hold_out")
    return kept, held


def hold_out_of_groups(
    rows: Sequence[T], groups: Sequence[str], count: int | None, seed: int
) -> tuple[list[T], list[T]]:
    """(kept rows, held-out rows), with the groups in proportion in both.

    Args:
        rows: the rows to draw from.
        groups: the group of each row, such as its label.
        count: number of rows to hold out; None: a tenth, at least `LEAST_HELD_OUT` or `SHARE_OF_FEW` of the rows, and
            at most `MOST_HELD_OUT`.
        seed: seed of the draw.

    Raises:
        RequestError: there are too few rows.
    """
    if count is None:
        least = min(LEAST_HELD_OUT, round(SHARE_OF_FEW * len(rows)))
        count = min(MOST_HELD_OUT, max(1, least, round(len(rows) / 10)))
    if count >= len(rows):
        raise _too_few(len(rows), count)
    order = permutation(len(rows), seed=seed, step=0, name="hold_out")
    by_group: dict[str, list[int]] = {}
    for i in order:
        by_group.setdefault(groups[i], []).append(i)
    # every k-th of the rows sorted by group, in random order within a group
    in_groups = [i for name in sorted(by_group) for i in by_group[name]]
    held = {in_groups[(2 * place + 1) * len(rows) // (2 * count)] for place in range(count)}
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def _too_few(available: int, count: int) -> RequestError:
    return RequestError(
        f"data.train has {available} row(s), too few to hold {count} out as dev rows; give data.dev, or set "
        "data.hold_out=0 to go without."
    )
