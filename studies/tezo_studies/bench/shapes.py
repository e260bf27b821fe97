"""Models for the benchmark: named shapes with random weights, or any model that can be loaded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig
from transformers.initialization import no_init_weights

from tezo.models.loading import load_model
from tezo.system.errors import RequestError, nearest


@dataclass(frozen=True)
class Shape:
    """The published sizes of a model: a configuration class and its arguments."""

    config: type[Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """The transformers configuration."""
        return self.config(**self.settings)


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> Shape:
    sizes = {"hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden}
    return Shape(OPTConfig, sizes | {"num_hidden_layers": layers, "num_attention_heads": heads} | more)


def _llama(hidden: int, layers: int, heads: int, ffn: int, **more: Any) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "vocab_size": 32000, "rms_norm_eps": 1e-6}
    return Shape(LlamaConfig, sizes | {"num_hidden_layers": layers, "num_attention_heads": heads} | more)


SHAPES: dict[str, Shape] = {
    "tiny": _opt(64, 2, 2, vocab_size=96, max_position_embeddings=512),
    "tiny-llama": _llama(64, 2, 2, 128, vocab_size=96),
    "narrow-opt-1.3b": _opt(64, 24, 2, vocab_size=96, max_position_embeddings=512),
    "narrow-llama-7b": _llama(64, 32, 2, 128, vocab_size=96),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "llama-7b": _llama(4096, 32, 32, 11008),
    "llama-13b": _llama(5120, 40, 40, 13824),
    "llama-30b": _llama(6656, 60, 52, 17920),
    "llama-70b": _llama(8192, 80, 64, 28672, num_key_value_heads=8),
}
"""Those with "tiny" and "narrow" in their names are not published: a narrow one has the layers of a model, and matrices
that are small."""


def build_model(name: str, dtype: str, device: torch.device) -> Any:
    """The model in evaluation mode: a named shape with random weights, or a model from a folder or the hub.

    Args:
        name: key of `SHAPES`, folder or hub name.
        dtype: key of `tezo.models.loading.DTYPES`.
        device: device of the weights.

    Raises:
        RequestError: there is no such model, or it is not a causal model.
    """
    if name in SHAPES:
        return from_shape(SHAPES[name].make(), getattr(torch, dtype), device)
    if "/" not in name and not Path(name).expanduser().exists():
        raise RequestError(f"model: there is no shape or folder {name!r}. " + nearest(name, SHAPES))
    loaded = load_model(name, dtype=dtype, device=str(device))
    if loaded.kind != "causal":
        raise RequestError(f"model: {name} is {loaded.kind}; give a causal model.")
    return loaded.model


def from_shape(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model with random weights, created directly on `device` in `dtype`, so that no extra memory is used."""
    model = skeleton(config, dtype, device)
    _fill(model, device)
    return model


def skeleton(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with uninitialised weights, in evaluation mode."""
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def _fill(model: nn.Module, device: torch.device) -> None:
    # As OPT and LLaMA are initialised: matrices N(0, 0.02^2), norm weights 1, other vectors 0.
    draw = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.02, generator=draw)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
