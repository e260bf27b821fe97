"""`tezo export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tezo.cli.common import BaseOption, quiet_libraries

if TYPE_CHECKING:
    from tezo.models import LoadedModel
    from tezo.recipe import Config


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
    from tezo.cli.runs import open_base
    from tezo.export import save_model
    from tezo.models import load_model

    config = _asked(run, output, form, model)
    folder = Path(run)
    if not (folder / "adapter").is_dir():
        loaded = load_model(str(folder / "model"), kind=config.model.kind, dtype=config.model.dtype)
        save_model(loaded.model, loaded.tokenizer, output)
    elif config.model.peft != "none":
        _export_peft(open_base(folder, config), folder / "adapter", output, form)
    else:
        _export_own(open_base(folder, config), folder / "adapter", output, form, base=config.model.name)
    print(f"{form}: {output}")


def _asked(run: str, output: Path, form: str, model: str | None) -> "Config":
    """The run's configuration, if what is asked of it can be done."""
    from tezo.cli.runs import is_run, no_result, run_config
    from tezo.errors import RequestError

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


def _export_own(loaded: "LoadedModel", saved: Path, output: Path, form: str, *, base: str) -> None:
    from tezo.export import load_adapter, merge_adapter, save_adapter, save_model

    adapter = load_adapter(saved)
    if form == "lora":
        save_adapter(adapter, output, model=loaded.model, base=base)
        print(f"vLLM: --max-lora-rank {adapter.rank} or the next that it allows")
    else:
        merge_adapter(loaded.model, adapter)
        save_model(loaded.model, loaded.tokenizer, output)


def _export_peft(loaded: "LoadedModel", adapter: Path, output: Path, form: str) -> None:
    from tezo.adapters import open_adapter
    from tezo.errors import RequestError
    from tezo.export import save_model

    opened = open_adapter(loaded, adapter)
    if form == "lora":
        opened.model.save_pretrained(output)
    elif hasattr(opened.model, "merge_and_unload"):
        save_model(opened.model.merge_and_unload(), opened.tokenizer, output)
    else:
        raise RequestError("format is merged, but a prefix has no weights to merge into; use --format lora.")
