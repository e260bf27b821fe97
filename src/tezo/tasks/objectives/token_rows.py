"""Token rows of a model's input: one per sequence, or one packed row for sequences with common prefixes."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One row of input: a tree of tokens in depth-first order. A token sees itself and the tokens above it.

    Attributes:
        tokens: token ids.
        positions: position of each token in its sequences.
        ends: for each token, the place in the row where its subtree ends, exclusive.
        reads: places in the row whose hidden states are needed, ascending.
        slots: for each sequence of the row, the indices into `reads` that predict its answer tokens.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    ends: Sequence[int]
    reads: Sequence[int]
    slots: Sequence[Sequence[int]]


def plain_row(sequence: Sequence[int], asked: Sequence[int]) -> Row:
    """The row of one sequence; `asked` holds the positions whose hidden states are needed."""
    return Row(sequence, range(len(sequence)), [len(sequence)] * len(sequence), asked, [range(len(asked))])


def packed_row(sequences: Sequence[Sequence[int]], asked: Sequence[Sequence[int]]) -> Row:
    """One row for all `sequences`, each up to its last asked position: prefixes that some share are in it once.

    Args:
        sequences: token ids.
        asked: for each sequence, the positions whose hidden states are needed, ascending.
    """
    pairs = zip(sequences, asked, strict=True)
    needed = [tuple(sequence[: places[-1] + 1 if places else 0]) for sequence, places in pairs]
    tokens: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    paths: list[list[int]] = [[]] * len(needed)
    path: list[int] = []  # places of the tokens of the sequence before
    before: Sequence[int] = ()
    for i in sorted(range(len(needed)), key=needed.__getitem__):  # sequences that share a prefix are neighbours
        shared = common_prefix(before, needed[i])
        for place in path[shared:]:
            ends[place] = len(tokens)
        added = len(needed[i]) - shared
        path = path[:shared] + list(range(len(tokens), len(tokens) + added))
        tokens += needed[i][shared:]
        positions += range(shared, len(needed[i]))
        ends += [0] * added
        paths[i], before = path, needed[i]
    for place in path:
        ends[place] = len(tokens)
    placed = [[path[p] for p in places] for path, places in zip(paths, asked, strict=True)]
    reads = sorted({p for places in placed for p in places})
    at = {place: i for i, place in enumerate(reads)}
    return Row(tokens, positions, ends, reads, [[at[p] for p in places] for places in placed])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences."""
    most = range(1, min(len(first), len(second)) + 1)
    return bisect_left(most, True, key=lambda length: first[:length] != second[:length])


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """The rows padded on the right with `fill`, (N, length of the longest), int64."""
    table = torch.full((len(rows), max(map(len, rows), default=0)), fill)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return table


def tree_mask(ends_RL: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask (R, 1, L, L) to add to attention scores: a token sees itself, and the tokens in whose subtree it is.

    Padding has end 0: no token sees it but itself.
    """
    place_L = torch.arange(ends_RL.shape[1], device=ends_RL.device)
    query_L1 = place_L.unsqueeze(1)
    seen_RLL = (place_L <= query_L1) & (query_L1 < ends_RL.unsqueeze(1)) | (place_L == query_L1)
    hidden = torch.zeros_like(seen_RLL, dtype=dtype).masked_fill_(~seen_RLL, torch.finfo(dtype).min)
    return hidden.unsqueeze(1)
