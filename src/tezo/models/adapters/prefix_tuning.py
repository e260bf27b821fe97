"""Prefix tuning (Li and Liang, 2021, arXiv 2101.00190): keys and values in front of the text, in every layer."""

import torch
from torch import Tensor
from transformers import DynamicCache

from tezo.errors import RequestError
from tezo.models.adapters.adapter_kind import (
    AdapterKind,
    NewAdapter,
    import_peft,
    random_tokens,
    virtual_task_type,
)
from tezo.models.loading import LoadedModel
from tezo.models.model_config import ModelConfig


def _make(loaded: LoadedModel, config: ModelConfig, seed: int) -> NewAdapter:
    """The prefix starts with the model's own keys and values of random tokens, as MeZO's prefix does.

    So the model starts as the base model with these tokens in front of every text. (In a masked model or an encoder the
    tokens do not read the text.) Random numbers, PEFT's default, are no keys of this model.
    """
    states = _states(loaded, random_tokens(loaded, config.prefix_length, seed))
    shapes = {tuple(state.shape) for state in states}
    if len(shapes) != 1:
        raise RequestError(
            "model.peft is prefix, which needs a model that keeps keys and values of one shape in all layers; use lora "
            "or prompt."
        )
    ((_, heads, count, width),) = shapes
    settings = import_peft().PrefixTuningConfig(
        task_type=virtual_task_type(loaded.kind),
        num_virtual_tokens=count,
        num_layers=len(states) // 2,
        num_attention_heads=heads,
        token_dim=heads * width,
    )
    # PEFT reads a row as (layer, key or value, head, entry)
    rows = [state[0].transpose(0, 1).to("cpu", torch.float32) for state in states]
    return NewAdapter(settings, torch.stack(rows, 1).flatten(1))


@torch.no_grad()
def _states(loaded: LoadedModel, tokens_1V: Tensor) -> list[Tensor]:
    """The keys and the values (1, heads, V, width) of each layer in turn; empty if the model keeps none."""
    cache = DynamicCache()
    loaded.model(input_ids=tokens_1V, attention_mask=torch.ones_like(tokens_1V), past_key_values=cache)
    return [state for layer in cache.layers for state in (layer.keys, layer.values)]


PREFIX_TUNING = AdapterKind(("causal", "masked", "encoder"), _make, merges=False)
