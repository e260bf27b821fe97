"""Saves what was trained: an exact LoRA adapter if there is one, a PEFT adapter, or the whole model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tezo.models.loading import LoadedModel
from tezo.models.lora import Adapter, make_adapter, save_adapter, save_model
from tezo.models.model_config import ModelConfig
from tezo.models.peft_check import check_in_peft, why_not_in_peft
from tezo.optim.tuner import Tuner


def save_result(
    config: ModelConfig, loaded: LoadedModel, optimizer: Tuner, place: Callable[[str], AbstractContextManager[Path]]
) -> dict[str, Any]:
    """Saves what was trained; returns its "kind", its "folder" and details of that kind.

    An adapter that PEFT would not add as it was trained is none: the model is saved whole, or, where packed weights
    cannot take the change, the adapter is saved for this library alone.

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
        reason = why_not_in_peft(adapter, loaded.model)
        if reason is None or not all(target.is_writable for target in optimizer.targets):
            with place("adapter") as folder:
                save_adapter(adapter, folder, model=loaded.model, base=config.name)
            odd = {} if reason is None else {"why_not_in_peft": reason}
            return {"kind": "adapter", "folder": "adapter", "rank": adapter.rank, **odd}
    optimizer.merge()
    with place("model") as folder:
        save_model(loaded.model, loaded.tokenizer, folder)
    return {"kind": "model", "folder": "model", "why_no_adapter": reason}


def export_adapter(optimizer: Tuner, folder: str | Path) -> Adapter:
    """Writes and returns the adapter that an optimizer has trained, for `PeftModel.from_pretrained(base, folder)`.

    Raises:
        RequestError: the change is not exactly an adapter, or PEFT as it is installed here would not add it exactly;
            `optimizer.merge()` gives the whole model.
    """
    adapter, model = make_adapter(optimizer), optimizer.model
    check_in_peft(adapter, model)
    save_adapter(adapter, Path(folder), model=model, base=getattr(model, "name_or_path", ""))
    return adapter
