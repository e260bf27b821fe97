"""New runs of the study beside those that were read before: a column of a line is replaced whole, the rest stays."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tezo_studies.reproduce import Grid

from tezo.system.errors import RequestError

SAME = ("table", "title", "model", "small", "seeds")
"""What both must be of."""
LINE = ("label", "key", "method", "options", "settings", "rates")
"""What describes a line."""


def joined_curves(path: Path, curves: dict[str, Any], grid: Grid) -> dict[str, Any]:
    """The curves with those of `path` that they lack.

    Raises:
        RequestError: `path` is of another table, or one of its lines had other settings.
    """
    if not path.is_file():
        return curves
    known = json.loads(path.read_text(encoding="utf-8"))
    own, before = ({line["key"]: line for line in made["lines"]} for made in (curves, known))
    changed = [key for key in own.keys() & before.keys() if any(own[key][k] != before[key][k] for k in LINE)]
    if changed or any(known[key] != curves[key] for key in SAME):
        raise RequestError(f"{path} is of another table or of other settings{of(changed)}; give another --results.")
    order = [column.key for column in grid.table.columns]
    lines = []
    for line in line_order(grid, before):
        found = [made[line] for made in (before, own) if line in made]
        columns = {key: column for made in found for key, column in made["columns"].items()}
        if found:
            lines.append(found[-1] | {"columns": {key: columns[key] for key in order if key in columns}})
    return curves | {
        "columns": [key for key in order if key in known["columns"] or key in curves["columns"]],
        "commit": all_of((known["commit"], curves["commit"])),
        "hardware": all_of((known["hardware"], curves["hardware"])),
        "versions": {name: all_of((known["versions"].get(name, v), v)) for name, v in curves["versions"].items()},
        "lines": lines,
    }


def joined_runs(path: Path, runs: Iterable[dict[str, Any]], grid: Grid) -> list[dict[str, Any]]:
    """The rows of `path` whose column of a line has no run here, and the runs, in the order of the table."""
    runs = list(runs)
    own = {(run["line"], run["column"]) for run in runs}
    kept: list[dict[str, Any]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            kept = [row for row in csv.DictReader(file) if (row["line"], row["column"]) not in own]
    lines, columns = line_order(grid, [row["line"] for row in kept]), [column.key for column in grid.table.columns]
    return sorted([*kept, *runs], key=lambda run: (columns.index(run["column"]), lines.index(run["line"])))


def line_order(grid: Grid, known: Iterable[str]) -> list[str]:
    """Keys of the table's lines, and then of those that it no longer has, which stay as they were measured."""
    return list(dict.fromkeys([*(line.key for line in grid.table.lines), *known]))


def all_of(values: Iterable[Any]) -> str:
    """The different ones, by semicolons; a value may itself be such a list."""
    return "; ".join(sorted({part for value in values for part in str(value).split("; ")}))


def of(lines: Sequence[str]) -> str:
    """For a message."""
    return f" (of {', '.join(sorted(lines))})" if lines else ""
