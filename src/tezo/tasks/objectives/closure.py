"""The loss of a model on batches: free functions of scores, and the closure that runs the model and applies them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tezo.directions.outputs import Outputs, Places, joined
from tezo.forward.layers import LayerFunction
from tezo.forward.watching import Watcher
from tezo.optim.closures import RowLosses, RowOutputs
from tezo.tasks.objectives.batch import Batch
from tezo.tasks.objectives.evaluators import Evaluator, TextEvaluator, whole_rows


def terms(scores: Tensor, batch: Batch) -> Tensor:
    """Returns the T terms of the loss of each copy, (copies, T), whose sum over their number is the loss.

    Of examples with a label a term is the cross-entropy over the options of one, of free text the negative
    log-likelihood of an answer token, 0 for padding.

    Args:
        scores: of the options, (copies, B, O), or the log-probabilities of the answer tokens, (copies, S, K).
        batch: the batch.
    """
    if batch.labels_B is None:
        return -scores.flatten(1)
    labels_X = batch.labels_B.repeat(len(scores))
    return functional.cross_entropy(scores.flatten(0, 1), labels_X, reduction="none").view(len(scores), -1)


def of_examples(terms_CT: Tensor, batch: Batch) -> Tensor:
    """Returns the sum of the terms of each example, (copies, B)."""
    if batch.labels_B is None:
        example_S = torch.cat([rows.example_S for rows in batch.passes])
        example_T = example_S.repeat_interleave(terms_CT.shape[1] // len(example_S))
    else:
        example_T = torch.arange(len(batch.labels_B), device=terms_CT.device)
    sums_CB = terms_CT.new_zeros(len(terms_CT), batch.shape_BO[0])
    return sums_CB.index_add_(1, example_T, terms_CT)


def option_outputs(scores_CBO: Tensor, batch: Batch, shared: bool) -> list[Outputs]:
    """Returns the outputs of each copy for examples with a label; `shared`: all have the same options."""
    assert batch.labels_B is not None
    examples_B = torch.tensor(batch.places, device=batch.labels_B.device)
    return [Outputs(scores_BO, batch.labels_B, examples_B, shared=shared) for scores_BO in scores_CBO]


def token_outputs(likely: Sequence[tuple[Tensor, Tensor]], batch: Batch) -> list[Outputs]:
    """Returns the outputs of each copy for free text; `likely`: as `Evaluator.likely_tokens` returns it."""
    places_B = torch.tensor(batch.places, device=batch.passes[0].example_S.device)
    examples = [places_B[rows.example_S].repeat_interleave(rows.valid_SK.sum(1)) for rows in batch.passes]
    example_T = torch.cat(examples)
    return [Outputs(scores_TC, torch.zeros_like(example_T), example_T, tokens_TC) for scores_TC, tokens_TC in likely]


def option_places(batch: Batch, start: int, causal: bool) -> list[Places]:
    """Returns where the examples with a label are in each pass of a batch, `start` being the number of the first.

    `causal`: whether an answer depends on the tokens before it alone.
    """
    found = []
    for rows in batch.passes:
        row_P, position_P = rows.deciding_reads()
        stop_P = position_P + 1 if causal else rows.inputs["attention_mask"].sum(1)[row_P]
        place_P = start + rows.example_S[rows.option_S == 0]
        found.append(Places(row_P, position_P, stop_P, place_P, start + torch.tensor(rows.example_R)))
    return found


def token_places(batch: Batch, start: int) -> list[Places]:
    """Returns where the answer tokens are in each pass of a batch, `start` being the number of the first."""
    found = []
    for rows in batch.passes:
        row_T, position_T = rows.answer_reads()
        place_T = start + torch.arange(len(row_T))
        found.append(Places(row_T, position_T, torch.zeros_like(row_T), place_T, torch.tensor(rows.example_R)))
        start += len(row_T)
    return found


@dataclass(frozen=True)
class BatchClosure(RowLosses, RowOutputs):
    """The loss of a model on the parts of a batch, with the parameters at the time of the call.

    Hooks may perturb each copy differently, and in `example_losses` each example of each copy: the rows of a copy are
    one block along the leading dimension.

    Attributes:
        evaluator: runs the model.
        model: the model.
        batches: the parts.
        shared: whether all examples have the same options.
        stepped, held_out: see `RowOutputs`.
        reduction: "sum": `losses` and `example_losses` are sums of terms, for ranks that add theirs up.
    """

    evaluator: Evaluator
    model: Any
    batches: Sequence[Batch]
    shared: bool = False
    stepped: int | None = None
    held_out: RowOutputs | None = None
    reduction: Literal["mean", "sum"] = "mean"

    @property
    def scores(self) -> Callable[[Any, Batch, int], Tensor]:
        """The function of the evaluator whose scores the loss is of; see `terms`."""
        text = self._of_text
        return self.evaluator.option_scores if text is None else text.token_log_probs

    @property
    def num_terms(self) -> int:
        """Number of terms of the loss."""
        return sum(batch.num_terms for batch in self.batches)

    @property
    def _of_text(self) -> TextEvaluator | None:
        """The evaluator, where answers are free text; None: examples have a label."""
        if all(batch.labels_B is not None for batch in self.batches):
            return None
        assert isinstance(self.evaluator, TextEvaluator)
        return self.evaluator

    @property
    def are_texts(self) -> bool:
        return self._of_text is not None

    @property
    def _is_causal(self) -> bool:
        return isinstance(self.evaluator, TextEvaluator)

    @property
    def most_copies(self) -> int | None:
        return self.evaluator.most_copies

    @property
    def tokens(self) -> int:
        return max([self.evaluator.shared_tokens, *(rows.tokens for batch in self.batches for rows in batch.passes)])

    @property
    def examples(self) -> int:
        return sum(len(batch.places) for batch in self.batches)

    @property
    def example_tokens(self) -> int:
        return max([self.tokens, *(self.evaluator.shared_tokens * len(batch.places) for batch in self.batches)])

    def losses(self, copies: int) -> Tensor:
        if not self.batches:  # of a rank where there are fewer rows than ranks
            return torch.zeros(copies)
        model, scores, found = self.model, self.scores, []
        with whole_rows(model) if copies > 1 else nullcontext(), self.evaluator.sharing(model, copies):
            for batch in self.batches:
                found.append(terms(scores(model, batch, copies), batch).sum(1))
        sums_C = torch.stack(found).sum(0)
        return sums_C / self.num_terms if self.reduction == "mean" else sums_C

    def example_losses(self, copies: int) -> Tensor:
        if not self.batches:
            return torch.zeros(copies, 0)
        model, scores, found = self.model, self.scores, []
        with whole_rows(model):
            for batch in self.batches:
                found.append(of_examples(terms(scores(model, batch, copies), batch), batch))
        in_order = torch.argsort(torch.tensor([place for batch in self.batches for place in batch.places]))
        sums_CB = torch.cat(found, 1)
        sums_CB = sums_CB[:, in_order.to(sums_CB.device)]
        return sums_CB * (self.examples / self.num_terms) if self.reduction == "mean" else sums_CB

    def example_passes(self) -> list[list[int]]:
        found = []
        for batch in self.batches:
            rows_of_passes = [rows.example_R for rows in batch.passes]
            if self.evaluator.shared_rows:  # per example, in one more pass
                rows_of_passes.append(sorted([*range(batch.shape_BO[0])] * self.evaluator.shared_rows))
            found += [[batch.places[i] for i in examples] for examples in rows_of_passes]
        return found

    def row_losses(self) -> Tensor:
        """Returns the loss of each example (examples,), part by part, where all have the same perturbations."""
        model, scores, found = self.model, self.scores, []
        with self.evaluator.sharing(model):
            for batch in self.batches:
                found.append(of_examples(terms(scores(model, batch, 1), batch), batch)[0])
        return torch.cat(found) * (self.examples / self.num_terms)

    def summands(self) -> Iterator[Tensor]:
        if not self._is_causal:
            yield self.losses(1)[0]
            return
        for batch in self.batches:  # the graph of one has the logits of many places
            yield terms(self.scores(self.model, batch, 1), batch).sum(1)[0] / self.num_terms

    def outputs(self, like: Outputs | None = None) -> Outputs:
        return self.outputs_of(1, like)[0]

    def outputs_of(self, copies: int, like: Outputs | None = None) -> list[Outputs]:
        model, text, found = self.model, self._of_text, []
        counts = [batch.num_terms for batch in self.batches]
        asked: Sequence[Tensor | None] = [None] * len(counts)
        if like is not None and like.tokens_TC is not None:
            asked = torch.split(like.tokens_TC, counts)
        with whole_rows(model) if copies > 1 else nullcontext(), self.evaluator.sharing(model, copies):
            for batch, tokens_TC in zip(self.batches, asked, strict=True):
                if text is not None:
                    found.append(token_outputs(text.likely_tokens(model, batch, tokens_TC, copies), batch))
                else:
                    found.append(option_outputs(self.evaluator.option_scores(model, batch, copies), batch, self.shared))
        return [joined(parts) for parts in zip(*found, strict=True)]

    def places(self) -> list[Places | None]:
        found: list[Places | None] = [None] if self.evaluator.shared_rows else []
        start = 0
        for batch in self.batches:
            found += token_places(batch, start) if self.are_texts else option_places(batch, start, self._is_causal)
            start += batch.num_terms
        return found

    def deciding_tokens(self) -> Tensor | None:
        if self.are_texts or not (self.shared and self._is_causal and self.batches):
            return None
        tokens_C = self.batches[0].passes[0].deciding_tokens()
        return tokens_C if len(tokens_C) == self.batches[0].shape_BO[1] else None

    def watching(self, model: Any, watcher: Watcher) -> AbstractContextManager[None]:
        return self.evaluator.watching(model, watcher, self.places())

    def head_rows(self, model: Any, rows_X: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.evaluator.head_rows(model, rows_X, like)

    def layer_function(self, model: Any, name: str, inputs: int, like: Tensor) -> LayerFunction:
        return self.evaluator.layer_function(model, name, inputs, like)
