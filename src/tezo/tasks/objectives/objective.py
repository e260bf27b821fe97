"""What is minimised and what is answered: (model, batch) -> a loss in float32 or wider, or a score for each option.

Examples are encoded once, before the first step, so that whatever does not fit is known then.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tezo.tasks import Example
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.chunks import like_lengths
from tezo.tasks.objectives.copies import whole_rows
from tezo.tasks.objectives.token_rows import Row, padded, plain_row


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
    packs: bool | None = None
    """Whether the options of an example share a row; None until `adapt` has had examples to try."""
    shared_tokens: int = 0
    """Tokens, padding included, of what all batches share."""

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
    def scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        """(copies B, O), float32 or wider: the higher, the likelier the option. For examples with options.

        Every forward pass has `copies` times the rows of one, block after block, and so has the result.
        """

    @abstractmethod
    def features(self, model: Any, encoded: Sequence[Encoded]) -> Tensor:
        """(B, D): what a linear probe reads of each example, its answer not included."""

    def total(self, model: Any, batch: Batch, copies: int = 1) -> tuple[Tensor, int]:
        """(sums of the losses (copies,), how many): over examples with options, over answer tokens elsewhere."""
        assert batch.labels_B is not None
        scores = self.scores(model, batch, copies)
        losses = functional.cross_entropy(scores, batch.labels_B.repeat(copies), reduction="none")
        return losses.view(copies, -1).sum(1), len(batch.labels_B)

    def losses(self, model: Any, batches: Sequence[Batch], copies: int) -> Tensor:
        """For each copy the mean loss over batches that are parts of one: (copies,), float32 or wider.

        Hooks may give each copy a model of its own: rows come block after block along the leading dimension.
        """
        sums, count = self.totals(model, batches, copies)
        return sums / count

    def totals(self, model: Any, batches: Sequence[Batch], copies: int) -> tuple[Tensor, int]:
        """What `losses` divides: (sums (copies,), how many)."""
        with whole_rows(model) if copies > 1 else nullcontext(), self.sharing(model, copies):
            totals = [self.total(model, batch, copies) for batch in batches]
        return torch.stack([sums for sums, _ in totals]).sum(0), sum(count for _, count in totals)

    def loss(self, model: Any, *batches: Batch) -> Tensor:
        """The mean loss over batches that are parts of one: scalar, float32 or wider."""
        return self.losses(model, batches, 1)[0]

    def closure(self, model: Any, batches: Sequence[Batch]) -> "BatchClosure":
        """The loss on these batches, to be called at one point or at several together."""
        return BatchClosure(self, model, tuple(batches))

    @contextmanager
    def sharing(self, model: Any, copies: int = 1) -> Iterator[None]:
        """While open, the model's function does not change: what all batches share may be computed once."""
        del model, copies
        yield

    def adapt(self, model: Any, encoded: Sequence[Encoded]) -> None:
        """Settles once, by trying it, how rows are made for `model`; to be called while nothing perturbs it."""
        del model, encoded

    def rows(self, encoded: Sequence[Encoded]) -> list[list[Row]]:
        """For each example of a batch its rows, which together have all its sequences, in order."""
        return [
            [plain_row(s, self.asked(s, a)[0]) for s, a in zip(e.sequences, e.answers, strict=True)] for e in encoded
        ]

    def batches(self, encoded: Sequence[Encoded]) -> list[Batch]:
        """These examples in parts of like length, each collated."""
        rows = self.rows(encoded)
        lengths = [max(len(row.tokens) for row in own) for own in rows]
        parts = like_lengths(lengths, [len(own) for own in rows], self.device)
        return [self.collate([encoded[i] for i in part]) for part in parts]

    def collate(self, encoded: Sequence[Encoded]) -> Batch:
        """The batch of these examples, padded on the right."""
        rows = [row for own in self.rows(encoded) for row in own]
        expected = [self.asked(s, a)[1] for e in encoded for s, a in zip(e.sequences, e.answers, strict=True)]
        labels = [e.example.label for e in encoded if e.example.label is not None]
        batch = Batch(
            input_ids_RL=padded([row.tokens for row in rows], int(self.tokenizer.pad_token_id)),
            position_ids_RL=padded([row.positions for row in rows], 0),
            branches_RL=padded([row.branches for row in rows], -1),
            reads_RU=padded([row.reads for row in rows], 0),
            row_S=torch.tensor([i for i, row in enumerate(rows) for _ in row.slots]),
            slots_SK=padded([slots for row in rows for slots in row.slots], 0),
            tokens_SK=padded(expected, 0),
            valid_SK=padded([[1] * len(tokens) for tokens in expected], 0).bool(),
            example_S=torch.tensor([i for i, e in enumerate(encoded) for _ in e.sequences]),
            option_S=torch.tensor([j for e in encoded for j in range(len(e.sequences))]),
            labels_B=torch.tensor(labels) if len(labels) == len(encoded) else None,
            branching=any(max(row.branches) > 0 for row in rows),
            shape_BO=(len(encoded), max(len(e.sequences) for e in encoded)),
        )
        return batch.to(self.device)

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        """(positions whose hidden states are read, tokens expected there)."""
        del sequence, answer
        return [], []


@dataclass(frozen=True)
class BatchClosure:
    """The loss of a model on the parts of a batch, at the point where the model is when it is called."""

    objective: Objective
    model: Any
    batches: tuple[Batch, ...]

    def __call__(self) -> Tensor:
        """The loss: scalar, float32 or wider."""
        return self.losses(1)[0]

    def losses(self, copies: int) -> Tensor:
        """(copies,): the loss of each copy, from passes with `copies` blocks of rows; see `Objective.losses`."""
        return self.objective.losses(self.model, self.batches, copies)

    def totals(self, copies: int) -> tuple[list[float], int]:
        """(sum of the losses of each copy, how many); of no rows, zeros."""
        if not self.batches:
            return [0.0] * copies, 0
        sums, count = self.objective.totals(self.model, self.batches, copies)
        return [float(x) for x in sums.tolist()], count

    @property
    def tokens(self) -> int:
        """The most tokens, padding included, that one copy has in a forward pass."""
        sizes = [batch.input_ids_RL.numel() for batch in self.batches]
        return max([self.objective.shared_tokens, *sizes])
