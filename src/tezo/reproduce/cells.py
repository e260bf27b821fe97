"""A paper's table as a grid of runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tezo.errors import RequestError, nearest
from tezo.reproduce.papers import FT_BATCH, FT_EPOCHS, Column, Line, PaperTable
from tezo.splits import NUM_TRAIN
from tezo.tasks import task

SMALL = {"steps": 3, "seeds": 1, "rates": 1, "per_class": (2, 4), "train": 16, "dev": 8, "test": 12, "rank": 4}
"""What `--scale small` cuts everything to; see `Grid.title`."""

_TARGETS = {"causal": ["all"], "masked": ["all", "!token_type_embeddings"]}
"""All parameters, as in the paper; RoBERTa's one token type is a matrix of one row, which has no rank of 8 or 64."""


@dataclass(frozen=True)
class Cell:
    """One run: a line and a column of the table at a learning rate and a seed.

    Attributes:
        line: of the table.
        column: of the table.
        rate: learning rate; None: the model as it is.
        seed: of the run and of the choice of rows.
        tree: configuration, as nested mappings.
    """

    line: Line
    column: Column
    rate: float | None
    seed: int
    tree: dict[str, Any]

    @property
    def steps(self) -> int:
        """How many it takes."""
        return int(self.tree["train"]["steps"]) if "train" in self.tree else 0

    @property
    def folder(self) -> Path:
        """Of the run, below the grid's."""
        rate = "as-it-is" if self.rate is None else f"lr-{self.rate:g}"
        return Path(self.line.key, self.column.key, rate, f"seed-{self.seed}")


@dataclass(frozen=True)
class Grid:
    """What is to be run.

    Attributes:
        table: lines and columns, those that were chosen.
        model: folder or hub name.
        small: whether everything was cut to `SMALL`.
        data_dir: folder of the tasks' rows; None: the hub.
    """

    table: PaperTable
    model: str
    small: bool
    data_dir: str | None

    @property
    def title(self) -> str:
        """Of the written table."""
        if not self.small:
            return f"{self.table.title}, with {self.model}"
        return (
            f"{self.table.title}: SMALL SCALE. Random weights of a tiny configuration, {SMALL['steps']} steps, at most "
            f"{SMALL['train']} rows, one seed, one learning rate: it shows that the cells run, and no accuracy"
        )

    def cells(self) -> Iterator[Cell]:
        """All runs, in the order of the table."""
        for line in self.table.lines:
            for column in self.table.columns:
                for rate in line.rates if line.method is not None else (None,):
                    for seed in self.table.seeds if line.method is not None else self.table.seeds[:1]:
                        yield Cell(line, column, rate, seed, self._tree(line, column, rate, seed))

    def _tree(self, line: Line, column: Column, rate: float | None, seed: int) -> dict[str, Any]:
        data: dict[str, Any] = {"task": column.task, "dir": self.data_dir, "seed": seed}
        if column.per_class is not None:
            data |= {"per_class": column.per_class, "allow_fewer": True}
        elif self.small:
            data |= {"num_train": SMALL["train"], "num_dev": SMALL["dev"]}
        if self.small:
            data["num_test"] = SMALL["test"]
        tree: dict[str, Any] = {"model": {"name": self.model}, "data": data}
        if line.method is not None:
            targets = _TARGETS[self.table.kind]
            tree["method"] = {"name": line.method, "targets": targets, "lr": rate, **self._options(line)}
            steps, batch = self._length(line, column)
            tree["train"] = {"steps": steps, "batch_size": batch, "seed": seed}
        return tree

    def _options(self, line: Line) -> dict[str, Any]:
        small = {"rank": SMALL["rank"]} if self.small and "rank" in line.options else {}
        return {**line.options, **small}

    def _length(self, line: Line, column: Column) -> tuple[int, int]:
        if self.small:
            return int(SMALL["steps"]), 4  # type: ignore[call-overload]
        if line.method != "adam":
            return self.table.steps, self.table.batch_size
        classes = len(task(column.task).wording(self.table.kind).words)
        rows = NUM_TRAIN if column.per_class is None else column.per_class * classes
        return max(1, FT_EPOCHS * rows // FT_BATCH), FT_BATCH


def make_grid(
    table: PaperTable, *, model: str | None, small: bool, data_dir: str | None, only: Sequence[str] = ()
) -> Grid:
    """The runs of a table.

    Args:
        table: of the paper.
        model: instead of the table's.
        small: cut everything, to see that it runs.
        data_dir: folder with the tasks' rows.
        only: methods (as the paper prints them, in any case) and tasks to keep; empty: all.

    Raises:
        RequestError: `only` names neither a method nor a task of the table.
    """
    lines, tasks = {line.key for line in table.lines}, {column.task for column in table.columns}
    wanted = {name.lower() for name in only}
    for name in sorted(wanted - lines - tasks):
        raise RequestError(f"only: {name!r} is no method or task of {table.name}. " + nearest(name, [*lines, *tasks]))
    kept = replace(
        table,
        lines=tuple(line for line in table.lines if not wanted & lines or line.key in wanted),
        columns=tuple(column for column in table.columns if not wanted & tasks or column.task in wanted),
    )
    if any(len(line.published) != len(table.columns) for line in table.lines):
        raise AssertionError("a published number is missing")
    places = [table.columns.index(column) for column in kept.columns]
    kept = replace(
        kept, lines=tuple(replace(line, published=tuple(line.published[i] for i in places)) for line in kept.lines)
    )
    return Grid(_small(kept) if small else kept, model or table.model, small, data_dir)


def _small(table: PaperTable) -> PaperTable:
    shots = dict(zip((16, 512), SMALL["per_class"], strict=True))  # type: ignore[call-overload]
    return replace(
        table,
        seeds=table.seeds[:1],
        columns=tuple(replace(c, per_class=shots.get(c.per_class, c.per_class)) for c in table.columns),
        lines=tuple(replace(line, rates=line.rates[1:2]) for line in table.lines),
    )
