"""What a grid's runs showed: the learning rate that the search chose, and the figures at it."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.files import own_object
from tezo.studies.reproduce.grid import Cell, Grid
from tezo.studies.reproduce.table import Column, Line
from tezo.tasks import task

SUMMARY, FAILED = "summary.json", "failed.txt"
"""In the folder of a run that is over: what it showed, or how its loss came to be no number."""


@dataclass(frozen=True)
class Entry:
    """What the runs of a line and a column showed.

    Attributes:
        line: of the table.
        column: of the table.
        published: percent; None: there is no such number.
        values: percent, one a seed, at the learning rate that was chosen; empty: nothing finished.
        rate: that learning rate: the one with the lowest mean dev loss on the seeds of the search.
        failed: runs whose loss came to be no number, at any rate.
        missing: runs that are not over.
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
        """Over seeds."""
        return statistics.mean(self.values) if self.values else None

    @property
    def stdev(self) -> float | None:
        """Over seeds; None of fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def shown(self) -> str:
        """Mean, with the standard deviation over seeds where there are several."""
        if self.mean is None:
            return "failed" if self.failed and not self.missing else "-"
        spread = "" if self.stdev is None else f" ± {self.stdev:.1f}"
        return f"{self.mean:.1f}{spread}" + ("*" if self.missing or self.failed else "")

    @property
    def at_an_end(self) -> bool:
        """Whether a rate beyond those that were searched might be better still."""
        return len(self.line.rates) > 2 and self.rate in (min(self.line.rates), max(self.line.rates))


def is_finished(folder: Path) -> bool:
    """Whether a run is over, well or not."""
    return (folder / SUMMARY).is_file() or (folder / FAILED).is_file()


def summary_of(folder: Path) -> dict[str, Any] | None:
    """What a run showed; None where it has not ended well."""
    path = folder / SUMMARY
    return own_object(path, "delete the folder to run it again") if path.is_file() else None


def figure_of(cell: Cell, summary: dict[str, Any]) -> float:
    """Percent, by the metric of the cell's task."""
    return 100 * float(summary["after"][task(cell.column.task).metric])


def chooser(grid: Grid, output: Path) -> Callable[[Line, Column], float | None]:
    """(line, column) -> the learning rate with the lowest mean dev loss on the seeds of the search; None: no run ended.

    A rate at which a seed failed does not compete with one at which none did.
    """
    found: dict[tuple[str, str], dict[float | None, list[float]]] = {}
    for cell in grid.search():
        summary = summary_of(output / cell.folder)
        if summary is not None and cell.rate is not None:
            rates = found.setdefault((cell.line.key, cell.column.key), {})
            rates.setdefault(cell.rate, []).append(_to_rank(summary["dev_loss"]))

    def chosen(line: Line, column: Column) -> float | None:
        losses = found.get((line.key, column.key), {})
        most = max(map(len, losses.values()), default=0)
        complete = [rate for rate in losses if len(losses[rate]) == most]
        return min(complete, key=lambda rate: statistics.mean(losses[rate]), default=None)

    return chosen


def _to_rank(dev_loss: float | None) -> float:
    """No dev rows: nothing to choose by. NaN: worse than any number."""
    if dev_loss is None:
        return 0.0
    return math.inf if math.isnan(dev_loss) else dev_loss


def all_cells(grid: Grid, output: Path) -> Iterator[Cell]:
    """The search, and what follows from it."""
    yield from grid.search()
    yield from grid.rest(chooser(grid, output))


def entries(grid: Grid, output: Path) -> list[list[Entry]]:
    """A list for each line, of an entry a column."""
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
