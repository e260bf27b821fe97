"""A run or a base model, opened for evaluation or prediction."""

from pathlib import Path
from typing import Any

from tezo.adapters import open_adapter
from tezo.config import overlay, parse_config, read_config
from tezo.errors import RequestError
from tezo.export import attach_adapter, load_adapter
from tezo.job import load
from tezo.models import LoadedModel
from tezo.recipe import Config


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
        config = overlay(config, [("data.train", "-")])
    return parse_config(config)


def open_model(name: str, config: Config) -> LoadedModel:
    """The tuned model of a run folder (the base with its adapter, or the saved model), or a base model."""
    folder = Path(name)
    if not is_run(name):
        return load(config)
    if (folder / "adapter").is_dir():
        loaded = load(config)
        if config.model.peft != "none":
            return open_adapter(loaded, folder / "adapter")
        attach_adapter(loaded.model, load_adapter(folder / "adapter"))
        return loaded
    if (folder / "model").is_dir():
        settings = [("model.name", str(folder / "model")), ("model.dtype", config.model.dtype)]
        return load(read_config(folder / "config.yaml", settings))
    raise RequestError(
        f"{name} has neither adapter/ nor model/: the run did not end; `tezo train --output {name} --resume` goes on."
    )
