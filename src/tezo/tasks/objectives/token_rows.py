"""Token rows of a model's input: one per sequence, or one packed row for sequences with a common prefix."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One row of input.

    Attributes:
        tokens: token ids.
        positions: position of each token in its sequence.
        branches: 0 for tokens that all sequences of the row share, otherwise 1 + index of the token's sequence.
        reads: positions in the row whose hidden states are needed, ascending.
        slots: for each sequence of the row, the indices into `reads` that predict its answer tokens.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    branches: Sequence[int]
    reads: Sequence[int]
    slots: Sequence[Sequence[int]]


def plain_row(sequence: Sequence[int], asked: Sequence[int]) -> Row:
    """The row of one sequence; `asked` holds the positions whose hidden states are needed."""
    return Row(sequence, range(len(sequence)), [0] * len(sequence), asked, [range(len(asked))])


def packed_row(sequences: Sequence[Sequence[int]], asked: Sequence[Sequence[int]], shared: int | None = None) -> Row:
    """One row for all `sequences`: the common prefix once, then the rest of each up to its last asked position.

    Args:
        sequences: token ids.
        asked: for each sequence, the positions whose hidden states are needed, ascending.
        shared: length of the prefix to share; None: the longest common prefix.
    """
    ends = [places[-1] + 1 if places else 0 for places in asked]
    shared = min(common_prefix(sequences) if shared is None else shared, max(ends))
    tokens, positions, branches = list(sequences[0][:shared]), list(range(shared)), [0] * shared
    placed = []
    for branch, (sequence, end, places) in enumerate(zip(sequences, ends, asked, strict=True), start=1):
        start = len(tokens) - shared
        placed.append([p if p < shared else start + p for p in places])
        tokens += sequence[shared:end]
        positions += range(shared, end)
        branches += [branch] * (end - shared)
    reads = sorted({p for places in placed for p in places})
    at = {place: i for i, place in enumerate(reads)}
    return Row(tokens, positions, branches, reads, [[at[p] for p in places] for places in placed])


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix of all sequences."""
    # the first and the last in lexicographic order share only what all sequences share
    low, high = min(map(tuple, sequences)), max(map(tuple, sequences))
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """The rows padded on the right with `fill`, (N, length of the longest), int64."""
    table = torch.full((len(rows), max(map(len, rows), default=0)), fill)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return table


def tree_mask(branches_RL: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask (R, 1, L, L) to add to attention scores: a token sees shared tokens and its branch, up to itself.

    Padding is a separate branch, -1, so that every token sees at least itself.
    """
    length = branches_RL.shape[1]
    before_LL = torch.ones((length, length), dtype=torch.bool, device=branches_RL.device).tril()
    key_R1L = branches_RL.unsqueeze(1)
    seen_RLL = before_LL & ((key_R1L == 0) | (key_R1L == branches_RL.unsqueeze(2)))
    hidden = torch.zeros_like(seen_RLL, dtype=dtype).masked_fill_(~seen_RLL, torch.finfo(dtype).min)
    return hidden.unsqueeze(1)
