"""Objectives: encode examples, make batches of them, and compute the loss and the scores of their options."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.outputs import Outputs, Places, joined
from tezo.models.loading import num_embeddings
from tezo.optim.closures import RowLosses, RowOutputs
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.batch import Batch, TokenTree, padded, plain_tree
from tezo.tasks.objectives.evaluators import IN_TORCH, Evaluator


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Widens lookups that a model does once for all rows, such as positions, to one per row, while it is open.

    Hooks that assign rows to copies need this. `model` must be called with `input_ids` as a keyword.
    """
    rows = 1

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module, args
        nonlocal rows
        rows = len(kwargs["input_ids"])

    def widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        del module
        if args and isinstance(args[0], Tensor) and args[0].ndim == 2 and len(args[0]) == 1:
            return (args[0].expand(rows, -1), *args[1:])
        return None

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(note, with_kwargs=True))
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.enter_context(module.register_forward_pre_hook(widen))
        yield


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

    `tokens`: those that were cut, stand for what is unknown, or are not whole where an answer begins.
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


@dataclass(frozen=True)
class Terms:
    """Terms of the loss on a batch: their sum over their number is the loss.

    Attributes:
        values_CT: terms of each copy, float32 or wider, 0 for padding.
        example_T: int64, example of each term.
        num_examples: number B of examples.
    """

    values_CT: Tensor
    example_T: Tensor
    num_examples: int

    def of_examples(self) -> Tensor:
        """Returns the sum of the terms of each example, (copies, B)."""
        sums_CB = self.values_CT.new_zeros(len(self.values_CT), self.num_examples)
        return sums_CB.index_add_(1, self.example_T, self.values_CT)


