"""Saves what was trained: an exact LoRA adapter if there is one, a PEFT adapter, or the whole model.

Adapters have a model card beside them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tezo.models.identity import Fingerprint, fingerprint
from tezo.models.kinds import kind_of
from tezo.models.loading import LoadedModel
from tezo.models.lora import Adapter, for_file, make_adapter, save_adapter, save_base, save_model
from tezo.models.model_card import Saved, Tuning, write_card
from tezo.models.model_config import IN_MEMORY, ModelConfig
from tezo.models.peft_check import check_in_peft, why_not_in_peft
from tezo.optim.tuner import Tuner


def save_result(
    config: ModelConfig,
    loaded: LoadedModel,
    optimizer: Tuner,
    place: Callable[[str], AbstractContextManager[Path]],
    tuning: Tuning | None = None,
) -> dict[str, Any]:
    """Saves what was trained; returns its "kind", its "folder" and details of that kind.

    An adapter that PEFT would not add as it was trained is none: the model is saved whole, or, where packed weights
    cannot take the change, the adapter is saved for this library alone.

    Args:
        config: the section `model` of the configuration.
        loaded: the model; if it is saved whole, the change is merged into its weights.
        optimizer: the optimizer that trained it.
        place: folder name -> context manager with a folder of that name to write into.
        tuning: what an adapter's card says of the run; None: nothing.
    """
    reason = optimizer.why_no_adapter()
    if config.peft != "none":
        optimizer.merge()  # into the adapter's own tensors
        with place("adapter") as folder:
            save_peft_adapter(loaded, folder, config, tuning)
        return {"kind": "peft", "folder": "adapter", "adapter": config.peft}
    if reason is None:
        adapter, base = make_adapter(optimizer), loaded.fingerprint
        writable = all(target.is_writable for target in optimizer.targets)
        try:
            with place("adapter") as folder:
                save_with_card(adapter, folder, loaded.model, config.name, base, tuning)
                reason = why_not_in_peft(adapter, loaded.model, folder)
                if reason is not None and writable:
                    raise _NotInPeftError
                if reason is not None:
                    save_with_card(adapter, folder, loaded.model, config.name, base, tuning, reason)
        except _NotInPeftError:
            pass
        else:
            odd = {} if reason is None else {"why_not_in_peft": reason}
            return {"kind": "adapter", "folder": "adapter", "rank": adapter.rank, **odd}
    optimizer.merge()
    with place("model") as folder:
        save_model(loaded.model, loaded.tokenizer, folder)
    return {"kind": "model", "folder": "model", "why_no_adapter": reason}


class _NotInPeftError(Exception):
    """The folder of an adapter is dropped, because PEFT would not add it as it was trained."""


def save_with_card(
    adapter: Adapter,
    folder: Path,
    model: Any,
    base: str,
    base_is: Fingerprint,
    tuning: Tuning | None = None,
    not_in_peft: str | None = None,
) -> None:
    """Writes an adapter of this library and its card.

    Args:
        adapter: the adapter.
        folder: folder to write into.
        model: the model whose modules the adapter names.
        base: folder or hub name of the base model.
        base_is: fingerprint of the base model.
        tuning: what the card says of the run; None: nothing.
        not_in_peft: reason why PEFT would not add it as it was trained.
    """
    save_adapter(adapter, folder, model=model, base=base)
    save_base(folder, base_is)
    kind, rank = kind_of([type(model).__name__]), for_file(adapter).rank
    write_card(folder, Saved("lora", base, kind, rank, not_in_peft), tuning)


def save_peft_adapter(loaded: LoadedModel, folder: Path, config: ModelConfig, tuning: Tuning | None) -> None:
    """Writes the adapter of PEFT that a model has, and its card in place of PEFT's.

    Args:
        loaded: the model with the adapter.
        folder: folder to write into.
        config: of the run, with the kind of adapter.
        tuning: what the card says of the run; None: nothing.
    """
    assert config.peft != "none"
    if config.name != IN_MEMORY:
        for adapter in loaded.model.peft_config.values():
            adapter.base_model_name_or_path = config.name
    loaded.model.save_pretrained(folder)
    write_card(folder, Saved(config.peft, config.name, loaded.kind), tuning)


def export_adapter(optimizer: Tuner, folder: str | Path) -> Adapter:
    """Writes the adapter that an optimizer has trained, for `PeftModel.from_pretrained(base, folder)`, with its card.

    Its rank in the file is the next of 8, 16, 32, 64, 128, 256, 320 and 512, which vLLM takes; the rank of what is
    returned is the one that was trained.

    Raises:
        RequestError: the change is not exactly an adapter, or PEFT as it is installed here would not add it exactly;
            `optimizer.merge()` gives the whole model.
    """
    adapter, model, folder = make_adapter(optimizer), optimizer.model, Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_in_peft(adapter, model, folder.parent)
    kind = kind_of([type(model).__name__])
    base_is = fingerprint(model, kind) if isinstance(model, PreTrainedModel) and kind is not None else {}
    save_with_card(adapter, folder, model, getattr(model, "name_or_path", ""), base_is)
    return adapter
