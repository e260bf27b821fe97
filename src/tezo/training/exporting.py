"""A run's result written elsewhere: its adapter for PEFT or for llama.cpp, or the whole model with it merged in.

`export_run` opens the base model by its name and merges into that. `export_tuned` writes from a model that is in use,
and leaves it as it is.

The result of a run, as a repository of the Hugging Face hub.
"""

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tezo.models.gguf import check_gguf, save_gguf
from tezo.models.kinds import MEAN, CarriedLabels, kind_of
from tezo.models.loading import LoadedModel, load_model
from tezo.models.lora import TASK_TYPES, Adapter, for_file, load_adapter, merge_adapter, save_model
from tezo.models.peft import adapter_kind, check_in_peft, open_adapter
from tezo.models.saving import (
    CARD,
    HERE,
    Saved,
    Tuning,
    card_text,
    hub_name,
    save_peft_adapter,
    save_with_card,
    shown_name,
)
from tezo.runs.folder import ADAPTER, CONFIG, MODEL, read_summary
from tezo.system.errors import RequestError, RunError
from tezo.system.files import check_free, new_folder, one_line, open_to_read, own_object, read_bytes, reading
from tezo.system.progress import SAVING, UPLOADING, current
from tezo.training.config import read_run_config
from tezo.training.opening import check_result, no_result, open_base
from tezo.training.recipe import Config
from tezo.training.summary import tuning_of

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


PEFT_CONFIG = "adapter_config.json"
_WAY_OUT = "put an intact copy in its place"
MOST_CARD = 1 << 20
"""Bytes of a model card, at most."""


def push_run(run: Path, name: str, *, public: bool = False) -> str:
    """Uploads the adapter of a run, or its model, with a model card; the base model is not loaded.

    Only the result goes up: neither rows nor logs nor the run's configuration, and no name of a folder.

    Args:
        run: folder of the run.
        name: repository, as owner/name; it is created if there is none.
        public: whether a repository that is created can be seen by everybody.

    Returns:
        The address of the repository.

    Raises:
        RequestError: the run has no result, the name is not one of the hub, or the hub does not let it be written.
        RunError: the upload failed.
    """
    check_result(run)
    config = read_run_config(run / CONFIG, [])
    result = run / (ADAPTER if (run / ADAPTER).is_dir() else MODEL)
    _check_name(name)
    changed = _changed(result, run, config, name)
    with current().phase(UPLOADING):
        return _upload(result, changed, name, public=public)


def _check_name(name: str) -> None:
    if hub_name(name) is None or name.count("/") != 1:
        raise RequestError(f"{name!r} is not a name on the hub, or is a folder here; give OWNER/NAME.")


def _changed(result: Path, run: Path, config: Config, name: str) -> dict[str, bytes]:
    """Name -> content of the files that others get changed: a card with its repository, settings without a folder."""
    card = result / CARD
    if card.is_file():
        text = read_bytes(card, MOST_CARD).decode()
    else:  # of a whole model
        text = card_text(_saved(result, run, config), tuning_of(run))
    changed = {CARD: text.replace(HERE, name).encode()}
    if (result / PEFT_CONFIG).is_file():
        settings = own_object(result / PEFT_CONFIG, _WAY_OUT)
        settings["base_model_name_or_path"] = shown_name(config.model.name)
        changed[PEFT_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    return changed


def _saved(folder: Path, run: Path, config: Config) -> Saved:
    """What the card of a result without one describes."""
    if not (folder / PEFT_CONFIG).is_file():
        architectures = own_object(folder / "config.json", _WAY_OUT).get("architectures") or []
        return Saved("model", config.model.name, kind_of(architectures))
    task = own_object(folder / PEFT_CONFIG, _WAY_OUT).get("task_type")
    kind = next((kind for kind, name in TASK_TYPES.items() if name == task), None)
    alone = (read_summary(run) or {}).get("result", {}).get("why_not_in_peft")
    form: Any = "lora" if config.model.peft == "none" else config.model.peft
    return Saved(form, config.model.name, kind, not_in_peft=alone)


def _upload(result: Path, changed: Mapping[str, bytes], name: str, *, public: bool) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="tezo", library_version=version("tezo"))
    login = "log in with `hf auth login` or set HF_TOKEN, to an account that may write there"
    with reading(f"{name} cannot be written on the hub", login):
        url = api.create_repo(name, private=not public, exist_ok=True)
    with ExitStack() as opened:
        files: dict[str, Any] = {
            path.relative_to(result).as_posix(): opened.enter_context(open_to_read(path))
            for path in sorted(result.rglob("*"))
            if not path.is_dir()
        }
        added = [CommitOperationAdd(file, content) for file, content in (files | dict(changed)).items()]
        try:
            api.create_commit(name, added, commit_message="Upload by tezo push")
        except Exception as error:  # of the network library that huggingface_hub has, whichever it is
            raise RunError(f"the upload to {name} failed ({one_line(error)}); run the same command again.") from error
    return str(url)
