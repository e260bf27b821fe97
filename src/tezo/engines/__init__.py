"""Engines: programs that run forward passes of a model whose weights they hold. One file each, and one row here."""

from collections.abc import Callable

from tezo.engines.llama_cpp import load_llama_cpp
from tezo.engines.server import load_server
from tezo.engines.workers import load_in_ray
from tezo.models.kinds import ADDRESS, ModelConfig, engine_kind
from tezo.models.loading import LoadedModel, load_model
from tezo.system.errors import RequestError, nearest
from tezo.system.progress import LOADING, current


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
ENGINES: dict[str, Callable[[ModelConfig], LoadedModel]] = {
    TORCH: load_torch,
    "llama.cpp": load_llama_cpp,
    ADDRESS: load_server,
}
"""Value of `model.engine` -> what loads a model for it; addresses of servers begin with `ADDRESS`."""

_OF_TORCH = ("kind", "dtype", "device", "quantization", "placement", "untie_head", "peft", "trust_remote_code")
"""Settings that only torch has."""


def load(config: ModelConfig) -> LoadedModel:
    """Loads the base model of a configuration, for torch or for an engine.

    Raises:
        RequestError: there is no such engine, or a setting is of torch alone.
    """
    name = engine_kind(config.engine)
    if config.engine == ADDRESS:
        raise RequestError(
            "model.engine was the address of a server, which a run folder may not name; give it again, by "
            "--set model.engine=http://HOST:PORT, or have --set model.engine=torch."
        )
    if name == "vllm":
        raise RequestError(
            "model.engine is vllm, which runs on a server alone: start vllm serve (docs/vllm.md has the line), and "
            "give its address, --engine http://HOST:8000."
        )
    if name not in ENGINES:
        known = [*(known for known in ENGINES if known != ADDRESS), "http://HOST:PORT"]
        raise RequestError(f"model.engine: there is no {config.engine!r}. " + nearest(config.engine, known))
    if name != TORCH:
        for key in _OF_TORCH:
            if getattr(config, key) != getattr(ModelConfig, key):
                raise RequestError(
                    f"model.{key} is {getattr(config, key)}, which is for torch, and model.engine is {config.engine}; "
                    "leave one of them out."
                )
    if config.workers and name in (TORCH, ADDRESS):
        raise RequestError(
            f"model.workers is {config.workers}, which is for llama.cpp in Ray; leave it out (torchrun shares "
            "torch's passes, and addresses of several servers may stand with commas between)."
        )
    with current().phase(LOADING):
        return load_in_ray(config, ENGINES[name]) if config.workers else ENGINES[name](config)
