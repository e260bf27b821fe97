"""The table that a grid's runs make, beside the published one: Markdown, CSV, and a line for each run."""

import csv
import io
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tezo.studies.reproduce.grid import Grid
from tezo.studies.reproduce.results import Entry, all_cells, entries, figure_of, summary_of
from tezo.studies.reproduce.table import Column

TIED = "†"
"""Of a mean within the spread of the best one."""


def write_tables(grid: Grid, output: Path) -> list[Path]:
    """Writes table.md, table.csv and runs.csv into `output`; returns their paths."""
    rows = entries(grid, output)
    runs = list(_runs(grid, output))
    texts = {
        "table.md": markdown(grid, rows, runs),
        "table.csv": _as_csv(ENTRY, map(_entry_line, (entry for row in rows for entry in row))),
        "runs.csv": _as_csv(RUN, runs),
    }
    for name, text in texts.items():
        (output / name).write_text(text, encoding="utf-8")
    return [output / name for name in texts]


RUN = ("method", "column", "lr", "seed", "dev_loss", "percent", "test_loss", "steps", "kept_step",
       "num_forward_passes", "seconds_stepping", "hardware", "torch")  # fmt: skip
ENTRY = ("method", "task", "per_class", "published", "mean", "stdev", "seeds", "lr", "failed", "missing")


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


def _gaps(rows: list[list[Entry]]) -> Iterator[str]:
    reference = next((row for row in rows if row[0].line.label == "FT"), None)
    for row in rows:
        found = gap(row, reference) if reference is not None else None
        yield "-" if found is None else f"{found:+.1f}"


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
    """Ours, and the published number in brackets where there is one."""
    heads = ["", *(_head(column) for column in grid.table.columns), "AVG."]
    lines = [f"# {grid.title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row, marked, average in zip(rows, _marked(rows), _gaps(rows), strict=True):
        shown = [
            text if entry.published is None else f"{text} ({entry.published:.1f})"
            for entry, text in zip(row, marked, strict=True)
        ]
        lines.append("| " + " | ".join([row[0].line.label, *shown, average]) + " |")
    return "\n".join([*lines, "", *(f"- {note}" for note in _footnotes(grid, rows, runs))]) + "\n"


def _footnotes(grid: Grid, rows: list[list[Entry]], runs: list[tuple[Any, ...]]) -> Iterator[str]:
    table, found = grid.table, [entry for row in rows for entry in row]
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
