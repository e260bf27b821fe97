"""`tezo export`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tezo.cli.common import BaseOption
from tezo.models.quiet import quiet_libraries

if TYPE_CHECKING:
    from tezo.models.loading import LoadedModel
    from tezo.training.recipe import Config


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("export")(export)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    output: Annotated[Path, typer.Option(help="Folder to write, new.")],
    form: Annotated[str, typer.Option("--format", help="lora or merged.")] = "lora",
    model: BaseOption = None,
) -> None:
    """Write a run's result elsewhere: its LoRA adapter, or the whole model with everything merged in."""
    quiet_libraries()
    from tezo.files import new_folder

    write = _writer(Path(run), _asked(run, output, form, model), form)
    with new_folder(output) as folder:
        write(folder)
    print(f"{form}: {output}")


def _asked(run: str, output: Path, form: str, model: str | None) -> "Config":
    """The run's configuration, if what is asked of it can be done."""
    from tezo.errors import RequestError
    from tezo.training.opening import is_run, no_result, run_config

    if not is_run(run):
        raise RequestError(f"{run} is not a run folder (it has no config.yaml); give one that tezo train made.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(f"output: {output} is in use; give another --output, or delete it first.")
    if form not in ("lora", "merged"):
        raise RequestError(f"format is {form!r}; it must be lora or merged.")
    config = run_config(run, [("model.placement", "device"), *([("model.name", model)] if model else [])])
    if form == "merged" and config.model.quantization != "none":
        raise RequestError(
            f"format is merged, but the base is packed as {config.model.quantization} and takes no change; "
            "use --format lora."
        )
    if not any((Path(run) / name).is_dir() for name in ("adapter", "model")):
        raise no_result(run)
    if form == "lora" and not (Path(run) / "adapter").is_dir():
        raise RequestError(f"{run} has no adapter: {config.method.name} changed the weights; use --format merged.")
    return config


def _writer(run: Path, config: "Config", form: str) -> Callable[[Path], None]:
    """What writes the export into a folder; models are opened before."""
    from tezo.models.loading import load_model
    from tezo.training.opening import open_base

    if not (run / "adapter").is_dir():
        return _model_writer(load_model(str(run / "model"), kind=config.model.kind, dtype=config.model.dtype))
    loaded = open_base(run, config)
    if config.model.peft != "none":
        return _peft_writer(loaded, run / "adapter", form)
    return _own_writer(loaded, run / "adapter", form, base=config.model.name)


def _model_writer(loaded: "LoadedModel") -> Callable[[Path], None]:
    from tezo.models.lora import save_model

    return partial(save_model, loaded.model, loaded.tokenizer)


def _own_writer(loaded: "LoadedModel", saved: Path, form: str, *, base: str) -> Callable[[Path], None]:
    from tezo.models.lora import load_adapter, merge_adapter, save_adapter

    adapter = load_adapter(saved)
    if form == "merged":
        merge_adapter(loaded.model, adapter)
        return _model_writer(loaded)
    print(f"vLLM: --max-lora-rank {adapter.rank} or the next that it allows")
    return partial(save_adapter, adapter, model=loaded.model, base=base)


def _peft_writer(loaded: "LoadedModel", adapter: Path, form: str) -> Callable[[Path], None]:
    from tezo.errors import RequestError
    from tezo.models.peft_adapters import open_adapter

    opened = open_adapter(loaded, adapter)
    if form == "lora":
        return opened.model.save_pretrained  # type: ignore[no-any-return]
    if not hasattr(opened.model, "merge_and_unload"):
        raise RequestError("format is merged, but a prefix has no weights to merge into; use --format lora.")
    return _model_writer(replace(opened, model=opened.model.merge_and_unload()))
