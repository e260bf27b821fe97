"""PEFT adapters that are tuned instead of the model itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tezo.errors import RequestError
from tezo.files import plain_file
from tezo.models.loading import LoadedModel
from tezo.models.model_config import ModelConfig

_TASK_TYPES = {"causal": "CAUSAL_LM", "masked": None, "encoder": "FEATURE_EXTRACTION", "classifier": "SEQ_CLS"}


def add_adapter(loaded: LoadedModel, config: ModelConfig, seed: int) -> LoadedModel:
    """Adds a new adapter to a model; only the adapter is trainable. With `config.peft` "none", returns `loaded`.

    Args:
        loaded: the base model; it is changed in place.
        config: type and size of the adapter.
        seed: seed of PEFT's initial values. LoRA starts as the base model, a prefix does not.

    Raises:
        RequestError: PEFT is not installed, or does not support this adapter for this model.
    """
    if config.peft == "none":
        return loaded
    peft = _peft()
    task_type: Any = _TASK_TYPES[loaded.kind]
    if config.peft == "prefix" and loaded.kind != "causal":
        raise RequestError(
            f"model.peft is prefix, which needs a causal model, but this model is {loaded.kind}; use lora."
        )
    wanted = {
        "lora": lambda: peft.LoraConfig(task_type=task_type, r=config.lora_rank, lora_alpha=config.lora_alpha),
        "prefix": lambda: peft.PrefixTuningConfig(task_type=task_type, num_virtual_tokens=config.prefix_length),
    }[config.peft]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = peft.get_peft_model(loaded.model, wanted())  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"model.peft is {config.peft}, which PEFT cannot add to this model ({reason}).") from None
    return replace(loaded, model=model.eval())


def open_adapter(loaded: LoadedModel, folder: Path) -> LoadedModel:
    """The model with the tuned adapter that `save_pretrained` wrote into `folder`.

    Raises:
        RequestError: PEFT is not installed, or the adapter is missing or damaged.
    """
    try:
        plain_file(folder / "adapter_model.safetensors")  # without it PEFT would read a pickle
        return replace(loaded, model=_peft().PeftModel.from_pretrained(loaded.model, str(folder)).eval())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"{folder} is not an adapter that can be read ({reason}); train again.") from None


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise RequestError(f"model.peft needs PEFT ({error}); pip install peft.") from None
    return peft
