"""The table that a grid's runs make, beside the published one: Markdown, CSV, and a line for each run."""

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.directions.low_rank import Scale
from tezo_studies.reproduce.grid import Grid
from tezo_studies.reproduce.results import Entry, all_cells, entries, figure_of, summary_of
from tezo_studies.reproduce.table import Column

DIRECTIONS: dict[Scale, str] = {
    "raw": "Low-rank directions have the published scale: method.scale=raw, and unit variance in SubZO.",
    "unit": "Low-rank directions have unit variance (method.scale=unit), unlike those of the published algorithms.",
}
TIED = "†"
"""Of a mean within the spread of the best one."""


def write_tables(grid: Grid, output: Path) -> list[Path]:
    """Writes table.md, table.csv, averages.csv and runs.csv into `output`; returns their paths."""
    rows = entries(grid, output)
    runs = list(_runs(grid, output))
    texts = {
        "table.md": markdown(grid, rows, runs),
        "table.csv": _as_csv(ENTRY, (line for row in rows for line in map(_entry_line, row))),
        "averages.csv": _as_csv(AVERAGE, _average_lines(rows, grid.table.groups)),
        "runs.csv": _as_csv(RUN, runs),
    }
    for name, text in texts.items():
        (output / name).write_text(text, encoding="utf-8")
    return [output / name for name in texts]


RUN = ("method", "column", "lr", "seed", "dev_loss", "percent", "test_loss", "steps", "kept_step",
       "num_forward_passes", "seconds_stepping", "hardware", "torch")  # fmt: skip
ENTRY = ("method", "task", "per_class", "published", "mean", "stdev", "seeds", "lr", "failed", "missing")


AVERAGE = ("method", "columns", "published", "average")


def _runs(grid: Grid, output: Path) -> Iterator[tuple[Any, ...]]:
    for cell in all_cells(grid, output):
        summary = summary_of(output / cell.folder)
        if summary is not None:
            own = (cell.line.label, cell.column.key, cell.rate, cell.seed, summary["dev_loss"])
            figures = figure_of(cell, summary), summary["after"].get("loss")
            yield *own, *figures, *(summary.get(key) for key in RUN[7:-1]), summary.get("versions", {}).get("torch")


def _entry_line(entry: Entry) -> tuple[Any, ...]:
    mean, spread = (None if x is None else round(x, 3) for x in (entry.mean, entry.stdev))
    own = entry.line.label, entry.column.task, entry.column.per_class, entry.published, mean, spread
    return *own, len(entry.values), entry.rate, entry.failed, entry.missing


