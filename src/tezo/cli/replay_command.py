"""`tezo replay`."""

from pathlib import Path
from typing import Annotated

import typer

from tezo.cli.common import BaseOption, JsonOption, TrustOption, print_json, showing_work


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("replay")(replay)


@showing_work()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, finished or not.")],
    output: Annotated[Path, typer.Option(help="Folder to create.")],
    step: Annotated[
        int | None, typer.Option(help="Number of steps; default: up to the step that the run kept.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    model: BaseOption = None,
    trust_remote_code: bool = TrustOption,
    json: bool = JsonOption,
) -> None:
    """Rebuild the tuned model from its base and the run's steps.log, without data."""
    from tezo.training.execution.replay import replay as replay_run

    done = replay_run(run, output, step=step, device=device, model=model, trust_remote_code=trust_remote_code)
    if json:
        print_json(done)
        return
    for notice in done["notices"]:
        print(f"note: {notice}")
    print(f"{done['steps']} steps: {output / done['result']['folder']}")
