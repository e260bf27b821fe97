"""The table that a grid's runs make, beside the published one: Markdown, CSV, LaTeX."""

import csv
import io
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.reproduce.cells import Cell, Grid
from tezo.reproduce.papers import Column, Line
from tezo.reproduce.runs import FAILED
from tezo.tasks import task


@dataclass(frozen=True)
class Entry:
    """What the runs of a line and a column showed.

    Attributes:
        line: of the table.
        column: of the table.
        published: percent.
        values: percent, one a seed, at the learning rate with the lowest mean dev loss; empty: nothing finished.
        rate: that learning rate.
        failed: runs that failed, at any rate.
        missing: runs that are not finished.
    """

    line: Line
    column: Column
    published: float
    values: tuple[float, ...]
    rate: float | None
    failed: int
    missing: int

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return statistics.mean(self.values) if self.values else None

    @property
    def shown(self) -> str:
        """Mean, with the standard deviation over seeds where there are several."""
        if self.mean is None:
            return "failed" if self.failed and not self.missing else "-"
        spread = f" ± {statistics.stdev(self.values):.1f}" if len(self.values) > 1 else ""
        return f"{self.mean:.1f}{spread}" + ("*" if self.missing or self.failed else "")


def entries(grid: Grid, output: Path) -> list[list[Entry]]:
    """A list for each line, of an entry a column."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in grid.cells():
        found.setdefault((cell.line.key, cell.column.key), []).append(cell)
    return [
        [
            _entry(line, column, published, found[line.key, column.key], output)
            for column, published in zip(grid.table.columns, line.published, strict=True)
        ]
        for line in grid.table.lines
    ]


def _entry(line: Line, column: Column, published: float, cells: list[Cell], output: Path) -> Entry:
    by_rate: dict[float | None, list[dict[str, Any]]] = {}
    failed = missing = 0
    for cell in cells:
        folder = output / cell.folder
        if (folder / "summary.json").is_file():
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            by_rate.setdefault(cell.rate, []).append(summary)
        elif (folder / FAILED).is_file():
            failed += 1
        else:
            missing += 1
    if not by_rate:
        return Entry(line, column, published, (), None, failed, missing)
    most = max(map(len, by_rate.values()))  # a rate at which a seed failed does not compete with one at which none did
    complete = {rate: runs for rate, runs in by_rate.items() if len(runs) == most}
    best = min(complete, key=lambda rate: statistics.mean(run["dev_loss"] or 0.0 for run in complete[rate]))
    metric = task(column.task).metric
    values = tuple(100 * run["after"][metric] for run in complete[best])
    return Entry(line, column, published, values, best, failed, missing)


def write_tables(grid: Grid, output: Path) -> list[Path]:
    """Writes table.md, table.csv and table.tex into `output`; returns their paths."""
    rows = entries(grid, output)
    written = []
    for name, text in (("md", markdown(grid, rows)), ("csv", as_csv(rows)), ("tex", latex(grid, rows))):
        path = output / f"table.{name}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def gap(row: list[Entry], reference: list[Entry]) -> float | None:
    """The paper's AVG.: the mean difference from FT, over the columns that both have."""
    pairs = [(a.mean, b.mean) for a, b in zip(row, reference, strict=True)]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return statistics.mean(differences) if differences else None


def _gaps(rows: list[list[Entry]]) -> Iterator[str]:
    reference = next((row for row in rows if row[0].line.label == "FT"), None)
    for row in rows:
        found = gap(row, reference) if reference is not None else None
        yield "-" if found is None else f"{found:+.1f}"


def _head(column: Column) -> str:
    name = column.task.upper()
    return name if column.per_class is None else f"{name}, k={column.per_class}"


def markdown(grid: Grid, rows: list[list[Entry]]) -> str:
    """Ours, and the published number in brackets."""
    heads = ["", *(_head(column) for column in grid.table.columns), "AVG."]
    lines = [f"# {grid.title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row, average in zip(rows, _gaps(rows), strict=True):
        shown = [f"{entry.shown} ({entry.published:.1f})" for entry in row]
        lines.append("| " + " | ".join([row[0].line.label, *shown, average]) + " |")
    return "\n".join([*lines, "", *_footnotes(grid)]) + "\n"


def _footnotes(grid: Grid) -> list[str]:
    notes = [
        "Percent; in brackets the paper's number. ± is the standard deviation over seeds, * that runs are missing or "
        "failed, AVG. the mean difference from FT.",
        *grid.table.notes,
    ]
    return [f"- {note}" for note in notes]


def as_csv(rows: list[list[Entry]]) -> str:
    """A line for each cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["method", "task", "per_class", "published", "mean", "stdev", "seeds", "lr", "failed", "missing"])
    for entry in (entry for row in rows for entry in row):
        mean = "" if entry.mean is None else round(entry.mean, 3)
        spread = round(statistics.stdev(entry.values), 3) if len(entry.values) > 1 else ""
        writer.writerow([
            entry.line.label, entry.column.task, entry.column.per_class or "", entry.published, mean, spread,
            len(entry.values), entry.rate if entry.rate is not None else "", entry.failed, entry.missing,
        ])  # fmt: skip
    return buffer.getvalue()


def latex(grid: Grid, rows: list[list[Entry]]) -> str:
    """The paper's layout, with its numbers below ours."""
    columns = grid.table.columns
    lines = [
        r"\begin{table*}[t]", r"\centering\small", rf"\caption{{{_escaped(grid.title)}.}}",
        rf"\begin{{tabular}}{{@{{}}c|{'c' * len(columns)}|c@{{}}}}", r"\toprule",
        " & ".join(["", *(rf"\textbf{{{_escaped(_head(column))}}}" for column in columns), r"\textbf{AVG.}"]) + r" \\",
        r"\midrule",
    ]  # fmt: skip
    for row, average in zip(rows, _gaps(rows), strict=True):
        ours = [_escaped(entry.shown).replace("±", r"$\pm$") for entry in row]
        lines.append(" & ".join([rf"\texttt{{{row[0].line.label}}}", *ours, f"${average}$"]) + r" \\")
        lines.append(
            " & ".join([r"\scriptsize published", *(rf"\scriptsize {e.published:.1f}" for e in row), ""]) + r" \\"
        )
    notes = [rf"\par\footnotesize {_escaped(note[2:])}" for note in _footnotes(grid)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes, r"\end{table*}"]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("%", r"\%").replace("_", r"\_").replace("&", r"\&")
