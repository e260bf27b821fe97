"""Logits at selected positions: the head is applied only there, not at all positions."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tezo.system.errors import RequestError


def logits_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> Tensor:
    """The logits (S, K, vocabulary) at `positions_SK` of each row, float32 or wider.

    The model's own forward pass runs, including soft-capping and scaling. A hook before the head keeps only the
    hidden states at these positions, so the head sees K of L positions. If the model never calls its head as a
    module, all logits are computed and the needed ones selected.

    Args:
        model: a causal or masked language model of transformers.
        inputs: keyword arguments of its forward pass.
        positions_SK: positions in each row, int64.
    """
    picked = False

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        nonlocal picked
        picked = True
        return (_pick(of_text(args[0], inputs["input_ids"]), positions_SK), *args[1:])

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(keep) if head is not None else None
    try:
        logits = model(**inputs, **no_cache(model)).logits
    finally:
        if handle is not None:
            handle.remove()
    if not picked:
        logits = _pick(of_text(logits, inputs["input_ids"]), positions_SK)
    wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide


def hidden_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> Tensor:
    """The inputs of the model's head at `positions_SK` of each row, (S, K, D).

    Raises:
        RequestError: the model does not call its head as a module.
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
        raise RequestError("probe is set, but the input of this model's output head cannot be read; leave it out.")
    return _pick(of_text(seen[-1], inputs["input_ids"]), positions_SK)


def of_text(values_SLD: Tensor, input_ids_SL: Tensor) -> Tensor:
    """The outputs at the positions of the input: those of virtual tokens, which come before it, are left out."""
    return values_SLD[:, values_SLD.shape[1] - input_ids_SL.shape[1] :]


def _pick(values_SLD: Tensor, positions_SK: Tensor) -> Tensor:
    rows_S1 = torch.arange(values_SLD.shape[0], device=values_SLD.device).unsqueeze(1)
    return values_SLD[rows_S1, positions_SK.to(values_SLD.device)]


def no_cache(model: Any) -> dict[str, bool]:
    """The keyword that turns off the cache of keys and values, if the model has it; nothing here uses the cache."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper passes it on
    return {"use_cache": False} if "use_cache" in inspect.signature(base.forward).parameters else {}
