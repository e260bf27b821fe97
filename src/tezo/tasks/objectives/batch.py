"""Batches: encoded examples as tensors, in rows of one sequence or, if packed, of several with a common prefix."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """The tokens of one row of input, in depth-first order. A token sees itself and the tokens above it.

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


def plain_tree(sequence: Sequence[int], asked: Sequence[int]) -> TokenTree:
    """Returns the tree of one sequence, whose hidden states at the positions `asked` are needed."""
    return TokenTree(sequence, range(len(sequence)), [len(sequence)] * len(sequence), asked, [range(len(asked))])


def packed_tree(sequences: Sequence[Sequence[int]], asked: Sequence[Sequence[int]]) -> TokenTree:
    """Returns one tree for all `sequences`, each up to its last asked position; shared prefixes are in it once.

    `asked`: for each sequence, the positions whose hidden states are needed, ascending.
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
    return TokenTree(tokens, positions, ends, reads, [[at[p] for p in places] for places in placed])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the longest common prefix of two sequences."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def shared_tokens(answers: Sequence[Sequence[int]]) -> int:
    """Returns how many first tokens all options of an example share, less than the shortest has: 0 of one option.

    Many tokenizers split " 0" and " 1" into a space and a digit. The state that predicts the space says nothing of the
    digit.
    """
    if len(answers) < 2:
        return 0
    least = max(0, min(map(len, answers)) - 1)
    return min(least, *(common_prefix(answers[0], other) for other in answers[1:]))


def padded(rows: Sequence[Sequence[int]], fill: int, length: int | None = None) -> Tensor:
    """Returns the rows padded on the right with `fill`, (N, length), int64; None: the length of the longest."""
    table = torch.full((len(rows), _longest(rows) if length is None else length), fill)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return table


def _longest(rows: Iterable[Sequence[Any]]) -> int:
    return max(map(len, rows), default=0)


def tree_mask(ends_RL: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask (R, 1, L, L) to add to attention scores. Padding has end 0: no token sees it but itself."""
    place_L = torch.arange(ends_RL.shape[1], device=ends_RL.device)
    query_L1 = place_L.unsqueeze(1)
    seen_RLL = (place_L <= query_L1) & (query_L1 < ends_RL.unsqueeze(1)) | (place_L == query_L1)
    hidden = torch.zeros_like(seen_RLL, dtype=dtype).masked_fill_(~seen_RLL, torch.finfo(dtype).min)
    return hidden.unsqueeze(1)


@dataclass(frozen=True)
class Pass:
    """Rows of one forward pass, on the model's device, and the sequences in them.

    R rows of L tokens, of which U hidden states are read; S sequences of at most K answer tokens.

    Attributes:
        inputs: the model's keyword arguments, (R, ...) each; for packed rows without the mask.
        ends_RL: int64, of packed rows: place in the row where the token's subtree ends, 0 for padding; see `TokenTree`.
        reads_RU: int64, positions in the row whose hidden states are needed.
        row_S: int64, row of each sequence, ascending.
        slots_SK: int64, index into the row's reads of the hidden state that predicts tokens_SK, where valid_SK.
        tokens_SK: int64, expected tokens.
        valid_SK: bool, False for padding.
        example_S: int64, example of each sequence.
        option_S: int64, option of each sequence.
        shared_S: int64, number of first answer tokens that all options of the sequence's example share; see
            `shared_tokens`.
        example_R: example of each row.
    """

    inputs: Mapping[str, Tensor]
    ends_RL: Tensor | None
    reads_RU: Tensor
    row_S: Tensor
    slots_SK: Tensor
    tokens_SK: Tensor
    valid_SK: Tensor
    example_S: Tensor
    option_S: Tensor
    shared_S: Tensor
    example_R: Sequence[int]

    @property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.inputs["input_ids"].numel()

    def deciding_reads(self) -> tuple[Tensor, Tensor]:
        """Returns (row, position that predicts the first token in which the options of an example differ).

        There is one of each example, in the row of its first option; the position is -1 where nothing is read.
        """
        first_S = self.option_S == 0
        row_P = self.row_S[first_S]
        if self.reads_RU.shape[1] == 0:
            return row_P, torch.full_like(row_P, -1)
        return row_P, self.reads_RU[row_P, self.slots_SK[first_S, self.shared_S[first_S]]]

    def deciding_tokens(self) -> Tensor:
        """Returns the first token by which each option of the first example differs from others, on the CPU."""
        own_S = self.example_S == self.example_S[0]
        return self.tokens_SK[own_S, self.shared_S[own_S]].cpu()

    def answer_reads(self) -> tuple[Tensor, Tensor]:
        """Returns (row, position whose hidden state predicts it) of each answer token."""
        row_T = self.row_S.unsqueeze(1).expand_as(self.slots_SK)[self.valid_SK]
        return row_T, self.reads_RU[row_T, self.slots_SK[self.valid_SK]]

    def repeated(self, dtype: torch.dtype, copies: int = 1) -> tuple[dict[str, Tensor], Tensor]:
        """Returns (keyword arguments of the model, positions to read) of `copies` models of this dtype side by side."""
        inputs = dict(self.inputs)
        if self.ends_RL is not None:
            inputs["attention_mask"] = tree_mask(self.ends_RL, dtype)
        if copies == 1:
            return inputs, self.reads_RU
        repeated = {name: value.repeat(copies, *[1] * (value.ndim - 1)) for name, value in inputs.items()}
        return repeated, self.reads_RU.repeat(copies, 1)


