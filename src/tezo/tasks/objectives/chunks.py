"""Divides a batch into parts of similar length, to save time on padding."""

from collections.abc import Sequence

import torch

OVERHEAD_TOKENS = {"cpu": 64}
"""Assumed cost of one more forward pass, in tokens of work; a guess for CPUs. On other devices no batch is divided."""


def like_lengths(lengths: Sequence[int], rows: Sequence[int], device: torch.device) -> list[list[int]]:
    """The division of a batch into parts with the least total cost, as lists of indices.

    A part costs its longest length times its rows, plus `OVERHEAD_TOKENS`. The best parts are contiguous in the order
    of lengths, so dynamic programming finds the best division of the first j examples from those of fewer.

    Args:
        lengths: lengths of the examples in tokens.
        rows: number of rows of each example.
        device: device of the forward passes.
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
