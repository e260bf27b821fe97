"""Examples as tensors."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tezo.tasks.objectives.token_rows import tree_mask


@dataclass(frozen=True)
class Batch:
    """Padded rows on the model's device.

    B examples of O options at most, S sequences, K answer tokens; R rows of L tokens, U hidden states read of each.
    A row has one sequence or, packed, all those of an example.

    Attributes:
        input_ids_RL: int64.
        position_ids_RL: int64, of each token in its own sequence.
        branches_RL: int64: 0 where all sequences of the row share a token, 1 + their index elsewhere, -1 for padding.
        reads_RU: int64, places whose hidden states are needed.
        row_S: int64, the row a sequence is in.
        slots_SK: int64, which of the row's reads predict tokens_SK, where valid_SK.
        tokens_SK: int64, what is expected.
        valid_SK: bool.
        example_S: int64, which example a sequence belongs to.
        option_S: int64, which option it is.
        labels_B: int64, or None where one is not known.
        branching: whether any token is not shared by all sequences of its row.
        shape_BO: (B, O).
    """

    input_ids_RL: Tensor
    position_ids_RL: Tensor
    branches_RL: Tensor
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

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Keyword arguments of a model's forward, for a model of this dtype."""
        if not self.branching:
            return {"input_ids": self.input_ids_RL, "attention_mask": (self.branches_RL >= 0).long()}
        return {
            "input_ids": self.input_ids_RL,
            "position_ids": self.position_ids_RL,
            "attention_mask": tree_mask(self.branches_RL, dtype),
        }

    def repeated(self, copies: int) -> "Batch":
        """The batch of `copies` times these examples, block after block."""
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
        """The batch on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Any) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})