@dataclass(frozen=True)
class Batch:
    """Examples for the model, B of them with at most O options.

    Attributes:
        passes: the forward passes that they take; together these have all sequences, in order.
        labels_B: int64, index of the correct option; None if any is unknown.
        num_terms: number of terms of the loss: one for each example with a label, or for each answer token.
        shape_BO: (B, O).
        places: place of each example among those that the batches of a step were made of.
    """

    passes: Sequence[Pass]
    labels_B: Tensor | None
    num_terms: int
    shape_BO: tuple[int, int]
    places: Sequence[int]

    def by_option(self, values_CS: Sequence[Tensor]) -> Tensor:
        """Returns the values of sequences, (copies, S) for each pass, as (copies, B, O); -inf where there is none."""
        table_CBO = values_CS[0].new_full((len(values_CS[0]), *self.shape_BO), float("-inf"))
        for rows, of_pass_CS in zip(self.passes, values_CS, strict=True):
            table_CBO[:, rows.example_S, rows.option_S] = of_pass_CS
        return table_CBO


MOST_TOKENS = 1 << 13
"""Tokens of one copy in a forward pass, padding included, of rows that are several for an example."""


def collated(
    trees: Sequence[Sequence[TokenTree]],
    answers: Sequence[Sequence[Sequence[int]]],
    labels: Sequence[int | None],
    places: Sequence[int],
    *,
    padding: int,
    device: torch.device,
) -> Batch:
    """Returns the batch of examples, padded on the right.

    A forward pass has at most `MOST_TOKENS` tokens, or a row for each example.

    Args:
        trees: the rows of each example; together they hold its sequences in order.
        answers: for each example and sequence, the tokens that its places must predict.
        labels: index of the correct option of each example; None: not known.
        places: place of each example among all that batches are made of.
        padding: token that fills rows up.
        device: of the tensors.
    """
    rows = [(i, tree) for i, of_example in enumerate(trees) for tree in of_example]
    sequences = [(i, j, tokens) for i, of_example in enumerate(answers) for j, tokens in enumerate(of_example)]
    length, reads = _longest(tree.tokens for _, tree in rows), _longest(tree.reads for _, tree in rows)
    answer = _longest(tokens for _, _, tokens in sequences)
    packed = any(end < len(tree.tokens) for _, tree in rows for end in tree.ends)

    def table(values: Sequence[Sequence[int]], width: int, fill: int = 0) -> Tensor:
        return padded(values, fill, width).to(device)

    def column(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values)).to(device)

    shared = [shared_tokens(of_example) for of_example in answers]

    passes: list[Pass] = []
    many, done = max(len(trees), MOST_TOKENS // max(1, length)), 0
    for start in range(0, len(rows), many):
        examples, packed_rows = zip(*rows[start : start + many], strict=True)
        slots = [(r, slots) for r, tree in enumerate(packed_rows) for slots in tree.slots]
        asked = sequences[done : done + len(slots)]
        done += len(slots)
        inputs = {"input_ids": table([tree.tokens for tree in packed_rows], length, padding)}
        if packed:
            inputs["position_ids"] = table([tree.positions for tree in packed_rows], length)
        else:
            inputs["attention_mask"] = table([[1] * len(tree.tokens) for tree in packed_rows], length)
        passes.append(
            Pass(
                inputs,
                table([tree.ends for tree in packed_rows], length) if packed else None,
                reads_RU=table([tree.reads for tree in packed_rows], reads),
                row_S=column(r for r, _ in slots),
                slots_SK=table([places_ for _, places_ in slots], answer),
                tokens_SK=table([tokens for _, _, tokens in asked], answer),
                valid_SK=table([[1] * len(tokens) for _, _, tokens in asked], answer).bool(),
                example_S=column(i for i, _, _ in asked),
                option_S=column(j for _, j, _ in asked),
                shared_S=column(shared[i] for i, _, _ in asked),
                example_R=examples,
            )
        )
    known = [label for label in labels if label is not None]
    labelled = len(known) == len(labels)
    return Batch(
        passes,
        column(known) if labelled else None,
        num_terms=len(known) if labelled else sum(len(tokens) for _, _, tokens in sequences),
        shape_BO=(len(trees), _longest(answers)),
        places=places,
    )


OVERHEAD_TOKENS = {"cpu": 64}
"""Assumed cost of one more forward pass, in tokens of work; a guess for CPUs. On other devices no batch is divided."""


def like_lengths(lengths: Sequence[int], rows: Sequence[int], device: torch.device) -> list[list[int]]:
    """Returns the division of a batch into parts with the least total cost, as lists of indices.

    A part costs its longest length in tokens times its rows, plus `OVERHEAD_TOKENS`. The best parts are contiguous in
    the order of lengths, so dynamic programming finds the best division of the first j examples from those of fewer.
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
