"""LoRA (Hu et al., 2021, arXiv 2106.09685): W + (alpha / r) B A with B (M x r) and A (r x N) beside each layer."""

from tezo.models.adapters.adapter_kind import AdapterKind, NewAdapter, import_peft
from tezo.models.loading import LoadedModel
from tezo.models.lora import TASK_TYPES
from tezo.models.model_config import ModelConfig

_TASK_TYPES = TASK_TYPES | {"classifier": "SEQ_CLS"}


def _make(loaded: LoadedModel, config: ModelConfig, seed: int) -> NewAdapter:
    """In PEFT's default layers and with its initial values, B = 0, so the model starts as the base model."""
    del seed
    task_type = _TASK_TYPES.get(loaded.kind)
    return NewAdapter(import_peft().LoraConfig(task_type=task_type, r=config.lora_rank, lora_alpha=config.lora_alpha))


LORA_TUNING = AdapterKind(("causal", "masked", "encoder", "classifier"), _make, merges=True)