def _average_lines(rows: list[list[Entry]], groups: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for row, own in zip(rows, averages(rows, groups), strict=True):
        for average in own:
            ours = None if average.ours is None else round(average.ours, 3)
            yield row[0].line.label, average.group or "all", average.published, ours


def _as_csv(head: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return buffer.getvalue()


def gap(row: list[Entry], reference: list[Entry]) -> float | None:
    """The paper's AVG.: the mean difference from FT, over the columns that both have."""
    pairs = [(a.mean, b.mean) for a, b in zip(row, reference, strict=True)]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return statistics.mean(differences) if differences else None


@dataclass(frozen=True)
class Average:
    """AVG. of a row over a group of columns: `gap`, and the published one; None if there is none."""

    group: str
    ours: float | None
    published: float | None

    @property
    def shown(self) -> str:
        """Text for the table."""
        ours = "-" if self.ours is None else f"{self.ours:+.1f}"
        return ours if self.published is None else f"{ours} ({self.published:+.1f})"


def averages(rows: list[list[Entry]], groups: Sequence[str]) -> list[list[Average]]:
    """For each row its averages, one per group of columns."""
    reference = next((row for row in rows if row[0].line.label == "FT"), None)

    def average(row: list[Entry], group: str) -> Average:
        places = [place for place, entry in enumerate(row) if entry.column.group == group]
        own, base = ([of[place] for place in places] if of is not None else None for of in (row, reference))
        ours = gap(own, base) if own is not None and base is not None else None
        return Average(group, ours, row[0].line.published_averages.get(group))

    return [[average(row, group) for group in groups] for row in rows]


def tied_with_the_best(entry: Entry, column: Iterable[Entry]) -> bool:
    """Whether its mean is no further below its column's best zeroth-order one than the larger standard deviation."""
    rivals = [rival for rival in column if rival.line.is_zeroth_order and rival.mean is not None]
    if not rivals or entry.mean is None or not entry.line.is_zeroth_order:
        return False
    best = max(rivals, key=lambda rival: rival.mean or 0.0)
    return (best.mean or 0.0) - entry.mean <= max(best.stdev or 0.0, entry.stdev or 0.0)


def _marked(rows: list[list[Entry]]) -> list[list[str]]:
    """What each entry shows, with `TIED` where there are spreads to tell by."""
    columns = list(zip(*rows, strict=True))
    return [
        [
            entry.shown + (TIED if entry.stdev is not None and tied_with_the_best(entry, columns[place]) else "")
            for place, entry in enumerate(row)
        ]
        for row in rows
    ]


def _head(column: Column) -> str:
    name = column.task.upper()
    return name if column.per_class is None else f"{name}, k={column.per_class}"


def markdown(grid: Grid, rows: list[list[Entry]], runs: list[tuple[Any, ...]]) -> str:
    """Ours, and the published number in brackets where there is one; the average of a group after its last column."""
    columns, groups = grid.table.columns, grid.table.groups
    last = {column.group: place for place, column in enumerate(columns)}

    def line(label: str, cells: Sequence[str], of_groups: Sequence[str]) -> str:
        after = {last[group]: text for group, text in zip(groups, of_groups, strict=True)}
        shown = [text for place, cell in enumerate(cells) for text in (cell, after.get(place)) if text is not None]
        return "| " + " | ".join([label, *shown]) + " |"

    heads = ["AVG." + (f", {group}" if group else "") for group in groups]
    lines = [f"# {grid.title}", "", line("", [_head(column) for column in columns], heads)]
    lines.append("|" + "---|" * (1 + len(columns) + len(groups)))
    for row, marked, own in zip(rows, _marked(rows), averages(rows, groups), strict=True):
        shown = [
            text if entry.published is None else f"{text} ({entry.published:.1f})"
            for entry, text in zip(row, marked, strict=True)
        ]
        lines.append(line(row[0].line.label, shown, [average.shown for average in own]))
    return "\n".join([*lines, "", *(f"- {note}" for note in _footnotes(grid, rows, runs))]) + "\n"


def _footnotes(grid: Grid, rows: list[list[Entry]], runs: list[tuple[Any, ...]]) -> Iterator[str]:
    table, found = grid.table, [entry for row in rows for entry in row]
    yield DIRECTIONS[table.directions]
    if grid.settings:
        yield f"Set for all runs: {', '.join(f'{key}={value}' for key, value in grid.settings)}."
    if any(entry.published is not None for entry in found):
        yield "In brackets: the paper's number."
    yield (
        "Percent; ± is the standard deviation over seeds, * that runs are missing or failed, AVG. the mean difference "
        f"from FT. {TIED}: no further below the column's best zeroth-order mean than the larger of the two standard "
        "deviations, so that these runs do not tell them apart."
    )
    yield (
        f"Seeds {', '.join(map(str, table.seeds))}. The learning rate is the one of those searched with the lowest "
        f"dev loss on {_seeds(table.seeds[: table.search_seeds])}; "
        + ("the checkpoint the one with the lowest dev loss." if table.keeps_best else "both are of the last step.")
    )
    for searched in dict.fromkeys((line.rates, line.is_zeroth_order) for line in table.lines if line.rates):
        names = [line.label for line in table.lines if (line.rates, line.is_zeroth_order) == searched]
        yield f"Rates searched: {', '.join(f'{rate:g}' for rate in searched[0])} ({', '.join(names)})."
    at_end = [f"{entry.line.label} {entry.column.key}" for entry in found if entry.at_an_end]
    if at_end:
        yield f"The chosen rate is the first or last of its search for {', '.join(at_end)}."
    trained = [dict(zip(RUN, run, strict=True)) for run in runs if run[RUN.index("steps")]]
    if trained:
        passes, places, versions = (
            ", ".join(map(str, sorted({run[key] for run in trained})))
            for key in ("num_forward_passes", "hardware", "torch")
        )
        hours = sum(run["seconds_stepping"] for run in trained) / 3600
        yield f"{len(runs)} runs; {hours:.2f} hours of steps on {places}, torch {versions}; passes a run: {passes}."
    yield from table.notes


def _seeds(seeds: tuple[int, ...]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else "average over the seeds " + ", ".join(map(str, seeds))
