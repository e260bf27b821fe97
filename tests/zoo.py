"""Tiny models of every family of causal and masked models that transformers has, with random weights."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

CLASSES = {
    f"{kind}-{family}": (family, name if isinstance(name, str) else name[0])
    for kind, names in (("causal", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("masked", MODEL_FOR_MASKED_LM_MAPPING_NAMES))
    for family, name in names.items()
}
"""Kind and family -> (type in config.json, class)."""

# A configuration takes of these what it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("initializer_range", "initializer_std", "init_std"), 0.2),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head"), 16),
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("hidden_dropout", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "moe_layer_start_index"), 1),
    "vocab_size": 96, "num_key_value_heads": 2, "num_experts_per_tok": 2, "q_lora_rank": 12, "rotary_dim": 4,
    "sliding_window": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "mamba_expand": 2, "expand": 2,
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4}  # attention through latent vectors: as many keys as queries
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"), LATENT
    ),
    **dict.fromkeys(("longcat_flash", "minicpm3"), LATENT),
    "falcon": {"head_dim": None, "num_kv_heads": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "reformer": {"is_decoder": True},
}
MOST = 5_000_000


def zoo_model(name: str, **changes: Any) -> nn.Module:
    """A model of a family; always the same. Errors of all kinds where the family needs other settings than these."""
    family, kind = CLASSES[name]
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[family])
    known, own = config_class(), OWN.get(family, {}) | changes
    sizes = {key: value for key, value in (SIZES | own).items() if key in own or hasattr(known, key)}
    config = config_class(**{key: value for key, value in sizes.items() if value is not None})
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in getattr(transformers, kind)(config).parameters())
    if count > MOST:
        raise ValueError(f"{count} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and norms at 1: give them a part to play
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def zoo_logits(model: nn.Module) -> Tensor:
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits.float()