class Objective(ABC):
    """Conversion of examples into batches on a device, and of batches into losses and scores.

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
    evaluator: Evaluator = IN_TORCH
    """Runs the model, where it is a causal one."""
    shared_tokens: int = 0
    """Tokens, padding included, of the inputs that all batches share (label descriptions)."""
    shared_rows: int = 0
    """Number of these inputs."""

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
        self._prepare(model)

    def _prepare(self, model: Any) -> None:
        """Computes what an objective needs besides; by default nothing."""
        del model

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
        """Counts a row of which the user is told `text`."""
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

    @abstractmethod
    def scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        """Returns scores of the options, (copies B, O), float32 or wider; a higher score is more likely.

        The forward pass has the rows of the batch `copies` times, block after block, and so has the result.
        """

    @abstractmethod
    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns (scores of the options (B, O), features of each example for a linear probe (B, D)), by one pass.

        Features do not depend on the answer.

        Raises:
            RequestError: they cannot be read.
        """

    def option_tokens(self, option: str) -> tuple[int, ...]:
        """Returns what the model has of an option; it cannot tell options apart for which this is equal."""
        return tuple(self.tokenizer(option)["input_ids"])

    def terms(self, model: Any, batch: Batch, copies: int = 1) -> Terms:
        """Returns the terms of the loss: one for each example with options, or for each answer token."""
        assert batch.labels_B is not None
        scores = self.scores(model, batch, copies)
        losses = functional.cross_entropy(scores, batch.labels_B.repeat(copies), reduction="none")
        examples = torch.arange(len(batch.labels_B), device=losses.device)
        return Terms(losses.view(copies, -1), examples, len(examples))

    def outputs(self, model: Any, batch: Batch, tokens_TC: Tensor | None = None, copies: int = 1) -> list[Outputs]:
        """Returns the outputs of each copy: the scores of the options of an example, or of tokens at an answer token.

        Args:
            model: the model.
            batch: the batch.
            tokens_TC: int64, tokens whose scores are returned; None: the likely ones. Without a meaning for options.
            copies: number of models, each with the rows of the batch; hooks may perturb them differently.
        """
        del tokens_TC
        assert batch.labels_B is not None
        examples_B = torch.tensor(batch.places, device=batch.labels_B.device)
        scores = self.scores(model, batch, copies).chunk(copies)
        return [Outputs(own, batch.labels_B, examples_B, shared=bool(self.options)) for own in scores]

    def places(self, batch: Batch, start: int) -> list[Places | None]:
        """Returns where the places of a batch are, for each forward pass over it inside `sharing`.

        Args:
            batch: the batch.
            start: number of its first place.
        """
        found: list[Places | None] = []
        for part in batch.passes():
            first_S = part.option_S == 0
            length_R = (part.ends_RL > 0).sum(1)
            row_P, place_P = part.row_S[first_S], start + part.example_S[first_S]
            position_P = self._position(part, first_S, row_P)
            stop_P = self._stop(position_P, length_R[row_P])
            found.append(Places(row_P, position_P, stop_P, place_P, start + torch.tensor(part.examples_of_rows())))
        return found

    def _position(self, part: Batch, first_S: Tensor, row_P: Tensor) -> Tensor:
        """Returns the positions that are read, of a pass over options of which `first_S` are the first; -1: none."""
        del part, first_S
        return torch.full_like(row_P, -1)

    def _stop(self, position_P: Tensor, length_P: Tensor) -> Tensor:
        """Returns the end of the tokens that the answers at these positions depend on, in rows of these lengths."""
        del position_P
        return length_P

    def losses(self, model: Any, batches: Sequence[Batch], copies: int) -> Tensor:
        """Returns the mean loss of each copy over the parts of a batch, (copies,); see `BatchClosure`."""
        return self.closure(model, batches).losses(copies)

    def example_passes(self, batch: Batch) -> list[list[int]]:
        """Returns, for each forward pass over a batch outside of `sharing`, the example of each row of one copy."""
        return [part.examples_of_rows() for part in batch.passes()]

    def loss(self, model: Any, *batches: Batch) -> Tensor:
        """Returns the mean loss over the parts of a batch: scalar, float32 or wider."""
        return self.losses(model, batches, 1)[0]

    def summands(self, model: Any, batches: Sequence[Batch]) -> Iterator[Tensor]:
        """Yields terms whose sum is the loss, one after another, no two of which share a graph."""
        yield self.loss(model, *batches)

    def closure(
        self,
        model: Any,
        batches: Sequence[Batch],
        *,
        stepped: int | None = None,
        held_out: "BatchClosure | None" = None,
    ) -> "BatchClosure":
        """Returns the loss on the parts of a batch as a closure, for one model or for several copies at once.

        `stepped`, `held_out`: see `RowOutputs`.
        """
        return BatchClosure(self, model, tuple(batches), stepped, held_out)

    def in_torch(self) -> Self:
        """Returns the objective with forward passes of the model's own modules, for hooks in them."""
        found = copy.copy(self)
        found.evaluator = IN_TORCH
        return found

    @contextmanager
    def sharing(self, model: Any, copies: int = 1) -> Iterator[None]:
        """Computes what all examples share only once, while it is open; outside of it each example has its own."""
        del model, copies
        yield

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
        return batch_size * sum(map(len, self.trees(encoded))) / len(encoded) + self.shared_rows

    def batches(self, encoded: Sequence[Encoded], most: int | None = None) -> list[Batch]:
        """Returns the examples in parts of similar length, each collated; see `like_lengths`.

        Args:
            encoded: the examples.
            most: examples of a part, at most; None: no limit.
        """
        trees = self.trees(encoded)
        lengths = [max(len(tree.tokens) for tree in own) for own in trees]
        whole = like_lengths(lengths, [len(own) for own in trees], self.device)
        parts = [part[i : i + (most or len(part))] for part in whole for i in range(0, len(part), most or len(part))]
        return [self._collated([encoded[i] for i in part], [trees[i] for i in part], part) for part in parts]

    def collate(self, encoded: Sequence[Encoded]) -> Batch:
        """Returns the batch of the examples, padded on the right."""
        return self._collated(encoded, self.trees(encoded), range(len(encoded)))

    def _collated(
        self, encoded: Sequence[Encoded], trees: Sequence[Sequence[TokenTree]], places: Sequence[int]
    ) -> Batch:
        rows = [tree for own in trees for tree in own]
        expected = [self.asked(s, a)[1] for e in encoded for s, a in zip(e.sequences, e.answers, strict=True)]
        labels = [e.example.label for e in encoded if e.example.label is not None]
        return Batch(
            input_ids_RL=padded([row.tokens for row in rows], int(self.tokenizer.pad_token_id)),
            position_ids_RL=padded([row.positions for row in rows], 0),
            ends_RL=padded([row.ends for row in rows], 0),
            reads_RU=padded([row.reads for row in rows], 0),
            row_S=torch.tensor([i for i, row in enumerate(rows) for _ in row.slots]),
            slots_SK=padded([slots for row in rows for slots in row.slots], 0),
            tokens_SK=padded(expected, 0),
            valid_SK=padded([[1] * len(tokens) for tokens in expected], 0).bool(),
            example_S=torch.tensor([i for i, e in enumerate(encoded) for _ in e.sequences]),
            option_S=torch.tensor([j for e in encoded for j in range(len(e.sequences))]),
            labels_B=torch.tensor(labels) if len(labels) == len(encoded) else None,
            branching=any(end < len(row.tokens) for row in rows for end in row.ends),
            shape_BO=(len(encoded), max(len(e.sequences) for e in encoded)),
            places=tuple(places),
        ).to(self.device)

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        """Returns (positions in the sequence whose hidden states are read, tokens that they must predict).

        `answer`: number of answer tokens at the end of the sequence.
        """
        del sequence, answer
        return [], []


