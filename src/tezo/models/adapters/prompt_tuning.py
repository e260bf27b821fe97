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
        task_type=virtual_task_type(loaded.kind),
        num_virtual_tokens=len(start_VD),
        token_dim=start_VD.shape[1],
        num_attention_heads=1,  # a prompt has none, but PEFT asks for their number where a model has none either
    )
    return NewAdapter(settings, start_VD)


def _settle(model: Any) -> None:
    """Gives PEFT the input embeddings, which it guesses by their size, and replaces two methods of its model.

    PEFT looks the prompt up once for all rows, which then cannot be perturbed differently. And it continues texts with
    their padding between prompt and text, without positions, so that an answer depends on the other texts of a batch.
    """
    model.word_embeddings = model.get_base_model().get_input_embeddings()
    model.get_prompt = MethodType(_prompt_of_rows, model)
    model.generate = MethodType(_continue, model)


def _prompt_of_rows(model: Any, batch_size: int, **others: Any) -> Tensor:
    """The prompt of each row, (batch_size, V, D)."""
    del others
    encoder, tokens_V = model.prompt_encoder[model.active_adapter], model.prompt_tokens[model.active_adapter]
    prompt_BVD: Tensor = encoder(tokens_V.expand(batch_size, -1).to(encoder.embedding.weight.device))
    return prompt_BVD


@torch.no_grad()
def _continue(model: Any, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
    """Texts padded on the left, with what the model continues them by; the prompt stands right before each text."""
    text_BLD = model.word_embeddings(input_ids)
    prompt_BVD = model.get_prompt(batch_size=len(input_ids)).to(text_BLD.dtype)
    whole_BTD = torch.cat([prompt_BVD, text_BLD], 1)
    mask_BT = torch.cat([attention_mask.new_ones(prompt_BVD.shape[:2]), attention_mask], 1)
    order_BT = mask_BT.argsort(dim=1, stable=True)  # padding first, then the prompt, then the text
    rows_B1 = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1)
    added = model.get_base_model().generate(
        inputs_embeds=whole_BTD[rows_B1, order_BT], attention_mask=mask_BT[rows_B1, order_BT], **options
    )
    return torch.cat([input_ids, added], 1)


PROMPT_TUNING = AdapterKind(("causal", "masked", "encoder"), _make, merges=False, settle=_settle)
