"""What is minimised and what is answered: (model, batch) -> a loss in float32 or wider, or a score for each option.

Examples are encoded once, before the first step, so that whatever does not fit is known then.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tezo.objectives.chunks import like_lengths
from tezo.tasks import Example


@dataclass(frozen=True)
class Encoded:
    """An example in tokens.

    Attributes:
        sequences: token ids: one for every option, or one.
        answers: for every sequence, how many of its last tokens are the answer (causal models).
        example: what it was made from.
    """

    sequences: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    example: Example

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence) for sequence in self.sequences)


@dataclass(frozen=True)
class Batch:
    """Padded rows on the model's device.

    S sequences (of B examples, O options at most), L tokens, K answer tokens:
    input_ids_SL and attention_mask_SL; positions_SK of the hidden states that predict tokens_SK, valid where
    valid_SK; row_S and option_S say which example and option a sequence belongs to; labels_B or None.
    """

    input_ids_SL: Tensor
    attention_mask_SL: Tensor
    positions_SK: Tensor
    tokens_SK: Tensor
    valid_SK: Tensor
    row_S: Tensor
    option_S: Tensor
    labels_B: Tensor | None


@dataclass
class Cuts:
    """Prompts that were longer than the model takes: rows, tokens cut, and from where."""

    rows: int = 0
    tokens: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, tokens: int, where: str) -> None:
        """Counts one row."""
        self.rows += 1
        self.tokens += tokens
        if len(self.examples) < 3:
            self.examples.append(where)


class Objective(ABC):
    """How examples become batches, and batches losses and scores.

    Args:
        tokenizer: the model's.
        device: of the batches.
        max_length: longest sequence in tokens; prompts are cut to it, answers never.
        options: what labelled examples choose among; empty for free text.
    """

    side_cut: str
    """Which part of a prompt is cut, in words."""

    def __init__(self, tokenizer: Any, device: torch.device, max_length: int, options: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.device = device
        self.max_length = max_length
        self.options = tuple(options)
        self.cuts = Cuts()

    @abstractmethod
    def encode(self, example: Example) -> Encoded:
        """The example in tokens; an error where it cannot be cut to fit."""

    @abstractmethod
    def scores(self, model: Any, batch: Batch) -> Tensor:
        """(B, O), float32: the higher, the likelier the option. For examples with options."""

    @abstractmethod
    def total(self, model: Any, batch: Batch) -> tuple[Tensor, int]:
        """(sum of the losses, how many): over examples where they have options, over answer tokens elsewhere."""

    def loss(self, model: Any, *batches: Batch) -> Tensor:
        """The mean loss over batches that are parts of one: scalar, float32 or wider."""
        with self.sharing(model):
            totals = [self.total(model, batch) for batch in batches]
        return torch.stack([total for total, _ in totals]).sum() / sum(count for _, count in totals)

    @contextmanager
    def sharing(self, model: Any) -> Iterator[None]:
        """While open, the model's function does not change: what all batches share may be computed once."""
        del model
        yield

    def batches(self, encoded: Sequence[Encoded]) -> list[Batch]:
        """These examples in parts of like length, each collated."""
        rows = [len(e.sequences) for e in encoded]
        parts = like_lengths([e.length for e in encoded], rows, self.device)
        return [self.collate([encoded[i] for i in part]) for part in parts]

    def collate(self, encoded: Sequence[Encoded]) -> Batch:
        """The batch of these examples, padded on the right."""
        flat = [(i, j, s) for i, e in enumerate(encoded) for j, s in enumerate(e.sequences)]
        answers = [count for e in encoded for count in e.answers]
        length, most = max(len(s) for *_, s in flat), max(answers, default=0)
        ids = torch.full((len(flat), length), int(self.tokenizer.pad_token_id))
        mask = torch.zeros((len(flat), length), dtype=torch.long)
        positions, tokens = torch.zeros((2, len(flat), most), dtype=torch.long)
        valid = torch.zeros((len(flat), most), dtype=torch.bool)
        for n, (_, _, sequence) in enumerate(flat):
            ids[n, : len(sequence)] = torch.tensor(sequence)
            mask[n, : len(sequence)] = 1
            where, expected = self.asked(sequence, answers[n])
            positions[n, : len(where)] = torch.tensor(where)
            tokens[n, : len(where)] = torch.tensor(expected)
            valid[n, : len(where)] = True
        labels = [e.example.label for e in encoded]
        known = None if any(label is None for label in labels) else torch.tensor(labels)
        rows, options = torch.tensor([i for i, *_ in flat]), torch.tensor([j for _, j, _ in flat])
        parts = (ids, mask, positions, tokens, valid, rows, options, known)
        return Batch(*(part.to(self.device) if part is not None else None for part in parts))  # type: ignore[arg-type]

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        """(positions whose hidden states are read, tokens expected there)."""
        del sequence, answer
        return [], []