@dataclass(frozen=True)
class BatchClosure(RowLosses, RowOutputs):
    """The loss of a model on the parts of a batch, with the parameters at the time of the call.

    Hooks may perturb each copy differently, and in `example_totals` each example of each copy: the rows of a copy are
    one block along the leading dimension.
    """

    objective: Objective
    model: Any
    batches: tuple[Batch, ...]
    stepped: int | None = None
    held_out: "BatchClosure | None" = None

    def summands(self) -> Iterator[Tensor]:
        return self.objective.summands(self.model, self.batches)

    def losses(self, copies: int) -> Tensor:
        sums, count = self.totals(copies)
        return sums / count

    def totals(self, copies: int) -> tuple[Tensor, int]:
        """Returns (sum of the terms of each copy (copies,), number of terms); zeros if there are no rows."""
        if not self.batches:
            return torch.zeros(copies), 0
        model, objective = self.model, self.objective
        with whole_rows(model) if copies > 1 else nullcontext(), objective.sharing(model, copies):
            sums = [objective.terms(model, batch, copies).values_CT.sum(1) for batch in self.batches]
        return torch.stack(sums).sum(0), self._num_terms

    @property
    def most_copies(self) -> int | None:
        return self.objective.evaluator.most_copies

    def outputs(self, like: Outputs | None = None) -> Outputs:
        return self.outputs_of(1, like)[0]

    def outputs_of(self, copies: int, like: Outputs | None = None) -> list[Outputs]:
        counts = [batch.num_terms for batch in self.batches]
        tokens: Any = [None] * len(counts)
        if like is not None and like.tokens_TC is not None:
            tokens = torch.split(like.tokens_TC, counts)
        model, objective = self.model, self.objective
        with whole_rows(model) if copies > 1 else nullcontext(), objective.sharing(model, copies):
            parts = [objective.outputs(model, *own, copies) for own in zip(self.batches, tokens, strict=True)]
        return [joined(own) for own in zip(*parts, strict=True)]

    def places(self) -> list[Places | None]:
        found: list[Places | None] = [None] if self.objective.shared_rows else []
        start = 0
        for batch in self.batches:
            found += self.objective.places(batch, start)
            start += batch.num_terms
        return found

    @property
    def _num_terms(self) -> int:
        return sum(batch.num_terms for batch in self.batches)

    @property
    def examples(self) -> int:
        return sum(len(batch.places) for batch in self.batches)

    @property
    def example_tokens(self) -> int:
        shared = [self.objective.shared_tokens * len(batch.places) for batch in self.batches]
        return max([self.tokens, *shared])

    def example_passes(self) -> list[list[int]]:
        return [
            [batch.places[i] for i in rows] for batch in self.batches for rows in self.objective.example_passes(batch)
        ]

    def example_totals(self, copies: int) -> tuple[Tensor, int]:
        """Returns (sum of the terms of each example (copies, examples), number of all terms).

        The examples are in the order in which the batches were made of them.
        """
        if not self.batches:
            return torch.zeros(copies, 0), 0
        with whole_rows(self.model):
            terms = [self.objective.terms(self.model, batch, copies) for batch in self.batches]
        in_order = torch.argsort(torch.tensor([place for batch in self.batches for place in batch.places]))
        sums = torch.cat([own.of_examples() for own in terms], 1)
        return sums[:, in_order.to(sums.device)], self._num_terms

    def example_losses(self, copies: int) -> Tensor:
        sums, count = self.example_totals(copies)
        return sums * (self.examples / count)

    def row_losses(self) -> Tensor:
        """Returns the loss of each example (examples,), part by part, where all have the same perturbations."""
        with self.objective.sharing(self.model):
            sums = [self.objective.terms(self.model, batch).of_examples()[0] for batch in self.batches]
        return torch.cat(sums) * (self.examples / self._num_terms)

    @property
    def tokens(self) -> int:
        sizes = [part.input_ids_RL.numel() for batch in self.batches for part in batch.passes()]
        return max([self.objective.shared_tokens, *sizes])
