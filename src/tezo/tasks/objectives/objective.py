"""The objective of a kind of model: how examples become tokens, batches, and closures that return their loss."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from tezo.models.loading import UNBOUNDED, num_embeddings
from tezo.optim.closures import RowOutputs
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.batch import Batch, TokenTree, collated, like_lengths, plain_tree
from tezo.tasks.objectives.closure import BatchClosure
from tezo.tasks.objectives.evaluators import Evaluator


@dataclass(frozen=True)
class Encoded:
    """An example in tokens: `sequences` of ids, one per option or a single one.

    `answers`: for each sequence, the number of tokens at its end that are the answer (causal models).
    """

    sequences: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    example: Example

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the answer, the same in all sequences."""
        return self.sequences[0][: len(self.sequences[0]) - self.answers[0]]

    @property
    def length(self) -> int:
        """Length of the longest sequence in tokens."""
        return max(len(sequence) for sequence in self.sequences)


@dataclass
class Cuts:
    """Count of texts (`rows`) that the model does not get as they are, with the places of the first three.

    `tokens`: those that were cut, stand for unknown text, or are split where an answer begins.
    """

    rows: int = 0
    tokens: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, tokens: int, where: str) -> None:
        """Counts one row, and `tokens` tokens of it."""
        self.rows += 1
        self.tokens += tokens
        if len(self.examples) < 3:
            self.examples.append(where)


class Objective(ABC):
    """Conversion of examples into tokens, and of these into batches on a device; its evaluator runs the model on them.

    Args:
        tokenizer: tokenizer of the model.
        device: device of the batches.
        max_length: maximum sequence length in tokens; prompts are cut to it, answers never.
        options: options of labelled examples; empty for free text.
        model: the model, for the size of its embeddings and the tokens that end its texts; None: not known.
    """

    side_cut: str
    """The part of a prompt that is cut, in words."""
    packs: bool | None = None
    """Whether the options of an example share a row; None until `adapt` has tried it on examples."""
    evaluator: Evaluator
    """Runs the model on batches."""
    context = UNBOUNDED
    """Tokens of a prompt and its answer that the model takes."""

    def __init__(
        self, tokenizer: Any, device: torch.device, max_length: int, options: Sequence[str], *, model: Any = None
    ) -> None:
        self.tokenizer = tokenizer
        self.device = device
        self.max_length = max_length
        self.options = tuple(options)
        self.cuts, self.unknown, self.split = Cuts(), Cuts(), Cuts()
        self.endless, self.unfinished, self.written = Cuts(), Cuts(), 0
        self.notes: dict[str, Cuts] = {}
        self._embeddings = None if model is None else num_embeddings(model)

    def encode(self, example: Example) -> Encoded:
        """Returns the example in tokens.

        Raises:
            RequestError: it cannot be cut to `max_length`, or the model has no embedding for one of its tokens.
        """
        encoded = self._encode(example)
        for ids in encoded.sequences:
            self._check_known(ids, example.where)
        if example.note:
            self.note(example.note, example.where)
        return encoded

    def note(self, text: str, where: str) -> None:
        """Counts a row for a notice with this text."""
        self.notes.setdefault(text, Cuts()).add(0, where)

    @abstractmethod
    def _encode(self, example: Example) -> Encoded: ...

    def _check_known(self, ids: Sequence[int], where: str) -> None:
        highest = max(ids, default=0)
        if self._embeddings is not None and highest >= self._embeddings:
            raise RequestError(
                f"{where}: the token {self.tokenizer.convert_ids_to_tokens(highest)!r} has the number {highest}, and "
                f"the model has embeddings for 0 to {self._embeddings - 1}; use the tokenizer that the model was "
                "trained with, or call model.resize_token_embeddings(len(tokenizer)) and save the model."
            )

    def option_tokens(self, option: str) -> tuple[int, ...]:
        """Returns the model's input for an option; it cannot distinguish options with equal inputs."""
        return tuple(self.tokenizer(option)["input_ids"])

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        """Returns (positions in the sequence whose hidden states are read, tokens that they must predict).

        `answer`: number of answer tokens at the end of the sequence.
        """
        del sequence, answer
        return [], []

    def adapt(self, model: Any, encoded: Sequence[Encoded]) -> None:
        """Tests once whether `model` supports packed rows; call it while the model is not perturbed."""
        del model, encoded

    def trees(self, encoded: Sequence[Encoded]) -> list[list[TokenTree]]:
        """Returns the rows of each example of a batch; together they hold its sequences in order."""
        return [
            [plain_tree(s, self.asked(s, a)[0]) for s, a in zip(e.sequences, e.answers, strict=True)] for e in encoded
        ]

    def rows_of_pass(self, encoded: Sequence[Encoded], batch_size: int) -> float:
        """Returns the mean number of rows that one evaluation of the loss of a batch puts into the model."""
        return batch_size * sum(map(len, self.trees(encoded))) / len(encoded) + self.evaluator.shared_rows

    def batches(self, encoded: Sequence[Encoded], most: int | None = None) -> list[Batch]:
        """Returns the examples in parts of similar length, each collated; see `like_lengths`.

        Args:
            encoded: the examples.
            most: examples of a part, at most; None: no limit.
        """
        trees = self.trees(encoded)
        lengths = [max(len(tree.tokens) for tree in of_example) for of_example in trees]
        whole = like_lengths(lengths, [len(of_example) for of_example in trees], self.device)
        parts = [part[i : i + (most or len(part))] for part in whole for i in range(0, len(part), most or len(part))]
        return [self._collated([encoded[i] for i in part], [trees[i] for i in part], part) for part in parts]

    def collate(self, encoded: Sequence[Encoded]) -> Batch:
        """Returns the batch of the examples, padded on the right."""
        return self._collated(encoded, self.trees(encoded), range(len(encoded)))

    def _collated(
        self, encoded: Sequence[Encoded], trees: Sequence[Sequence[TokenTree]], places: Sequence[int]
    ) -> Batch:
        answers = [[self.asked(s, a)[1] for s, a in zip(e.sequences, e.answers, strict=True)] for e in encoded]
        labels = [e.example.label for e in encoded]
        padding = int(self.tokenizer.pad_token_id)
        return collated(trees, answers, labels, places, padding=padding, device=self.device)

    def closure(
        self,
        model: Any,
        batches: Sequence[Batch],
        *,
        stepped: int | None = None,
        held_out: RowOutputs | None = None,
    ) -> BatchClosure:
        """Returns the loss on the parts of a batch as a closure, for one model or for several copies at once.

        `stepped`, `held_out`: see `BatchClosure`.
        """
        return BatchClosure(self.evaluator, model, batches, bool(self.options), stepped, held_out)

    def in_torch(self) -> Self:
        """Returns the objective with forward passes of the model's modules, for hooks in them."""
        found = copy.copy(self)
        found.evaluator = self.evaluator.in_torch()
        return found

    def shown(self) -> Self:
        """Returns the objective whose passes can be watched: in an engine that shows layers, or else in torch."""
        found = copy.copy(self)
        found.evaluator = self.evaluator.shown(labelled=bool(self.options))
        return found
