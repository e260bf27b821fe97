"""The loss of a step of Trainer, of all its micro-batches together or of each of their rows; and its rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tezo.directions.random import permutation
from tezo.optim.learning_rate import TRIAL_STEPS
from tezo.system.errors import RequestError
from tezo.tasks.objectives.labelled_tensors import NOT_COUNTED
from tezo.training.rows_of_steps import HELD_OUT_ROWS, BatchSampler, Rows

CLOSE = 1e-4
"""Largest difference of two sums of the same losses, as a part of their size: rounding."""


class StepLoss:
    """The loss that Trainer's `compute_loss` gives for the micro-batches of one step.

    Args:
        trainer: a transformers.Trainer.
        batches: the micro-batches, as `compute_loss` takes them. A batch of all their rows has the same loss: the sum
            that Trainer's accumulation makes.
        num_items: number of labels in all of them, by which `compute_loss` divides; None: it is not known.
    """

    def __init__(self, trainer: Any, batches: Sequence[Mapping[str, Any]], num_items: Any) -> None:
        self._trainer = trainer
        self._batches = batches
        self._num_items = num_items

    def loss(self) -> Tensor:
        """The loss, a scalar."""
        losses = [self._loss(batch) for batch in self._batches]
        return torch.stack(losses).sum()

    def row_losses(self) -> Tensor:
        """(rows,): losses of the rows of all micro-batches, in order, whose mean is `loss`.

        Raises:
            RequestError: the loss is not a sum over the labels of the rows that follows from the model's output.
        """
        shares = torch.cat([self._shares(batch) for batch in self._batches])
        return shares * len(shares)

    def closure(self, *, per_example: bool) -> Callable[[], Tensor]:
        """The closure of a step: `row_losses` if directions are per example, else `loss`."""
        return self.row_losses if per_example else self.loss

    def row_losses_or_loss(self) -> Tensor:
        """`row_losses` if they follow from the model's output, else `loss`."""
        try:
            return self.row_losses()
        except RequestError:
            return self.loss()

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        trainer = self._trainer
        with trainer.compute_loss_context_manager():  # a copy, since it takes the labels out
            loss: Tensor = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=self._num_items)
        return loss if self._is_scaled else loss / len(self._batches)

    @property
    def _is_scaled(self) -> bool:
        """Whether `compute_loss` divides by the labels of all micro-batches; otherwise Trainer takes their mean."""
        said = getattr(self._trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if said is not None:
            return bool(said)
        counted = self._trainer.model_accepts_loss_kwargs and self._num_items is not None
        return counted or self._trainer.compute_loss_func is not None

    def _shares(self, batch: Mapping[str, Any]) -> Tensor:
        """(rows,): the share of each row of a micro-batch in the loss."""
        outputs: list[Any] = []
        handle = self._trainer.model.register_forward_hook(lambda *passed: outputs.append(passed[-1]))
        try:
            loss = self._loss(batch)
        finally:
            handle.remove()
        if isinstance(batch.get("labels"), Tensor) and not bool(loss.isfinite()):
            return loss.expand(len(batch["labels"]))  # the step says so
        for sums_B, count in _row_sums(outputs[-1] if len(outputs) == 1 else None, batch.get("labels")):
            for total in (self._num_items, count, count * len(self._batches)):
                if total is not None and _is_close(sums_B.sum() / total, loss):
                    return sums_B / total
        raise RequestError(
            "this loss is not a mean over the labels of the rows that follows from the model's output; set "
            "method_options={'directions': 'shared'}."
        )


class TrainerRows(Rows):
    """The rows of a Trainer, before it trains on them. Its evaluation rows compare rates where there are some.

    Args:
        loss_of: data set and the numbers of some of its rows -> their loss.
        train: training rows, which have a length.
        other: evaluation rows, or None.
        batch_size: rows of a step.
        seed: of the draws of rows.
        shared: whether there are no losses per row, because the user gave the loss.
    """

    def __init__(
        self,
        loss_of: Callable[[Any, Sequence[int]], StepLoss],
        train: Any,
        other: Any,
        batch_size: int,
        seed: int,
        *,
        shared: bool,
    ) -> None:
        self._loss_of, self._train, self._size = loss_of, train, batch_size
        self._sampler = BatchSampler(range(len(train)), batch_size, seed)
        self._source, others = other, list(range(len(other) if other is not None else 0))
        if not others:
            seen = {row for step in range(TRIAL_STEPS) for row in self._sampler.rows(step)}
            self._source, others = train, [row for row in range(len(train)) if row not in seen]
        order = permutation(len(others), seed=seed, step=0, name="learning rate")[:HELD_OUT_ROWS]
        self._others = [others[i] for i in order]
        self.held_out = len(self._others)
        self.share_directions = shared

    def loss(self, step: int) -> StepLoss:
        """The loss of as many rows as that step has."""
        return self._loss_of(self._train, self._sampler.rows(step))

    def step(self, step: int, *, per_example: bool) -> Callable[[], Tensor]:
        return self.loss(step).closure(per_example=per_example)

    def losses(self, step: int, *, per_example: bool) -> Callable[[], Tensor]:
        del per_example
        return self.loss(step).row_losses_or_loss

    def few(self) -> Callable[[], Tensor]:
        return self._loss_of(self._train, range(min(2, len(self._train)))).row_losses

    def held_out_losses(self) -> list[float]:
        parts = (self._others[start : start + self._size] for start in range(0, self.held_out, self._size))
        losses = (self._loss_of(self._source, part).row_losses_or_loss() for part in parts)
        return [value for part in losses for value in part.reshape(-1).tolist()]


def _is_close(value: Tensor, loss: Tensor) -> bool:
    return bool((value - loss).abs() <= CLOSE * loss.abs())


def _row_sums(outputs: Any, labels: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """((rows,) sums of losses over the labels of each row, number of labels), in every way that the shapes allow."""
    if not isinstance(outputs, Mapping) or not isinstance(labels, Tensor):
        return
    if isinstance(outputs.get("log_probs"), Tensor):  # TRL's fused output head, which makes no logits
        yield -outputs["log_probs"].sum(1), _count(labels[:, 1:])
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor):
        return
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if labels.is_floating_point():
        if logits.numel() == labels.numel():
            yield (logits.flatten() - labels.flatten()).square(), torch.tensor(labels.numel(), device=labels.device)
    elif labels.ndim == 1 and logits.ndim == 2:
        yield cross_entropy(logits, labels, reduction="none", ignore_index=NOT_COUNTED), _count(labels)
    elif labels.ndim == 2 and logits.shape[:2] == labels.shape:
        yield _token_losses(logits[:, :-1], labels[:, 1:]), _count(labels[:, 1:])  # of the next token
        yield _token_losses(logits, labels), _count(labels)


def _token_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return cross_entropy(logits_BTV.transpose(1, 2), labels_BT, reduction="none", ignore_index=NOT_COUNTED).sum(1)


def _count(labels: Tensor) -> Tensor:
    return (labels != NOT_COUNTED).sum()
