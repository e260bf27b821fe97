"""Saves the result of a run: an exact LoRA adapter if there is one, a PEFT adapter, or the whole model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tezo.models.loading import LoadedModel
from tezo.models.lora import make_adapter, save_adapter, save_model
from tezo.models.model_config import ModelConfig
from tezo.optim.tuner import Tuner


def save_result(
    config: ModelConfig, loaded: LoadedModel, optimizer: Tuner, place: Callable[[str], AbstractContextManager[Path]]
) -> dict[str, Any]:
    """Saves what was trained; returns its "kind", its "folder" and details of that kind.

    Args:
        config: the section `model` of the configuration.
        loaded: the model; if it is saved whole, the change is merged into its weights.
        optimizer: the optimizer that trained it.
        place: folder name -> context manager with a folder of that name to write into.
    """
    reason = optimizer.why_no_adapter()
    if config.peft != "none":
        optimizer.merge()  # into the adapter's own tensors
        with place("adapter") as folder:
            loaded.model.save_pretrained(folder)
        return {"kind": "peft", "folder": "adapter", "adapter": config.peft}
    if reason is None:
        adapter = make_adapter(optimizer)
        with place("adapter") as folder:
            save_adapter(adapter, folder, model=loaded.model, base=config.name)
        return {"kind": "adapter", "folder": "adapter", "rank": adapter.rank}
    optimizer.merge()
    with place("model") as folder:
        save_model(loaded.model, loaded.tokenizer, folder)
    return {"kind": "model", "folder": "model", "why_no_adapter": reason}
