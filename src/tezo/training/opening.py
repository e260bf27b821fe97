"""A run or a base model, opened for evaluation or prediction."""

from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.models.loading import LoadedModel
from tezo.models.lora import attach_adapter, load_adapter
from tezo.models.peft_adapters import open_adapter
from tezo.runs.fingerprint import check_model
from tezo.runs.folder import LOG
from tezo.runs.step_log import read_header
from tezo.tasks.splits import NO_ROWS
from tezo.training.config import overlay, parse_config, read_config
from tezo.training.job import load
from tezo.training.recipe import Config


def is_run(name: str) -> bool:
    """Whether `name` is a run folder."""
    return (Path(name) / "config.yaml").is_file()


def run_config(name: str, settings: list[tuple[str, Any]]) -> Config:
    """The configuration of a run folder, or one made for a base model, with settings laid over it."""
    if is_run(name):
        return read_config(Path(name) / "config.yaml", settings)
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise RequestError(f"{name} is neither a run folder (no config.yaml) nor a model (no config.json).")
    config = overlay({"model": {"name": name}}, settings)
    if not {"task", "train"} & set(config.get("data", {})):
        config = overlay(config, [("data.train", NO_ROWS)])
    return parse_config(config)


def open_base(folder: Path, config: Config) -> LoadedModel:
    """The base that a run's adapter belongs to; an error where it is as it was but for its weights."""
    loaded, log = load(config), folder / LOG
    own = read_config(folder / "config.yaml", []).model
    alike = (own.dtype, own.quantization) == (config.model.dtype, config.model.quantization)
    if alike and log.is_file():
        header = read_header(log)
        if header.get("device") == loaded.device.type:
            check_model(header, loaded.fingerprint)
    return loaded


def open_model(name: str, config: Config) -> LoadedModel:
    """The tuned model of a run folder (the base with its adapter, or the saved model), or a base model."""
    folder = Path(name)
    if not is_run(name):
        return load(config)
    if (folder / "adapter").is_dir():
        loaded = open_base(folder, config)
        if config.model.peft != "none":
            return open_adapter(loaded, folder / "adapter")
        attach_adapter(loaded.model, load_adapter(folder / "adapter"))
        return loaded
    if (folder / "model").is_dir():
        settings = [("model.name", str(folder / "model")), ("model.dtype", config.model.dtype)]
        return load(read_config(folder / "config.yaml", settings))
    raise no_result(name)


def no_result(name: str) -> RequestError:
    """Of a run that left neither an adapter nor a model."""
    return RequestError(
        f"{name} has neither adapter/ nor model/: the run did not end; `tezo train --output {name} --resume` goes on."
    )
