"""Batches: encoded examples as tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tezo.tasks.objectives.token_rows import tree_mask

MOST_TOKENS = 1 << 13
"""Tokens of one copy in a forward pass, padding included, of rows that are several for an example."""


@dataclass(frozen=True)
class Batch:
    """Padded rows on the model's device.

    B examples of at most O options, S sequences, K answer tokens; R rows of L tokens, U hidden states read per row.
    A row holds one sequence or, if packed, several of an example.

    Attributes:
        input_ids_RL: int64, token ids.
        position_ids_RL: int64, position of each token in its sequence.
        ends_RL: int64, place in the row where the token's subtree ends, 0 for padding; see `Row`.
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
        """Number of terms of the loss: one for each example with a label, or one for each answer token."""
        return len(self.labels_B) if self.labels_B is not None else int(self.valid_SK.sum())

    @property
    def examples_of_rows(self) -> list[int]:
        """The example of each row."""
        examples = self.row_S.new_zeros(len(self.input_ids_RL))
        examples[self.row_S] = self.example_S
        return [int(i) for i in examples.tolist()]

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Keyword arguments of the forward pass of a model of this dtype."""
        if not self.branching:
            return {"input_ids": self.input_ids_RL, "attention_mask": (self.ends_RL > 0).long()}
        return {
            "input_ids": self.input_ids_RL,
            "position_ids": self.position_ids_RL,
            "attention_mask": tree_mask(self.ends_RL, dtype),
        }

    def passes(self) -> Iterator["Batch"]:
        """The batch by rows, so many in each part that a forward pass has at most `MOST_TOKENS`; one row at least.

        A batch with one row for each example is as large as its maker wants it, and one part.
        """
        rows, length = self.input_ids_RL.shape
        many = max(self.shape_BO[0], MOST_TOKENS // max(1, length))
        if rows <= many:
            yield self
            return
        row_S = self.row_S.cpu()
        for start in range(0, rows, many):
            own = slice(start, start + many)
            first, last = torch.searchsorted(row_S, torch.tensor([start, start + many])).tolist()
            sequences = slice(first, last)
            named = {f.name: getattr(self, f.name) for f in fields(self)}
            part = {name: value[own] for name, value in named.items() if name.endswith(("_RL", "_RU"))}
            part |= {name: value[sequences] for name, value in named.items() if name.endswith(("_S", "_SK"))}
            yield replace(self, **part | {"row_S": self.row_S[sequences] - start})

    def repeated(self, copies: int) -> "Batch":
        """The batch with all rows and examples repeated `copies` times, block after block."""
        if copies == 1:
            return self
        (examples, options), rows = self.shape_BO, len(self.input_ids_RL)
        blocks = torch.arange(copies, device=self.row_S.device).repeat_interleave(len(self.row_S))
        tiled = self._map(lambda tensor: tensor.repeat(copies, *[1] * (tensor.ndim - 1)))
        return replace(
            tiled,
            row_S=tiled.row_S + rows * blocks,
            example_S=tiled.example_S + examples * blocks,
            shape_BO=(copies * examples, options),
        )

    def to(self, device: torch.device) -> "Batch":
        """The batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Any) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})
