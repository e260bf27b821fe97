"""Results of a grid's runs: the learning rate that the search chose, and the metrics at that rate."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.system.files import own_object
from tezo_studies.reproduce.grid import Cell, Grid
from tezo_studies.reproduce.table import Column, Line

SUMMARY, FAILED = "summary.json", "failed.txt"
"""Files in the folder of a finished run: its summary, or the message of the NaN or infinite loss that ended it."""


@dataclass(frozen=True)
class Entry:
    """The results of a line and a column.

    Attributes:
        line: row of the table.
        column: column of the table.
        published: published number in percent; None if there is none.
        values: percent, one per seed, at the chosen learning rate; empty if no run has finished.
        rate: the chosen learning rate, that with the lowest mean dev loss on the seeds of the search.
        failed: number of runs, at any rate, that ended with a NaN or infinite loss.
        missing: number of runs that have not finished.
    """

    line: Line
    column: Column
    published: float | None
    values: tuple[float, ...]
    rate: float | None
    failed: int
    missing: int

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None if there are no values."""
        return statistics.mean(self.values) if self.values else None

    @property
    def stdev(self) -> float | None:
        """Standard deviation over seeds; None if there are fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def shown(self) -> str:
        """Text for the table: mean and, for several seeds, standard deviation; * marks missing or failed runs."""
        if self.mean is None:
            return "failed" if self.failed and not self.missing else "-"
        spread = "" if self.stdev is None else f" ± {self.stdev:.1f}"
        return f"{self.mean:.1f}{spread}" + ("*" if self.missing or self.failed else "")

    @property
    def at_an_end(self) -> bool:
        """Whether the chosen rate is the lowest or highest searched, so that one beyond might be better."""
        return len(self.line.rates) > 2 and self.rate in (min(self.line.rates), max(self.line.rates))


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has ended, successfully or with a NaN or infinite loss."""
    return (folder / SUMMARY).is_file() or (folder / FAILED).is_file()


def summary_of(folder: Path) -> dict[str, Any] | None:
    """The summary of a run; None if it has not finished successfully."""
    path = folder / SUMMARY
    return own_object(path, "delete the folder to run it again") if path.is_file() else None


def figure_of(cell: Cell, summary: dict[str, Any]) -> float:
    """The metric of the cell's task after training, in percent."""
    return 100 * float(summary["after"][cell.column.metric])


def chooser(grid: Grid, output: Path) -> Callable[[Line, Column], float | None]:
    """A function (line, column) -> the learning rate with the lowest mean dev loss on the seeds of the search.

    It returns None if no run has finished. A rate with a failed seed is not compared with one that has none.
    """
    dev_losses: dict[tuple[str, str], dict[float | None, list[float]]] = {}
    for cell in grid.search():
        summary = summary_of(output / cell.folder)
        if summary is not None and cell.rate is not None:
            rates = dev_losses.setdefault((cell.line.key, cell.column.key), {})
            rates.setdefault(cell.rate, []).append(_comparable(summary["dev_loss"]))

    def chosen(line: Line, column: Column) -> float | None:
        losses = dev_losses.get((line.key, column.key), {})
        most = max(map(len, losses.values()), default=0)
        complete = [rate for rate in losses if len(losses[rate]) == most]
        return min(complete, key=lambda rate: statistics.mean(losses[rate]), default=None)

    return chosen


def _comparable(dev_loss: float | None) -> float:
    """The dev loss as a comparable number: 0 for all runs if there are no dev rows, infinity for NaN."""
    if dev_loss is None:
        return 0.0
    return math.inf if math.isnan(dev_loss) else dev_loss


def all_cells(grid: Grid, output: Path) -> Iterator[Cell]:
    """The runs of the search, and those on the other seeds at the rates that it chose."""
    yield from grid.search()
    yield from grid.rest(chooser(grid, output))


def entries(grid: Grid, output: Path) -> list[list[Entry]]:
    """For each line of the table its entries, one per column."""
    chosen = chooser(grid, output)
    cells = list(all_cells(grid, output))
    return [
        [_entry(line, place, column, chosen(line, column), cells, output)
         for place, column in enumerate(grid.table.columns)]
        for line in grid.table.lines
    ]  # fmt: skip


def _entry(line: Line, place: int, column: Column, rate: float | None, cells: Iterable[Cell], output: Path) -> Entry:
    own = [cell for cell in cells if (cell.line.key, cell.column) == (line.key, column)]
    over = [cell for cell in own if is_finished(output / cell.folder)]
    ended = [(cell, summary) for cell in over if (summary := summary_of(output / cell.folder)) is not None]
    return Entry(
        line=line,
        column=column,
        published=line.published[place] if line.published else None,
        values=tuple(figure_of(cell, summary) for cell, summary in ended if cell.rate == rate),
        rate=rate,
        failed=len(over) - len(ended),
        missing=len(own) - len(over),
    )
