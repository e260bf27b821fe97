"""The section `model` of a recipe."""

from dataclasses import dataclass
from typing import Literal

IN_MEMORY = "in memory"
"""In the place of a name or a file: what was given to `tezo.train` as an object, and has no name to be found by."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The section `model`: the base model, and where and how its weights are held."""

    name: str
    """Model folder, GGUF file, hub name, embedded:smollm2-135m, or embedded:all-minilm-l6-v2."""
    kind: Literal["auto", "causal", "masked", "encoder", "classifier"] = "auto"
    """Kind of model: causal, masked, encoder or classifier. Default auto: by its architecture."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Data type of the weights. Default auto: as stored, or float32 where a GGUF file has them packed."""
    device: str = "auto"
    """Device to compute on, such as cpu or cuda. Default auto: the first GPU, otherwise the CPU."""
    quantization: Literal["none", "nf4", "int8", "int8wo"] = "none"
    """Quantization of the linear layers: nf4 and int8 by bitsandbytes, int8wo (weights only) by torchao."""
    placement: Literal["device", "spread", "cpu", "disk", "shards"] = "device"
    """Where weights are kept: device; spread over all devices; cpu or disk (offloaded); shards (FSDP2, by torchrun)."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    untie_head: bool = False
    """Whether an output head tied to the input embeddings gets weights of its own, to be tuned (MeZO's RoBERTa)."""
    peft: Literal["none", "lora", "prefix", "prompt"] = "none"
    """Train a PEFT adapter instead of the model: lora (in PEFT's default layers), prefix or prompt."""
    lora_rank: int = 8
    """Rank of the LoRA adapter. MeZO uses 8."""
    lora_alpha: int = 16
    """LoRA alpha; the adapter is scaled by alpha / rank. MeZO uses 16."""
    prefix_length: int = 5
    """Virtual tokens of the prefix or the prompt. MeZO uses 5."""
