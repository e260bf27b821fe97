"""Cutting a batch into parts of like length, so that little time goes into padding."""

from collections.abc import Sequence

import torch

OVERHEAD_TOKENS = {"cpu": 64}
"""What one more forward pass is taken to cost, in tokens of work: a guess for CPUs; elsewhere no batch is cut."""


def like_lengths(lengths: Sequence[int], rows: Sequence[int], device: torch.device) -> list[list[int]]:
    """Parts of a batch, as indices, that take the least time together.

    A part costs its longest length times its rows, plus `OVERHEAD_TOKENS`. Sorted by length, the best parts are
    neighbours, so that the best cut of the first j follows from the best cuts of fewer.

    Args:
        lengths: of the examples, in tokens.
        rows: how many sequences each example has.
        device: where the passes run.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    overhead = OVERHEAD_TOKENS.get(device.type)
    if overhead is None:
        return [order]
    best: list[tuple[int, int]] = [(0, 0)]
    for stop in range(1, len(order) + 1):
        longest, count, options = lengths[order[stop - 1]], 0, []
        for start in range(stop - 1, -1, -1):
            count += rows[order[start]]
            options.append((best[start][0] + longest * count + overhead, start))
        best.append(min(options))
    parts, stop = [], len(order)
    while stop:
        start = best[stop][1]
        parts.append(order[start:stop])
        stop = start
    return parts[::-1]
