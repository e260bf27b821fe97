"""A run's result written elsewhere: its adapter for PEFT or for llama.cpp, or the whole model with it merged in.

`export_run` opens the base model by its name and merges into that. `export_tuned` writes from a model that is in use,
and leaves it as it is.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.files import check_free, new_folder
from tezo.models.carried_labels import MEAN, CarriedLabels
from tezo.models.gguf_lora import check_gguf, save_gguf
from tezo.models.loading import LoadedModel, load_model
from tezo.models.lora import Adapter, for_file, load_adapter, merge_adapter, save_model
from tezo.models.model_card import Tuning
from tezo.models.peft_adapters import adapter_kind, open_adapter
from tezo.models.peft_check import check_in_peft
from tezo.models.saving import save_peft_adapter, save_with_card
from tezo.progress.meter import SAVING, current
from tezo.runs.folder import ADAPTER, CONFIG, MODEL
from tezo.training.configuration.config import read_run_config
from tezo.training.configuration.recipe import Config
from tezo.training.execution.summary import tuning_of
from tezo.training.finished_runs.opening import check_result, no_result, open_base

LORA, MERGED, GGUF = "lora", "merged", "gguf-lora"
FORMS = (LORA, MERGED, GGUF)

Write = Callable[[Path], object]
"""Writes an export into a folder."""


def export_run(
    run: Path, output: Path, form: str, *, model: str | None = None, trust_remote_code: bool = False
) -> int | None:
    """Writes the result of a run folder into `output`; models are opened before anything is written.

    Args:
        run: folder of the run.
        output: folder to write, new.
        form: "lora", "merged" or "gguf-lora".
        model: folder or hub name of the base model, of the same weights; None: as the run names it.
        trust_remote_code: whether code that comes with the model may run; what the run says of it does not count.

    Returns:
        The rank of the adapter in the file, where it is one of this library; else None.

    Raises:
        RequestError: the run has no result of this form, or the base model is another one.
    """
    check_result(run)
    check_free(output)
    _check_form(form)
    here = [("model.placement", "device"), ("model.trust_remote_code", trust_remote_code)]
    config = read_run_config(run / CONFIG, [*here, *([("model.name", model)] if model else [])])
    _check_result(run, config, form)
    write, rank = _from_folder(run, config, form)
    with current().phase(SAVING), new_folder(output) as folder:
        write(folder)
    return rank


def export_tuned(run: Path, output: Path, form: str, tuned: LoadedModel) -> None:
    """Writes the same from the run's model in memory, which is left as it is.

    Args:
        run: folder of the run.
        output: folder to write, new.
        form: "lora", "merged" or "gguf-lora".
        tuned: the model.

    Raises:
        RequestError: the run has no result of this form.
    """
    check_free(output)
    _check_form(form)
    config = read_run_config(run / CONFIG, [])
    _check_result(run, config, form)
    if form == MERGED:
        check_mergeable(tuned.model)
    write = _from_memory(run, config, form, tuned)
    with current().phase(SAVING), new_folder(output) as folder:
        write(folder)


def check_mergeable(model: Any) -> None:
    """An error where the weights of a model in memory cannot take a change."""
    if getattr(model, "is_quantized", False):  # set by transformers
        raise RequestError("the base model is packed and takes no change; export its adapter, in the format lora.")


def _check_form(form: str) -> None:
    if form not in FORMS:
        raise RequestError(f"format is {form!r}; it must be {', '.join(FORMS[:-1])} or {FORMS[-1]}.")


def _check_result(run: Path, config: Config, form: str) -> None:
    """An error where the run has no result of this form, or it is not the one that the run wrote."""
    check_result(run)
    if form == MERGED and config.model.quantization != "none":
        raise RequestError(
            f"format is merged, but the base is packed as {config.model.quantization} and takes no change; "
            "use --format lora."
        )
    if not any((run / name).is_dir() for name in (ADAPTER, MODEL)):
        raise no_result(str(run))
    if form != MERGED and not (run / ADAPTER).is_dir():
        raise RequestError(f"{run} has no adapter: {config.method.name} changed the weights; use --format merged.")
    if form == GGUF and config.model.peft != "none":
        raise RequestError("format is gguf-lora, which is written for adapters of this library, not of PEFT; use lora.")


def _from_folder(run: Path, config: Config, form: str) -> tuple[Write, int | None]:
    """(what writes the export of a run folder, rank in the file of an adapter of this library or None)."""
    saved = run / ADAPTER
    if not saved.is_dir():
        trust, kind = config.model.trust_remote_code, config.model.kind
        loaded = load_model(str(run / MODEL), kind=kind, dtype=config.model.dtype, trust_remote_code=trust)
        return _model_writer(loaded, config), None
    loaded, tuning = open_base(run, config), tuning_of(run)
    if config.model.peft != "none":
        return _peft_writer(open_adapter(loaded, config.model, saved), config, form, tuning), None
    adapter = load_adapter(saved)
    if form == MERGED:
        merge_adapter(loaded.model, adapter)
        return _model_writer(loaded, config), None
    return _adapter_writer(adapter, loaded, config, form, tuning), for_file(adapter).rank if form == LORA else None


def _from_memory(run: Path, config: Config, form: str, tuned: LoadedModel) -> Write:
    """What writes the export of a model that stays in use."""
    if config.model.peft != "none":
        own = tuned if form == LORA else replace(tuned, model=copy.deepcopy(tuned.model))
        return _peft_writer(own, config, form, tuning_of(run))
    if form == MERGED:
        return _model_writer(tuned, config)
    return _adapter_writer(load_adapter(run / ADAPTER), tuned, config, form, tuning_of(run))


def _adapter_writer(adapter: Adapter, loaded: LoadedModel, config: Config, form: str, tuning: Tuning | None) -> Write:
    if form == GGUF:
        check_gguf(loaded.model)
        return partial(save_gguf, adapter, model=loaded.model)

    def write(folder: Path) -> None:
        model, base = loaded.model, loaded.fingerprint
        check_in_peft(adapter, model, folder)
        save_with_card(adapter, folder, model, config.model.name, base, tuning)

    return write


def _model_writer(loaded: LoadedModel, config: Config) -> Write:
    data = config.data

    def write(folder: Path) -> None:
        save_model(loaded.model, loaded.tokenizer, folder)
        if data.task is None and data.label_words is not None:
            pooling = MEAN if loaded.kind == "encoder" else None
            CarriedLabels(data.label_words, data.template, pooling).write(folder)

    return write


def _peft_writer(opened: LoadedModel, config: Config, form: str, tuning: Tuning | None) -> Write:
    if form == LORA:
        return partial(save_peft_adapter, opened, config=config.model, tuning=tuning)
    if not adapter_kind(config.model.peft).merges:
        raise RequestError(
            f"format is merged, but a {config.model.peft} has no weights to merge into; use --format lora."
        )
    return _model_writer(replace(opened, model=opened.model.merge_and_unload()), config)
