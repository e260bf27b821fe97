"""`tezo export`."""

from pathlib import Path
from typing import Annotated

import typer

from tezo.cli.common import BaseOption, TrustOption
from tezo.models.quiet import quiet_libraries


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("export")(export)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    output: Annotated[Path, typer.Option(help="Folder to write, new.")],
    form: Annotated[str, typer.Option("--format", help="lora or merged.")] = "lora",
    model: BaseOption = None,
    trust_remote_code: bool = TrustOption,
) -> None:
    """Write a run's result elsewhere: its LoRA adapter, or the whole model with everything merged in."""
    quiet_libraries()
    from tezo.training.exporting import export_run

    rank = export_run(Path(run), output, form, model=model, trust_remote_code=trust_remote_code)
    if rank is not None:
        print(f"vLLM: --max-lora-rank {rank} or the next that it allows")
    print(f"{form}: {output}")
