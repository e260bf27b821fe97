"""A closure from a model and a batch of tensors with labels, as loops around transformers have them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tezo.models.kinds import choose_kind
from tezo.system.errors import RequestError
from tezo.tasks.objectives.batch import Batch, Pass
from tezo.tasks.objectives.causal import CausalInTorch
from tezo.tasks.objectives.closure import BatchClosure
from tezo.tasks.objectives.evaluators import base_of

NOT_COUNTED = -100
"""The label of tokens without a loss, as in transformers."""


def closure(model: Any, batch: Mapping[str, Tensor]) -> BatchClosure:
    """Returns the closure for `optimizer.step` of a language model on a batch with labels.

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
    if not isinstance(batch, Mapping):
        raise RequestError(
            f"closure: the batch is {type(batch).__name__}; give a dictionary with tensors input_ids and labels."
        )
    _check(batch)
    config = getattr(model, "config", None)
    kind = None if config is None else choose_kind("auto", [type(base_of(model)).__name__], config)
    if kind not in ("causal", "masked"):
        raise RequestError(
            f"closure: {type(model).__name__} is no causal or masked language model; give `step` a function that "
            "returns its loss."
        )
    labels = batch["labels"][:, 1:] if kind == "causal" else batch["labels"]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    # tokens at given positions are scored alike, whether a model sees those behind them or not
    return BatchClosure(CausalInTorch(), model, [_batch(inputs, labels)])


def _batch(inputs: Mapping[str, Tensor], labels_BL: Tensor) -> Batch:
    """Returns the batch whose answer tokens are the labels that count, each predicted at its position."""
    counted_BL = labels_BL != NOT_COUNTED
    counts_B = counted_BL.sum(1)
    if not counts_B.all():
        row = int((counts_B == 0).nonzero()[0])
        raise RequestError(f"closure: row {row} of the batch has no label to be predicted; leave it out.")
    # the counted positions of each row first, in order; the others of a shorter row come behind them
    positions_BK = counted_BL.int().argsort(dim=1, descending=True, stable=True)[:, : int(counts_B.max())]
    slot_K = torch.arange(positions_BK.shape[1], device=labels_BL.device)
    valid_BK = slot_K < counts_B.unsqueeze(1)
    examples = range(len(labels_BL))
    row_B = torch.arange(len(examples), device=labels_BL.device)
    rows = Pass(
        inputs,
        ends_RL=None,
        reads_RU=positions_BK,
        row_S=row_B,
        slots_SK=slot_K.expand_as(positions_BK),
        tokens_SK=labels_BL.gather(1, positions_BK).masked_fill(~valid_BK, 0),
        valid_SK=valid_BK,
        example_S=row_B,
        option_S=torch.zeros_like(row_B),
        shared_S=torch.zeros_like(row_B),
        example_R=examples,
    )
    return Batch([rows], None, num_terms=int(counts_B.sum()), shape_BO=(len(examples), 1), places=examples)


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
