"""Forward and backward passes on torch's meta device, where tensors have shapes and no values: their memory and work.

The model, its adapter and the operations are the real ones, so that a model of any size is counted in seconds and in
no memory.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tezo.directions.targets import device_of
from tezo.models.adapters.adapter_kind import import_peft, virtual_task_type
from tezo.models.loading import LoadedModel
from tezo.models.model_config import ModelConfig
from tezo.models.peft_adapters import add_adapter
from tezo.studies.bench.settings import Settings
from tezo.studies.bench.shapes import SHAPES, skeleton
from tezo.tasks.objectives.logits import logits_at

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


def meta_model(settings: Settings, peft: str = "none") -> Any:
    """The model of `settings` on the meta device, with a new adapter of this type, see `ModelConfig.peft`.

    Args:
        settings: model (a key of `SHAPES`) and dtype.
        peft: "none", "lora" or "prefix".
    """
    model = skeleton(SHAPES[settings.model].make(), getattr(torch, settings.dtype), META)
    if peft == "none":
        return model
    config = ModelConfig(name=settings.model, peft=peft)  # type: ignore[arg-type]
    with META:
        if peft == "prefix":
            return _with_prefix(model, config.prefix_length)
        return add_adapter(LoadedModel(model, None, "causal"), config, seed=0).model


def _with_prefix(model: Any, count: int) -> Any:
    """The model with a prefix of `count` tokens that has no values: `add_adapter` computes them by a pass."""
    peft = import_peft()
    settings = peft.PrefixTuningConfig(task_type=virtual_task_type("causal"), num_virtual_tokens=count)
    return peft.get_peft_model(model, settings).eval()


def dry_pass(model: Any, rows: int, length: int, *, backward: bool = False) -> DryPass:
    """One pass over a batch, with the loss at the last position of each row, as in `bench.workload`.

    Args:
        model: model on any device; gradients are those of its parameters that require one.
        rows: rows of the batch.
        length: tokens of each row.
        backward: whether the loss is differentiated, in training mode; the gradients are then part of the peak.
    """
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device_of(model))
    last_S1 = ids.new_full((rows, 1), length - 1)
    model.train(backward)
    live = LiveBytes(model.parameters())
    with FlopCounterMode(display=False) as work, live, torch.set_grad_enabled(backward):
        logits_SKV = logits_at(model, {"input_ids": ids} | _mask(model, ids), last_S1)
        loss = functional.cross_entropy(logits_SKV.flatten(0, 1), ids[:, 0])
        del logits_SKV
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return DryPass(live.peak, work.get_total_flops())


def _mask(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """A ready mask and positions: transformers makes its own from values, which these tensors do not have."""
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:  # PEFT makes both
        return {}
    rows, length = ids.shape
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device=ids.device)
    return {"attention_mask": mask, "position_ids": ids}
