"""Encoded examples as tensors: one row per sequence, or one packed row for sequences with common prefixes."""

import inspect
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import device_of
from tezo.tasks.objectives.readers import logits_at


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
    most = range(1, min(len(first), len(second)) + 1)
    return bisect_left(most, True, key=lambda length: first[:length] != second[:length])


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Returns the rows padded on the right with `fill`, (N, length of the longest), int64."""
    table = torch.full((len(rows), max(map(len, rows), default=0)), fill)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return table


def tree_mask(ends_RL: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask (R, 1, L, L) to add to attention scores. Padding has end 0: no token sees it but itself."""
    place_L = torch.arange(ends_RL.shape[1], device=ends_RL.device)
    query_L1 = place_L.unsqueeze(1)
    seen_RLL = (place_L <= query_L1) & (query_L1 < ends_RL.unsqueeze(1)) | (place_L == query_L1)
    hidden = torch.zeros_like(seen_RLL, dtype=dtype).masked_fill_(~seen_RLL, torch.finfo(dtype).min)
    return hidden.unsqueeze(1)


LEAST_TOKENS = 8
MOST_OPTION_TOKENS = 16
BOUNDS = ("max_position_embeddings", "sliding_window", "attention_chunk_size", "window_size")
"""Keys of a configuration: in longer rows a model may go by the index in the row, not by position and mask."""


def longest_packed(model: Any) -> int | None:
    """Returns the maximum length in tokens of a packed row, by the model's configuration; None: no limit."""
    bounds = [getattr(model.config, name, None) for name in BOUNDS]
    return min((bound for bound in bounds if isinstance(bound, int) and bound > 0), default=None)


