"""Only the needed logits: the head is applied at the positions that are asked for, not at all of them."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tezo.errors import RequestError


def logits_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> Tensor:
    """The logits (S, K, vocabulary) at `positions_SK` of each row, float32 or wider.

    The model's own forward does the rest of the work, soft-capping and scaling included: a hook before
    its head keeps the hidden states of those positions alone, so the head sees K positions of L. A model
    whose head is not a module that is called gives all its logits, and those that are needed are picked.

    Args:
        model: a causal or masked language model of transformers.
        inputs: keyword arguments of its forward.
        positions_SK: which positions, per row.
    """
    picked = False

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        nonlocal picked
        picked = True
        return (_pick(args[0], positions_SK), *args[1:])

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(keep) if head is not None else None
    try:
        logits = model(**inputs, **_no_cache(model)).logits
    finally:
        if handle is not None:
            handle.remove()
    if not picked:
        logits = _pick(logits, positions_SK)
    wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide


def hidden_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> Tensor:
    """The hidden states (S, K, D) that the model's head sees at `positions_SK` of each row.

    Raises:
        RequestError: its head is not a module that is called.
    """
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0])) if head is not None else None
    try:
        logits_at(model, inputs, positions_SK)
    finally:
        if handle is not None:
            handle.remove()
    if not seen:
        raise RequestError("probe is set, but this model's output head is no module whose input can be read.")
    return _pick(seen[-1], positions_SK)


def _pick(values_SLD: Tensor, positions_SK: Tensor) -> Tensor:
    rows_S1 = torch.arange(values_SLD.shape[0], device=values_SLD.device).unsqueeze(1)
    return values_SLD[rows_S1, positions_SK.to(values_SLD.device)]


def _no_cache(model: Any) -> dict[str, bool]:
    """The keyword by which a causal model is told not to keep its keys and values, which nothing here reads again."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper hands it on
    return {"use_cache": False} if "use_cache" in inspect.signature(base.forward).parameters else {}
