"""A cost table: its cells, one at a time, kept in the output folder so that the same command goes on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tezo.models.loading import choose_device
from tezo.runs.environment import hardware
from tezo.system.errors import RequestError, nearest
from tezo.system.files import check_free, json_text, own_object, write_file
from tezo_studies.bench.shapes import SHAPES
from tezo_studies.cost_tables.cost_line import CostLine

CELLS = "cells.json"
FORECAST, COUNTED = "forecast", "counted"

Cells = Mapping[str, Any]
"""Row and shape, see `key_of_cell` -> the cell: a number, or the counts of `count_elements`; None: it does not fit."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """A table with a row for each method.

    Attributes:
        name: name on the command line.
        models: columns, keys of `SHAPES`.
        lines: rows.
        measure: (row, shape, device) -> the cell.
        forecast: (row, shape) -> the cell where there is no GPU; None: `measure` counts, alike on every device.
        texts: (the table, its cells, how they were made) -> file name -> text.
    """

    name: str
    models: tuple[str, ...]
    lines: tuple[CostLine, ...]
    measure: Callable[[CostLine, str, str], Any]
    forecast: Callable[[CostLine, str], Any] | None
    texts: Callable[["CostTable", Cells, str], dict[str, str]]


def key_of_cell(line: CostLine, model: str) -> str:
    """Name of a cell in the file of cells."""
    return f"{line.key} {model}"


def chosen(table: CostTable, *, only: Sequence[str] = (), models: Sequence[str] = ()) -> CostTable:
    """The table with some of its rows and columns.

    Args:
        table: a table.
        only: rows and columns to keep, in any case; empty: all.
        models: shapes for other columns than the table's own; empty: the table's.

    Raises:
        RequestError: there is no such row, column or shape.
    """
    for name in models:
        if name not in SHAPES:
            raise RequestError(f"model: there is no shape {name!r}. " + nearest(name, SHAPES))
    columns, lines = tuple(models) or table.models, {line.key: line for line in table.lines}
    wanted = {name.lower() for name in only}
    for name in sorted(wanted - lines.keys() - set(columns)):
        raise RequestError(
            f"only: {name!r} is not a row or model of {table.name}. " + nearest(name, [*lines, *columns])
        )
    return replace(
        table,
        models=tuple(name for name in columns if name in wanted or not wanted & set(columns)),
        lines=tuple(line for key, line in lines.items() if key in wanted or not wanted & lines.keys()),
    )


def fill(table: CostTable, output: Path, device: str, tell: Callable[[str], None]) -> list[Path]:
    """Makes the missing cells, and writes the texts of the table; returns their paths.

    Args:
        table: the table.
        output: folder; the same table goes on in it.
        device: name of a torch device.
        tell: called with a message for every cell.

    Raises:
        RequestError: the folder has another table, cells made in another way, or other files.
    """
    place = choose_device(device)
    forecast = None if place.type == "cuda" else table.forecast
    by = FORECAST if forecast is not None else COUNTED if table.forecast is None else hardware()
    cells = _opened(output, {"table": table.name, "by": by})
    planned = [(line, model) for model in table.models for line in table.lines]
    for number, (line, model) in enumerate(planned, start=1):
        key = key_of_cell(line, model)
        if key in cells:
            continue
        cells[key] = table.measure(line, model, str(place)) if forecast is None else forecast(line, model)
        _save(output, {"table": table.name, "by": by, "cells": cells})
        tell(f"{number}/{len(planned)} {key}: {by}")
    written = table.texts(table, cells, by)
    for name, text in written.items():
        write_file(output / name, text.encode())
    return [output / name for name in written]


def _opened(output: Path, own: dict[str, str]) -> dict[str, Any]:
    """The cells in a folder, which is made if it is missing."""
    if (output / CELLS).is_file():
        found = own_object(output / CELLS, "give another --output")
        head = {key: found.get(key) for key in own}
        if head != own or not isinstance(found.get("cells"), dict):
            raise RequestError(f"output: {output} has cells of {head}, not of {own}; give another --output.")
        return dict(found["cells"])
    check_free(output)
    output.mkdir(parents=True, exist_ok=True)
    _save(output, own | {"cells": {}})
    return {}


def _save(output: Path, value: dict[str, Any]) -> None:
    write_file(output / CELLS, (json_text(value, indent=2) + "\n").encode())
