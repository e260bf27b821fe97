"""Only the needed logits: the head is applied at the positions that are asked for, not at all of them."""

from typing import Any

import torch
from torch import Tensor, nn


def logits_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> Tensor:
    """The logits (S, K, vocabulary) at `positions_SK` of each row, float32 or wider.

    The model's own forward does the rest of the work, soft-capping and scaling included: a hook on its
    body keeps the hidden states of those positions alone, so the head sees K positions of L.

    Args:
        model: a causal or masked language model of transformers.
        inputs: keyword arguments of its forward.
        positions_SK: which positions, per row.
    """
    body = model.base_model

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del module, args
        output.last_hidden_state = _pick(output.last_hidden_state, positions_SK)
        return output

    if body is model:
        logits = _pick(model(**inputs).logits, positions_SK)
    else:
        handle = body.register_forward_hook(keep)
        try:
            logits = model(**inputs).logits
        finally:
            handle.remove()
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _pick(values_SLD: Tensor, positions_SK: Tensor) -> Tensor:
    rows_S1 = torch.arange(values_SLD.shape[0], device=values_SLD.device).unsqueeze(1)
    return values_SLD[rows_S1, positions_SK.to(values_SLD.device)]
