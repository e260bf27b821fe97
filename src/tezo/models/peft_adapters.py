"""PEFT adapters that are tuned instead of the model itself.

PEFT's settings are made from the run's own, when an adapter is added and when it is opened again; what its
adapter_config.json says beside is compared with them, and never obeyed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tezo.errors import RequestError, nearest
from tezo.files import plain_file, read_object
from tezo.models.adapters import ADAPTERS
from tezo.models.adapters.adapter_kind import AdapterKind, import_peft
from tezo.models.loading import LoadedModel
from tezo.models.model_config import ModelConfig

_NO_FIGURES = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
"""Keys of adapter_config.json that no output depends on."""


def add_adapter(loaded: LoadedModel, config: ModelConfig, seed: int) -> LoadedModel:
    """Adds a new adapter to a model; only the adapter is trainable. With `config.peft` "none", returns `loaded`.

    Args:
        loaded: the base model; it is changed in place.
        config: kind and size of the adapter.
        seed: seed of the initial values. LoRA starts as the base model, virtual tokens as random tokens in front.

    Raises:
        RequestError: PEFT is not installed, or does not support this adapter for this model.
    """
    if config.peft == "none":
        return loaded
    kind = adapter_kind(config.peft)
    if loaded.kind not in kind.models:
        *others, last = kind.models
        raise RequestError(
            f"model.peft is {config.peft}, which needs a model that is {', '.join(others)} or {last}, but this one "
            f"is {loaded.kind}; use lora."
        )
    peft = import_peft()
    try:
        new = kind.make(loaded, config, seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = peft.get_peft_model(loaded.model, new.settings).eval()
        kind.settle(model)
        virtual = 0 if new.start_VD is None else _start(model, new.start_VD, loaded.device)
    except (RequestError, torch.OutOfMemoryError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        instead = "another kind of adapter, or none" if config.peft == "lora" else "lora"
        raise RequestError(
            f"model.peft is {config.peft}, which PEFT cannot add to this model ({reason}); use {instead}."
        ) from None
    return replace(loaded, model=model, virtual_tokens=virtual)


def adapter_kind(name: str) -> AdapterKind:
    """The kind of adapter `name`, a key of `ADAPTERS`; `RequestError` if there is none."""
    if name not in ADAPTERS:
        raise RequestError(f"model.peft: there is no {name!r}. " + nearest(name, ("none", *ADAPTERS)))
    return ADAPTERS[name]


@torch.no_grad()
def _start(model: Any, start_VD: Tensor, device: torch.device) -> int:
    """Gives the virtual tokens their initial values, and tries the model on a token; returns their number."""
    (encoder,) = model.prompt_encoder.values()
    encoder.embedding.weight.copy_(start_VD)
    token_11 = torch.zeros((1, 1), dtype=torch.long, device=device)
    model(input_ids=token_11, attention_mask=torch.ones_like(token_11))
    return len(start_VD)


def open_adapter(loaded: LoadedModel, config: ModelConfig, folder: Path) -> LoadedModel:
    """The model with the tuned adapter that `save_pretrained` wrote into `folder`.

    Args:
        loaded: the base model; it is changed in place.
        config: type and size of the adapter, as it was added.
        folder: the adapter.

    Raises:
        RequestError: PEFT is not installed, the adapter is missing or damaged, or it is not the one that was added.
    """
    try:
        tensors = load_file(plain_file(folder / "adapter_model.safetensors"))
        described = read_object(folder / "adapter_config.json")
        opened = add_adapter(loaded, config, seed=0)
        opened.model.requires_grad_(requires_grad=False)
        (own,) = opened.model.peft_config.values()
        _check_settings(described, json.loads(json.dumps(own.to_dict(), default=sorted)))
        _load(opened.model, tensors)
    except RequestError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"{folder} is not an adapter that can be read ({reason}); train again.") from None
    return opened


def _check_settings(described: dict[str, Any], own: dict[str, Any]) -> None:
    """A `ValueError` where a setting that both have differs; another version of PEFT has other settings besides."""
    for key in sorted(described.keys() & own.keys() - _NO_FIGURES):
        here, there = (sorted(v) if isinstance(v, list) else v for v in (own[key], described[key]))
        if here != there:
            raise ValueError(f"its adapter_config.json says {key}: {there!r:.40}, and the run has {here!r:.40}")


def _load(model: Any, tensors: dict[str, Tensor]) -> None:
    """Loads the tensors of an adapter; a `ValueError` where the model then has others."""
    peft = import_peft()
    peft.set_peft_model_state_dict(model, tensors)
    found = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    for name in sorted(tensors.keys() | found.keys()):
        same = name in tensors and name in found and torch.equal(found[name].cpu(), tensors[name].to(found[name].dtype))
        if not same:
            raise ValueError(f"its {name} is not one of the adapter of this run")
