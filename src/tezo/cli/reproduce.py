"""`tezo reproduce`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("reproduce")(reproduce)


def reproduce(
    table: Annotated[str, typer.Argument(help="roberta-large, opt-13b or llama-7b.")],
    output: Annotated[Path, typer.Option(help="Folder of all runs; the same one goes on where it stopped.")],
    only: Annotated[str, typer.Option(help="Methods and tasks to run, by commas; default: all.")] = "",
    model: Annotated[str | None, typer.Option(help="Instead of the paper's.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the tasks' rows; default: the hub.")] = None,
    scale: Annotated[Literal["full", "small"], typer.Option(help="small cuts all, to see that it runs.")] = "full",
    devices: Annotated[str, typer.Option(help="By commas: one run at a time on each.")] = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be run, and run nothing.")] = False,
) -> None:
    """Run an accuracy table of the paper cell by cell, and write it beside the published numbers."""
    from tezo.reproduce import make_grid, paper_table, prepare_output, run_grid, write_tables
    from tezo.reproduce.small import small_model

    chosen, small = paper_table(table), scale == "small"
    names = [name.strip() for name in only.split(",") if name.strip()]
    own = str(output / "model") if small and model is None else model
    grid = make_grid(chosen, model=own, small=small, data_dir=data_dir, only=names)
    cells = list(grid.cells())
    if plan:
        for cell in cells:
            print(cell.folder)
        print(f"{len(cells)} runs, {sum(cell.steps for cell in cells)} steps")
        return
    prepare_output(grid, output)
    if own is not None and small and not Path(own).exists():
        small_model(chosen.kind, Path(own))
    run_grid(grid, output, devices.split(","), print)
    for path in write_tables(grid, output):
        print(f"written: {path}")
