"""Logits at selected positions: the head is applied only there, not at all positions."""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tezo.system.errors import RequestError


def logits_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> Tensor:
    """Returns the logits (S, K, vocabulary) at `positions_SK` (int64) of each row, float32 or wider.

    The own forward pass of a causal or masked model runs on `inputs`, including soft-capping and scaling. A hook before
    the head keeps only the hidden states at these positions. If the model never calls its head as a module, all logits
    are computed and the needed ones selected.
    """
    picked = False

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        nonlocal picked
        picked = True
        return (_pick(of_text(args[0], inputs["input_ids"]), positions_SK), *args[1:])

    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(keep) if head is not None else nullcontext():
        logits = model(**inputs, **no_cache(model)).logits
    if not picked:
        logits = _pick(of_text(logits, inputs["input_ids"]), positions_SK)
    wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide


def logits_and_hidden_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits as `logits_at` does, and the inputs of the model's head there, (S, K, D).

    Raises:
        RequestError: the model does not call its head as a module.
    """
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, args: seen.append(args[0])) if head is not None else nullcontext():
        logits = logits_at(model, inputs, positions_SK)
    if not seen:
        raise RequestError("probe is set, but the input of this model's output head cannot be read; leave it out.")
    return logits, _pick(of_text(seen[-1], inputs["input_ids"]), positions_SK)


def of_text(values_SLD: Tensor, input_ids_SL: Tensor) -> Tensor:
    """Returns the outputs at the positions of the input, without those of the virtual tokens before it."""
    return values_SLD[:, values_SLD.shape[1] - input_ids_SL.shape[1] :]


def _pick(values_SLD: Tensor, positions_SK: Tensor) -> Tensor:
    rows_S1 = torch.arange(values_SLD.shape[0], device=values_SLD.device).unsqueeze(1)
    return values_SLD[rows_S1, positions_SK.to(values_SLD.device)]


def base_of(model: Any) -> Any:
    """Returns the model of transformers, which PEFT may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def no_cache(model: Any) -> dict[str, bool]:
    """Returns the keyword that turns off the cache of keys and values, if the model has it."""
    return {"use_cache": False} if "use_cache" in inspect.signature(base_of(model).forward).parameters else {}
