"""`tezo analyze`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tezo.cli.common import JsonOption, SetOption, print_json, showing_work
from tezo.system.errors import RequestError
from tezo.system.progress import current, quiet_libraries


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("analyze")(analyze)


def analyze(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Analysis; without it, list all.")] = None,
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN|FILE]...", help="Run folders, or bench JSON files.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for NAME.png, NAME.svg and NAME.json.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file, hub name, or embedded:smollm2-135m.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="JSONL, CSV, TSV or Parquet file, or hub data set.")] = None,
    task: Annotated[str | None, typer.Option(help="Task instead of --data; see `tezo tasks`.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the task's rows; default: the hub.")] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Draw a figure of the paper from your own model, runs or benchmarks, and write its numbers."""
    quiet_libraries()
    from tezo.training.settings import overlay, parse_config, parse_setting
    from tezo_studies.analysis import ANALYSES, Given, analysis, save

    if name is None and json:
        print_json([{"name": e.name, "paper": e.paper, "summary": e.summary} for e in ANALYSES.values()])
        return
    if name is None:
        for entry in ANALYSES.values():
            print(f"{entry.name:<18} {entry.paper:<32} {entry.summary}")
        return
    entry = analysis(name)
    if output is None:
        raise RequestError("output is not set; give --output FOLDER for the figure and its numbers.")
    pairs: list[tuple[str, Any]] = [parse_setting(text) for text in settings]
    named = [("model.name", model), ("data.train", data), ("data.task", task), ("data.dir", data_dir)]
    recipe = [(key, value) for key, value in named if value is not None] + [pair for pair in pairs if "." in pair[0]]
    config = parse_config(overlay({}, recipe)) if recipe else None
    options = entry.read_options([pair for pair in pairs if "." not in pair[0]])
    with showing_work(), current().phase(f"measuring {entry.name}"):
        numbers = entry.run(options, Given(config, tuple(paths or ())))
        written = save(entry, numbers, output)
    if json:
        print_json(numbers | {"files": [str(path) for path in written]})
        return
    print(numbers["caption"])
    for table in entry.tables(numbers) if entry.tables is not None else []:
        _print_table(table)
    for path in written:
        print(f"  {path}")


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for first, *others in rows:
        padded = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([f"{first:<{widths[0]}}", *padded]))
