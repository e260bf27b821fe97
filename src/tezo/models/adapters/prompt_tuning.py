"""Prompt tuning (Lester et al., 2021, arXiv 2104.08691): embeddings in front of those of the text."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tezo.models.adapters.adapter_kind import (
    AdapterKind,
    NewAdapter,
    import_peft,
    random_tokens,
    virtual_task_type,
)
from tezo.models.loading import LoadedModel
from tezo.models.model_config import ModelConfig


@torch.no_grad()
def _make(loaded: LoadedModel, config: ModelConfig, seed: int) -> NewAdapter:
    """The prompt starts with the embeddings of random tokens, so the model starts as with these tokens in front.

    The paper finds random numbers worse than embeddings of the vocabulary, the more so in small models.
    """
    embed = loaded.model.get_input_embeddings()
    start_VD = embed(random_tokens(loaded, config.prefix_length, seed))[0].to("cpu", torch.float32)
    settings = import_peft().PromptTuningConfig(
        task_type=virtual_task_type(loaded.kind), num_virtual_tokens=len(start_VD), token_dim=start_VD.shape[1]
    )
    return NewAdapter(settings, start_VD)


def _settle(model: Any) -> None:
    """Looks the prompt up for each row; PEFT does it once for all rows, which then cannot be perturbed differently."""
    model.get_prompt = MethodType(_prompt_of_rows, model)


def _prompt_of_rows(model: Any, batch_size: int, **others: Any) -> Tensor:
    """The prompt of each row, (batch_size, V, D)."""
    del others
    encoder, tokens_V = model.prompt_encoder[model.active_adapter], model.prompt_tokens[model.active_adapter]
    prompt_BVD: Tensor = encoder(tokens_V.expand(batch_size, -1).to(encoder.embedding.weight.device))
    return prompt_BVD


PROMPT_TUNING = AdapterKind(("causal", "masked", "encoder"), _make, merges=False, settle=_settle)
