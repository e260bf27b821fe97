"""The result of a run, as a repository of the Hugging Face hub."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tezo.errors import RequestError, RunError
from tezo.files import one_line, open_to_read, own_object, read_bytes, reading
from tezo.models.kinds import kind_of
from tezo.models.lora import TASK_TYPES
from tezo.models.model_card import CARD, HERE, Saved, card_text, hub_name, shown_name
from tezo.progress.meter import UPLOADING, current
from tezo.runs.folder import ADAPTER, CONFIG, MODEL, read_summary
from tezo.training.configuration.config import read_run_config
from tezo.training.configuration.recipe import Config
from tezo.training.execution.summary import tuning_of
from tezo.training.finished_runs.opening import check_result

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
