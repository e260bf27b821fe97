"""`tezo replay`."""

from pathlib import Path
from typing import Annotated

import typer

from tezo.cli.common import BaseOption, JsonOption, print_json
from tezo.models.quiet import quiet_libraries


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("replay")(replay)


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, finished or not.")],
    output: Annotated[Path, typer.Option(help="Folder to write, new.")],
    step: Annotated[int | None, typer.Option(help="How many steps; default: those that the run kept.")] = None,
    device: Annotated[str, typer.Option(help="To do it on.")] = "auto",
    model: BaseOption = None,
    json: bool = JsonOption,
) -> None:
    """Make the tuned model again from its base and the run's steps.log, without data."""
    quiet_libraries()
    from tezo.training.replay import replay as take_again

    done = take_again(run, output, step=step, device=device, model=model)
    if json:
        print_json(done)
        return
    for notice in done["notices"]:
        print(f"note: {notice}")
    print(f"{done['steps']} steps: {output / done['result']['folder']}")
