"""`tezo reproduce`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tezo.cli.common import SetOption, print_json
from tezo.cli.reproduce_costs import NAMES as COST_TABLES
from tezo.cli.reproduce_costs import reproduce_costs
from tezo.models.quiet import quiet_libraries

if TYPE_CHECKING:
    from tezo.studies.reproduce import Grid


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("reproduce")(reproduce)


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="The paper's roberta-large, opt-13b, llama-7b, or costs: memory, time, peft-memory, elements; or "
            "ours: encoder, study, study-long, study-decoder."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of all runs; run again with it to go on.")],
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
    settings: list[str] = SetOption,
    json: Annotated[bool, typer.Option("--json", help="With --plan: print JSON.")] = False,
) -> None:
    """Run a table of accuracies or costs cell by cell, and write it next to the published numbers."""
    from tezo.errors import RequestError, RunError
    from tezo.studies.reproduce import find_table, make_grid, prepare_output, run_grid, write_tables
    from tezo.studies.reproduce.small_models import small_model
    from tezo.training.configuration.config import parse_setting

    quiet_libraries()
    if json and not plan:
        raise RequestError("--json is for --plan; the runs write table.csv and runs.csv.")
    if table in COST_TABLES:
        others = {"data-dir": data_dir, "dtype": dtype, "directions": directions, "scale": scale != "full",
                  "plan": plan, "set": settings}  # fmt: skip
        reproduce_costs(table, output, only=only, model=model, devices=devices, others=others)
        return
    chosen, small = find_table(table), scale == "small"
    names = [name.strip() for name in only.split(",") if name.strip()]
    own = str(output / "model") if small and model is None else model
    given = [*([("model.dtype", dtype)] if dtype is not None else []), *map(parse_setting, settings)]
    grid = make_grid(
        chosen, model=own, small=small, data_dir=data_dir, only=names, directions=directions, settings=given
    )
    if plan:
        _print_plan(grid, json=json)
        return
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
