"""The result of a run, as a repository of the Hugging Face hub."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tezo.errors import RequestError, RunError
from tezo.files import one_line, own_object, reading, write_file
from tezo.models.kinds import kind_of
from tezo.models.lora import TASK_TYPES
from tezo.models.model_card import CARD, HERE, Saved, hub_name, shown_name, write_card
from tezo.progress.meter import UPLOADING, current
from tezo.runs.folder import ADAPTER, CONFIG, MODEL, SUMMARY, read_summary
from tezo.runs.manifest import check_manifest
from tezo.training.configuration.config import read_run_config
from tezo.training.configuration.recipe import Config
from tezo.training.execution.summary import tuning_of
from tezo.training.finished_runs.opening import check_is_run, no_result

PEFT_CONFIG = "adapter_config.json"
_WAY_OUT = "put an intact copy in its place"


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
    check_is_run(run)
    check_manifest(run, [CONFIG, ADAPTER, MODEL, SUMMARY])
    config = read_run_config(run / CONFIG, [])
    result = next((run / part for part in (ADAPTER, MODEL) if (run / part).is_dir()), None)
    if result is None:
        raise no_result(str(run))
    _check_name(name)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "result"
        shutil.copytree(result, copy)
        _prepare(copy, run, config, name)
        with current().phase(UPLOADING):
            return _upload(copy, name, public=public)


def _check_name(name: str) -> None:
    if hub_name(name) is None or name.count("/") != 1:
        raise RequestError(f"{name!r} is not a name on the hub, or is a folder here; give OWNER/NAME.")


def _prepare(folder: Path, run: Path, config: Config, name: str) -> None:
    """Makes the copy of a result fit for others: a card that names its repository, and no folder in its settings."""
    base = config.model.name
    if not (folder / CARD).is_file():  # a whole model, or an adapter of an earlier version
        write_card(folder, _saved(folder, run, config), tuning_of(run))
    text = (folder / CARD).read_text(encoding="utf-8")
    write_file(folder / CARD, text.replace(HERE, name).encode())
    if (folder / PEFT_CONFIG).is_file():
        settings = own_object(folder / PEFT_CONFIG, _WAY_OUT)
        settings["base_model_name_or_path"] = shown_name(base)
        write_file(folder / PEFT_CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


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


def _upload(folder: Path, name: str, *, public: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi(library_name="tezo", library_version=version("tezo"))
    login = "log in with `hf auth login` or set HF_TOKEN, to an account that may write there"
    with reading(f"{name} cannot be written on the hub", login):
        url = api.create_repo(name, private=not public, exist_ok=True)
    try:
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by tezo push")
    except Exception as error:  # of the network library that huggingface_hub has, whichever it is
        raise RunError(f"the upload to {name} failed ({one_line(error)}); run the same command again.") from error
    return str(url)
