"""`tezo report`."""

from pathlib import Path
from typing import Annotated

import typer

from tezo.errors import RequestError
from tezo.models.quiet import quiet_libraries


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("report")(report)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    output: Annotated[Path | None, typer.Option(help="HTML file to write.")] = None,
) -> None:
    """Write one HTML page about runs: results, curves, settings and the command that repeats each."""
    if output is None:
        raise RequestError("output is not set; give --output FILE.html for the page.")
    quiet_libraries()
    from tezo.report import save

    save(runs, output)
    print(output)
