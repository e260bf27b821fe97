"""Engines: programs that run forward passes of a model whose weights they hold. One file each, and one row here."""

from collections.abc import Callable

from tezo.engines.llama_cpp import load_llama_cpp
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel, load_model
from tezo.system.errors import RequestError, nearest


def load_torch(config: ModelConfig) -> LoadedModel:
    """Loads a model that torch runs."""
    return load_model(
        config.name,
        kind=config.kind,
        dtype=config.dtype,
        device=config.device,
        quantization=config.quantization,
        placement=config.placement,
        untie_head=config.untie_head,
        trust_remote_code=config.trust_remote_code,
    )


TORCH = "torch"
ENGINES: dict[str, Callable[[ModelConfig], LoadedModel]] = {TORCH: load_torch, "llama.cpp": load_llama_cpp}
"""Value of `model.engine` -> what loads a model for it."""

_OF_TORCH = ("kind", "dtype", "device", "quantization", "placement", "untie_head", "peft")
"""Settings that only torch has."""


def load(config: ModelConfig) -> LoadedModel:
    """Loads the base model of a configuration, for torch or for an engine.

    Raises:
        RequestError: there is no such engine, or a setting is of torch alone.
    """
    if config.engine not in ENGINES:
        raise RequestError(f"model.engine: there is no {config.engine!r}. " + nearest(config.engine, ENGINES))
    if config.engine != TORCH:
        for key in _OF_TORCH:
            if getattr(config, key) != getattr(ModelConfig, key):
                raise RequestError(
                    f"model.{key} is {getattr(config, key)}, which is for torch, and model.engine is {config.engine}; "
                    "leave one of them out."
                )
    return ENGINES[config.engine](config)
