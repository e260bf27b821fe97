"""Forward and backward passes on torch's meta device, where tensors have shapes and no values: their memory and work.

The model, its adapter and the operations are the real ones, so that a model of any size is counted in seconds and in
no memory.
"""

import copy
import inspect
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from tezo.directions.targets import device_of
from tezo.tasks.objectives.readers import logits_at, no_cache

META = torch.device("meta")


@dataclass(frozen=True)
class DryPass:
    """The cost of a pass over a batch.

    Attributes:
        peak: largest number of bytes of tensors that exist at a time, without the model's parameters.
        flops: floating-point operations of the matrix products.
    """

    peak: int
    flops: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, counts the bytes of the tensors that operations make, until they are freed.

    Args:
        known: tensors that are not counted, such as parameters.

    Attributes:
        peak: largest number of bytes at a time.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = [tensor.untyped_storage() for tensor in known]
        self._live: dict[int, int] = {id(storage): 0 for storage in self._known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._live:  # a view, or an operation in place
            return
        self._live[id(storage)] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._drop, id(storage)).atexit = False

    def _drop(self, key: int) -> None:
        self._now -= self._live.pop(key)


def meta_twin(model: Any) -> Any:
    """A model of the class, configuration and dtype of `model`, a model of transformers, on the meta device.

    Its layers are plain ones where those of `model` are packed.
    """
    config = copy.deepcopy(model.config)
    with META, no_init_weights():
        twin = type(model)(config).to(model.dtype)
    twin.tie_weights()
    return twin.eval()


def dry_pass(model: Any, rows: int, length: int, *, backward: bool = False) -> DryPass:
    """The cost of one pass over a batch; the arguments are those of `pass_peak`."""
    work = FlopCounterMode(display=False)
    peak = pass_peak(model, rows, length, backward=backward)
    _run(model, rows, length, work, backward=backward)  # apart: this counter keeps what checkpointing frees
    return DryPass(peak, work.get_total_flops())


def pass_peak(model: Any, rows: int, length: int, *, backward: bool = False) -> int:
    """`DryPass.peak` of one pass over a batch, with the loss at the last position of each row, as in `bench.workload`.

    A model without an output head over a vocabulary has the mean of its first output as its loss.

    Args:
        model: model on any device; gradients are those of its parameters that require one.
        rows: rows of the batch.
        length: tokens of each row.
        backward: whether the loss is differentiated, in training mode; the gradients are then part of the peak.
    """
    live = LiveBytes(model.parameters())
    _run(model, rows, length, live, backward=backward)
    return live.peak


def _run(model: Any, rows: int, length: int, counter: Any, *, backward: bool) -> None:
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device_of(model))
    model.train(backward)
    with counter, torch.set_grad_enabled(backward):
        loss = _loss(model, {"input_ids": ids} | _mask(model, ids))
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def _loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    if model.get_output_embeddings() is None:
        first: Tensor = model(**inputs, **no_cache(model))[0]
        return first.float().mean()
    ids_SL = inputs["input_ids"]
    last_S1 = ids_SL.new_full((len(ids_SL), 1), ids_SL.shape[1] - 1)
    return functional.cross_entropy(logits_at(model, inputs, last_S1).flatten(0, 1), ids_SL[:, 0])


def _mask(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """A ready mask and positions: transformers makes its own from values, which these tensors do not have."""
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:  # PEFT makes both
        return {}
    rows, length = ids.shape
    base = model.get_base_model() if config is not None else model
    ready = {
        "attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool, device=ids.device),
        "position_ids": ids,
    }
    return {key: value for key, value in ready.items() if key in inspect.signature(base.forward).parameters}


@contextmanager
def valueless(model: Any) -> Iterator[Any]:
    """While open, the parameters of a model on the meta device are on the CPU: one zero, repeated, in their shapes.

    Optimizers refuse parameters that have no values at all; these take no memory either.
    """
    owners = [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]
    before = [getattr(module, name) for module, name in owners]
    stand_ins: dict[Tensor, nn.Parameter] = {own: _one_zero(own) for own in before}
    try:
        for (module, name), own in zip(owners, before, strict=True):
            setattr(module, name, stand_ins[own])
        yield model
    finally:
        for (module, name), own in zip(owners, before, strict=True):
            setattr(module, name, own)


def _one_zero(parameter: nn.Parameter) -> nn.Parameter:
    zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return nn.Parameter(zero, requires_grad=parameter.requires_grad)
