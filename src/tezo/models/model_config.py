"""The section `model` of a recipe."""

from dataclasses import dataclass
from typing import Literal

IN_MEMORY = "in memory"
"""In the place of a name or a file: what was given to `tezo.train` as an object, and has no name to be found by."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base model."""

    name: str
    """A folder, a hub name, or embedded:all-minilm-l6-v2."""
    kind: Literal["auto", "causal", "masked", "encoder"] = "auto"
    """How it answers; auto goes by its architecture."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the weights; auto is as stored."""
    device: str = "auto"
    """auto is the first GPU, else the CPU."""
    quantization: Literal["none", "nf4", "int8", "int8wo"] = "none"
    """Of linear layers: nf4 and int8 by bitsandbytes, int8wo (weights alone) by torchao."""
    placement: Literal["device", "spread", "cpu", "disk", "shards"] = "device"
    """Where weights lie: on the device; spread over all; in memory or on disk between uses; shared out by torchrun."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    peft: Literal["none", "lora", "prefix"] = "none"
    """Tune an adapter of PEFT instead of the model: LoRA in PEFT's choice of layers, or a prefix."""
    lora_rank: int = 8
    """Rank of LoRA. MeZO: 8."""
    lora_alpha: int = 16
    """Scale of LoRA, times its rank. MeZO: 16."""
    prefix_length: int = 5
    """Virtual tokens of a prefix. MeZO: 5."""
