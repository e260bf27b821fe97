"""A closure from a model and a batch of tensors with labels, as loops around transformers have them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tezo.directions.outputs import Outputs, Places, of_tokens
from tezo.models.kinds import choose_kind
from tezo.optim.closures import RowLosses, RowOutputs
from tezo.system.errors import RequestError
from tezo.tasks.objectives.objective import whole_rows
from tezo.tasks.objectives.readers import base_of, logits_at

NOT_COUNTED = -100
"""The label of tokens without a loss, transformers' own."""


class LabelledTensors(RowLosses, RowOutputs):
    """The closure for `optimizer.step` of a language model on a batch with labels.

    `optimizer.step(tezo.closure(model, batch))` is `optimizer.step(lambda: model(**batch).loss)`, up to rounding, in
    less time: the output head is applied at the labelled positions only, and both signs of a step share a forward pass
    where that is faster. An optimizer with `directions="per-example"` gets the loss of each row.

    Args:
        model: causal or masked language model of transformers.
        batch: keyword arguments of its forward pass, with `input_ids` and `labels`, (rows, tokens) each. In a causal
            model the label at position i is predicted at position i - 1. Every other tensor has one entry a row, too.

    Raises:
        RequestError: the model is of another kind, labels are missing or have another shape, or a row has none.
    """

    def __init__(self, model: Any, batch: Mapping[str, Tensor]) -> None:
        if not isinstance(batch, Mapping):
            raise RequestError(
                f"closure: the batch is {type(batch).__name__}; give a dictionary with tensors input_ids and labels."
            )
        self._model = model
        self._inputs = {key: value for key, value in batch.items() if key != "labels"}
        _check(batch)
        config = getattr(model, "config", None)
        kind = None if config is None else choose_kind("auto", [type(base_of(model)).__name__], config)
        if kind not in ("causal", "masked"):
            raise RequestError(
                f"closure: {type(model).__name__} is no causal or masked language model; give `step` a function that "
                "returns its loss."
            )
        labels = batch["labels"][:, 1:] if kind == "causal" else batch["labels"]
        counted = labels != NOT_COUNTED
        counts_B = counted.sum(1)
        if not counts_B.all():
            row = int((counts_B == 0).nonzero()[0])
            raise RequestError(f"closure: row {row} of the batch has no label to be predicted; leave it out.")
        # the counted positions of each row first, in order; the others of a shorter row come behind them
        self._positions_BK = counted.int().argsort(dim=1, descending=True, stable=True)[:, : int(counts_B.max())]
        places = torch.arange(self._positions_BK.shape[1], device=labels.device)
        self._valid_BK = places < counts_B.unsqueeze(1)
        self._labels_BK = labels.gather(1, self._positions_BK).masked_fill(~self._valid_BK, 0)

    @property
    def tokens(self) -> int:
        return int(self._inputs["input_ids"].numel())

    @property
    def examples(self) -> int:
        return len(self._valid_BK)

    def losses(self, copies: int) -> Tensor:
        return self._sums(copies).sum(1) / self._valid_BK.sum()

    def example_passes(self) -> list[list[int]]:
        return [list(range(self.examples))]

    def example_losses(self, copies: int) -> Tensor:
        return self._sums(copies) * (self.examples / self._valid_BK.sum())

    def outputs(self, like: Outputs | None = None) -> Outputs:
        with whole_rows(self._model):
            logits_BKV = logits_at(self._model, self._inputs, self._positions_BK)
        valid_BK = self._valid_BK.to(logits_BKV.device)
        right_T = self._labels_BK.to(logits_BKV.device)[valid_BK]
        tokens_TC = None if like is None else like.tokens_TC
        scores_TC, tokens_TC = of_tokens(logits_BKV[valid_BK].log_softmax(-1), right_T, tokens_TC)
        example_T = torch.arange(self.examples, device=right_T.device).repeat_interleave(valid_BK.sum(1))
        return Outputs(scores_TC, torch.zeros_like(right_T), example_T, tokens_TC)

    def places(self) -> list[Places | None]:
        row_T = torch.arange(self.examples).repeat_interleave(self._valid_BK.sum(1).cpu())
        position_T = self._positions_BK.cpu()[self._valid_BK.cpu()]
        return [
            Places(row_T, position_T, torch.zeros_like(row_T), torch.arange(len(row_T)), torch.arange(self.examples))
        ]

    def _sums(self, copies: int) -> Tensor:
        """Returns the sum of the losses of each row's tokens, (copies, rows)."""
        inputs = {key: torch.cat([value] * copies) if copies > 1 else value for key, value in self._inputs.items()}
        with whole_rows(self._model):
            logits = logits_at(self._model, inputs, self._positions_BK.repeat(copies, 1))
        labels = self._labels_BK.repeat(copies, 1).to(logits.device)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view(copies, *self._valid_BK.shape) * self._valid_BK.to(losses.device)).sum(2)


def _check(batch: Mapping[str, Tensor]) -> None:
    for key in ("input_ids", "labels"):
        if not isinstance(batch.get(key), Tensor):
            if batch.get(key) is not None:
                other = type(batch[key]).__name__
                raise RequestError(f"closure: {key} is {other}, and no tensor; give torch.as_tensor(...) of it.")
            hint = "; batch['labels'] = batch['input_ids'] counts every token" if key == "labels" else ""
            raise RequestError(f"closure: the batch has no tensor {key!r}{hint}.")
    rows = batch["input_ids"].shape
    if batch["labels"].shape != rows or len(rows) != 2:
        raise RequestError(
            f"closure: input_ids have the shape {tuple(rows)} and labels {tuple(batch['labels'].shape)}; both must be "
            "(rows, tokens)."
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.shape[:1] != rows[:1]:
            raise RequestError(
                f"closure: {key} has no entry for each row of the batch; leave it out, or give its loss."
            )


closure = LabelledTensors