def takes_packed(model: Any, sequence: Sequence[int]) -> bool:
    """Whether packed rows give the same scores as separate rows, with the current weights of a causal model.

    The model must take position ids and a four-dimensional mask, and use both. There is no list of families: the
    signature, the configuration and a numerical test on `sequence`, token ids from the data, decide.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    repeats = -(-LEAST_TOKENS // len(sequence))
    try:
        return _agrees(model, list(sequence) * repeats)
    except (RuntimeError, ValueError, TypeError, IndexError):  # the model rejects the mask
        return False


@torch.no_grad()
def _agrees(model: Any, sequence: list[int]) -> bool:
    """Whether the second of two equal options has the log-probabilities of a separate row.

    The same pass has two wrong rows: in one the options see each other, so the second option can copy the first; in
    the other the positions run backwards. The error of the correct row must be at most a quarter of either error of
    the wrong rows. This needs no rounding bound: a model that ignores the mask or the positions gives two rows equal
    results. The error must also be within a loose rounding bound.
    """
    option = min(MOST_OPTION_TOKENS, len(sequence) // 2)
    start, first = len(sequence) - option, len(sequence) - 1  # the first option ends where the second begins
    asked = torch.arange(start, first)
    row = [*range(first), *asked.tolist()]
    tokens, positions = torch.tensor([[sequence[i] for i in row]]), torch.tensor([row])
    whole = torch.full_like(positions, len(row))
    ends = whole.clone()
    ends[:, start:first] = first
    inputs = {
        "input_ids": tokens.repeat(3, 1),
        "position_ids": torch.cat([positions, positions, len(sequence) - 1 - positions]),
        "attention_mask": tree_mask(torch.cat([ends, whole, ends]), model.dtype),
    }
    second = torch.arange(first, len(row)).repeat(3, 1)
    plain = {"input_ids": torch.tensor([sequence]), "attention_mask": torch.ones((1, len(sequence)), dtype=torch.long)}
    expected = _log_probs(model, plain, asked.unsqueeze(0), sequence[start + 1 :])
    errors = (_log_probs(model, inputs, second, sequence[start + 1 :]) - expected).abs().mean(1)
    true, leaking, backwards = errors.tolist()
    bound = max(1e-3, 32 * torch.finfo(model.dtype).eps)
    return bool(true <= bound and true <= min(leaking, backwards) / 4)


def _log_probs(model: Any, inputs: dict[str, Tensor], reads_RU: Tensor, expected: list[int]) -> Tensor:
    placed = {name: value.to(device_of(model)) for name, value in inputs.items()}
    log_probs = logits_at(model, placed, reads_RU).log_softmax(-1)
    targets_RU1 = torch.tensor(expected, device=log_probs.device).expand(len(reads_RU), -1).unsqueeze(-1)
    return log_probs.gather(-1, targets_RU1).squeeze(-1)


MOST_TOKENS = 1 << 13
"""Tokens of one copy in a forward pass, padding included, of rows that are several for an example."""


@dataclass(frozen=True)
class Batch:
    """Padded rows on the model's device; a row holds one sequence or, if packed, several of an example.

    B examples of at most O options, S sequences, K answer tokens; R rows of L tokens, U hidden states read per row.

    Attributes:
        input_ids_RL: int64, token ids.
        position_ids_RL: int64, position of each token in its sequence.
        ends_RL: int64, place in the row where the token's subtree ends, 0 for padding; see `TokenTree`.
        reads_RU: int64, positions in the row whose hidden states are needed.
        row_S: int64, row of each sequence, ascending.
        slots_SK: int64, index into the row's reads of the hidden state that predicts tokens_SK, where valid_SK.
        tokens_SK: int64, expected tokens.
        valid_SK: bool, False for padding.
        example_S: int64, example of each sequence.
        option_S: int64, option of each sequence.
        labels_B: int64, index of the correct option; None if any is unknown.
        branching: whether some token is not part of all sequences of its row.
        shape_BO: (B, O).
        places: place of each example among those that the batches of a step were made of.
    """

    input_ids_RL: Tensor
    position_ids_RL: Tensor
    ends_RL: Tensor
    reads_RU: Tensor
    row_S: Tensor
    slots_SK: Tensor
    tokens_SK: Tensor
    valid_SK: Tensor
    example_S: Tensor
    option_S: Tensor
    labels_B: Tensor | None
    branching: bool
    shape_BO: tuple[int, int]
    places: tuple[int, ...]

    @property
    def num_terms(self) -> int:
        """Number of terms of the loss: one for each example with a label, or for each answer token."""
        return len(self.labels_B) if self.labels_B is not None else int(self.valid_SK.sum())

    def examples_of_rows(self) -> list[int]:
        """Returns the example of each row."""
        examples = self.row_S.new_zeros(len(self.input_ids_RL))
        examples[self.row_S] = self.example_S
        return [int(i) for i in examples.tolist()]

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the keyword arguments of the forward pass of a model of this dtype."""
        if not self.branching:
            return {"input_ids": self.input_ids_RL, "attention_mask": (self.ends_RL > 0).long()}
        return {
            "input_ids": self.input_ids_RL,
            "position_ids": self.position_ids_RL,
            "attention_mask": tree_mask(self.ends_RL, dtype),
        }

    def passes(self) -> Iterator["Batch"]:
        """Yields parts of the batch with so many rows that a forward pass has at most `MOST_TOKENS`; at least B rows.

        A batch with one row for each example is as large as its maker wants it, and one part.
        """
        rows, length = self.input_ids_RL.shape
        many = max(self.shape_BO[0], MOST_TOKENS // max(1, length))
        if rows <= many:
            yield self
            return
        row_S = self.row_S.cpu()
        tensors = self._tensors()
        for start in range(0, rows, many):
            first, last = torch.searchsorted(row_S, torch.tensor([start, start + many])).tolist()
            part = {name: x[start : start + many] for name, x in tensors.items() if name.endswith(("_RL", "_RU"))}
            part |= {name: x[first:last] for name, x in tensors.items() if name.endswith(("_S", "_SK"))}
            yield replace(self, **part | {"row_S": self.row_S[first:last] - start})

    def repeated(self, copies: int) -> "Batch":
        """Returns the batch with all rows and examples repeated `copies` times, block after block."""
        if copies == 1:
            return self
        (examples, options), rows = self.shape_BO, len(self.input_ids_RL)
        block_S = torch.arange(copies, device=self.row_S.device).repeat_interleave(len(self.row_S))
        tiled = {name: x.repeat(copies, *[1] * (x.ndim - 1)) for name, x in self._tensors().items()}
        tiled["row_S"] += rows * block_S
        tiled["example_S"] += examples * block_S
        return replace(self, **tiled, shape_BO=(copies * examples, options))

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch with its tensors on `device`."""
        return replace(self, **{name: x.to(device) for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}
