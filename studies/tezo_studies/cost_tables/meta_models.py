"""Models of the benchmark's shapes on torch's meta device, with or without a new adapter."""

from typing import Any

import torch

from tezo.forecast.memory import META
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.peft import add_adapter, import_peft, virtual_task_type
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.shapes import SHAPES, skeleton


def meta_model(settings: Settings, peft: str = "none") -> Any:
    """The model of `settings` on the meta device, with a new adapter of this type, see `ModelConfig.peft`.

    Args:
        settings: model (a key of `SHAPES`) and dtype.
        peft: "none", "lora" or "prefix".
    """
    model = skeleton(SHAPES[settings.model].make(), getattr(torch, settings.dtype), META)
    if peft == "none":
        return model
    config = ModelConfig(name=settings.model, peft=peft)  # type: ignore[arg-type]
    with META:
        if peft == "prefix":
            return _with_prefix(model, config.prefix_length)
        return add_adapter(LoadedModel(model, None, "causal"), config, seed=0).model


def _with_prefix(model: Any, count: int) -> Any:
    """The model with a prefix of `count` tokens that has no values: `add_adapter` computes them by a pass."""
    peft = import_peft()
    settings = peft.PrefixTuningConfig(task_type=virtual_task_type("causal"), num_virtual_tokens=count)
    return peft.get_peft_model(model, settings).eval()
