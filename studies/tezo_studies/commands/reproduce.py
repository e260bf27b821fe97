"""`tezo reproduce`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tezo.cli.common import SetOption, print_json
from tezo.system.errors import RequestError, RunError
from tezo.system.progress import quiet_libraries

if TYPE_CHECKING:
    from tezo_studies.reproduce import Grid


COST_TABLES = ("memory", "time", "peft-memory", "elements")
"""Tables of costs; the other tables are of accuracies."""
NO_OUTPUT = "output is not set; give --output FOLDER for all runs."


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("reproduce")(reproduce)


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="Of the paper's accuracies: roberta-large, opt-13b, llama-7b. Of costs: memory, time, peft-memory, "
            "elements. Ours: encoder, study, study-long, study-decoder."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder of all runs; run again with it to go on.")] = None,
    only: Annotated[str, typer.Option(help="Methods and tasks to run, separated by commas; default: all.")] = "",
    model: Annotated[str | None, typer.Option(help="Model instead of the table's.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the tasks' rows; default: the hub.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type of the weights; default: as stored.")] = None,
    directions: Annotated[
        Literal["raw", "unit"] | None,
        typer.Option(help="Scale of low-rank directions. Default: raw, as published, where the rates are the paper's."),
    ] = None,
    scale: Annotated[Literal["full", "small"], typer.Option(help="small: short runs of a tiny model.")] = "full",
    devices: Annotated[str, typer.Option(help="Devices, separated by commas; one run at a time on each.")] = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="List the runs without running them.")] = False,
    recipe: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Print the recipe of this row, for `tezo train`; run nothing.")
    ] = None,
    settings: list[str] = SetOption,
    json: Annotated[bool, typer.Option("--json", help="With --plan: print JSON.")] = False,
) -> None:
    """Run a table of accuracies or costs cell by cell, and write it next to the published numbers."""
    from tezo.training.settings import parse_setting
    from tezo_studies.reproduce import find_table, make_grid, prepare_output, run_grid, write_tables
    from tezo_studies.reproduce.small_models import small_model

    quiet_libraries()
    if json and not plan:
        raise RequestError("--json is for --plan; the runs write table.csv and runs.csv.")
    if table in COST_TABLES:
        others = {"data-dir": data_dir, "dtype": dtype, "directions": directions, "scale": scale != "full",
                  "plan": plan, "recipe": recipe, "set": settings}  # fmt: skip
        _costs(table, output, only=only, model=model, devices=devices, others=others)
        return
    chosen, small = find_table(table, others=COST_TABLES), scale == "small"
    names = [name.strip() for name in only.split(",") if name.strip()]
    own = str((output or Path()) / "model") if small and model is None else model
    given = [*([("model.dtype", dtype)] if dtype is not None else []), *map(parse_setting, settings)]
    grid = make_grid(
        chosen, model=own, small=small, data_dir=data_dir, only=names, directions=directions, settings=given
    )
    if recipe is not None:
        print(grid.recipe(recipe), end="")
        return
    if plan:
        _print_plan(grid, json=json)
        return
    if output is None:
        raise RequestError(NO_OUTPUT)
    prepare_output(grid, output)
    if own is not None and model is None and not Path(own).exists():
        small_model(chosen.kind, Path(own))
    stopped = run_grid(grid, output, devices.split(","), print)
    for path in write_tables(grid, output):
        print(f"written: {path}")
    if stopped:
        raise RunError(f"runs that failed for the reasons above: {stopped}. Fix them, and run the same command again.")


def _print_plan(grid: "Grid", *, json: bool) -> None:
    cells = list(grid.search())
    others = list(grid.rest(lambda line, _: line.recommended))
    steps, later = (sum(cell.steps for cell in part) for part in (cells, others))
    if json:
        runs = [{"folder": str(cell.folder), "steps": cell.steps} for cell in cells]
        print_json({"runs": runs, "steps": steps, "then": {"runs": len(others), "steps": later}})
        return
    for cell in cells:
        print(cell.folder)
    print(f"{len(cells)} runs, {steps} steps")
    if others:
        print(f"then {len(others)} runs at the learning rates that these choose, {later} steps")


def _costs(
    name: str, output: Path | None, *, only: str, model: str | None, devices: str, others: Mapping[str, Any]
) -> None:
    """Makes a cost table cell by cell, and writes it next to the paper's numbers.

    Args:
        name: one of `COST_TABLES`.
        output: folder of its cells and texts.
        only: rows and models, separated by commas; empty: all.
        model: shapes for other columns, separated by commas; None: the table's.
        devices: name of a torch device.
        others: options of the tables of accuracies that were given, which costs do not have.
    """
    from tezo_studies.cost_tables import COST_TABLES as TABLES
    from tezo_studies.cost_tables import chosen, fill

    given = [option for option, value in others.items() if value]
    if given or "," in devices:
        option = given[0] if given else "devices with several devices"
        raise RequestError(f"{option} is for tables of accuracies; leave it out for the table {name}.")
    if output is None:
        raise RequestError(NO_OUTPUT)
    table = chosen(TABLES[name], only=_names(only), models=_names(model or ""))
    for path in fill(table, output, devices, print):
        print(f"written: {path}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
