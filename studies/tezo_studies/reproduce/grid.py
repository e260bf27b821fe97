"""The grid of runs that fills a table."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tezo.directions.low_rank import Scale
from tezo.methods import method
from tezo.system.errors import RequestError, nearest
from tezo.training.settings import overlay, parse_config
from tezo_studies.reproduce.overrides import Setting, check_settings, settings_of
from tezo_studies.reproduce.table import Column, Line, Table, key_of

RHO = 1e-3
"""Perturbation scale of all runs: the paper's."""

SMALL = {"steps": 3, "batch": 4, "train": 16, "dev": 8, "test": 12, "rank": 4}
"""Sizes with `--scale small`, which also uses one seed and one learning rate; see `Grid.title`."""
SMALL_SHOTS = {16: 2, 512: 4}
"""Rows per class of a column -> rows per class with `--scale small`."""


@dataclass(frozen=True)
class Cell:
    """One run: a line and a column of the table at a learning rate and a seed.

    Attributes:
        line: row of the table.
        column: column of the table.
        rate: learning rate; None if nothing is trained.
        seed: seed of the run and of the choice of rows.
        tree: configuration as nested mappings.
    """

    line: Line
    column: Column
    rate: float | None
    seed: int
    tree: dict[str, Any]

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return int(self.tree["train"]["steps"]) if self.line.how == "train" else 0

    @property
    def folder(self) -> Path:
        """Folder of the run, relative to the output folder of the grid."""
        rate = self.line.how if self.rate is None else f"lr-{self.rate:g}"
        return Path(self.line.key, self.column.key, rate, f"seed-{self.seed}")


@dataclass(frozen=True)
class Grid:
    """The runs of a table.

    Attributes:
        table: the table with the chosen lines and columns.
        model: folder or hub name.
        small: whether sizes are reduced to `SMALL`.
        data_dir: folder with the tasks' rows; None: the hub.
        settings: given for all runs, after everything else.
    """

    table: Table
    model: str
    small: bool
    data_dir: str | None
    settings: tuple[Setting, ...] = ()

    @property
    def title(self) -> str:
        """Title of the written table."""
        if not self.small:
            return f"{self.table.title}, with {self.model}"
        return (
            f"{self.table.title}: SMALL SCALE. Random weights of a tiny configuration, {SMALL['steps']} steps, at most "
            f"{SMALL['train']} rows, one seed, one learning rate: it shows that the cells run; accuracies mean nothing"
        )

    def search(self) -> Iterator[Cell]:
        """The first runs: every learning rate on the seeds of the search, and the lines that train nothing."""
        for column, line in self._entries():
            for rate in line.rates or (None,):
                # an untrained model gives the same result for every seed: the test rows are the same
                seeds = self.table.seeds[:1] if line.how == "zero-shot" else self.table.seeds[: self.table.search_seeds]
                for seed in self.table.seeds if line.how == "probe" else seeds:
                    yield self._cell(line, column, rate, seed)

    def rest(self, chosen: Callable[[Line, Column], float | None]) -> Iterator[Cell]:
        """The runs on the other seeds, at the learning rate from `chosen`; none where `chosen` returns None."""
        for column, line in self._entries():
            rate = chosen(line, column) if line.how == "train" else None
            for seed in self.table.seeds[self.table.search_seeds :] if rate is not None else ():
                yield self._cell(line, column, rate, seed)

    def recipe(self, name: str) -> str:
        """The recipe of a line of the table as YAML: its first column, at its recommended rate, on the first seed.

        Raises:
            RequestError: no line of that name trains.
        """
        column, seed = self.table.columns[0], self.table.seeds[0]
        lines = {line.key: line for line in self.table.lines if line.how == "train"}
        line = lines.get(key_of(name))
        if line is None:
            raise RequestError(f"recipe: {name!r} is no method of {self.table.name}. " + nearest(key_of(name), lines))
        tree = {  # None may not be the default of a method's option
            section: {key: value for key, value in values.items() if value is not None or section == "method"}
            for section, values in self._tree(line, column, line.recommended, seed).items()
        }
        others = ", ".join(column.key for column in self.table.columns[1:])
        head = f"# {line.label} of {self.table.title}.\n" + (f"# Other columns: {others}.\n" if others else "")
        return head + yaml.safe_dump(tree, sort_keys=False)

    def _entries(self) -> Iterable[tuple[Column, Line]]:
        return ((column, line) for column in self.table.columns for line in self.table.lines)

    def _cell(self, line: Line, column: Column, rate: float | None, seed: int) -> Cell:
        return Cell(line, column, rate, seed, self._tree(line, column, rate, seed))

    def _tree(self, line: Line, column: Column, rate: float | None, seed: int) -> dict[str, Any]:
        tree: dict[str, Any] = {"model": {"name": self.model}, "data": column.data(self.data_dir, seed)}
        if line.how == "train":
            steps, batch = self._length(line, column)
            fixed = {"rho": RHO} if line.is_zeroth_order else {}
            has_scale = "scale" in method(line.method).options()
            scale = {"scale": self.table.directions} if has_scale else {}
            own = {"name": line.method, "targets": list(self.table.targets), "lr": rate}
            tree["method"] = own | fixed | scale | dict(line.options)
            tree["train"] = {"steps": steps, "batch_size": batch, "guard": False}
        tree["train"] = {**tree.get("train", {}), "seed": seed}
        cuts = list(self._cuts(line, column)) if self.small else []
        return overlay(tree, [*self.table.settings, *line.settings, *cuts, *settings_of(line, self.settings)])

    def _length(self, line: Line, column: Column) -> tuple[int, int]:
        if line.is_zeroth_order:
            return self.table.steps, column.batch_size or self.table.batch_size
        rows, most = column.num_rows(self.table.kind), self.table.ft_most_steps
        bounds = [] if rows is None else [self.table.ft_epochs * rows // self.table.ft_batch]
        return max(1, min([*bounds, *([] if most is None else [most])])), self.table.ft_batch

    def _cuts(self, line: Line, column: Column) -> Iterator[tuple[str, Any]]:
        yield "data.num_test", SMALL["test"]
        if column.per_class is None:
            yield "data.num_train", SMALL["train"]
        if column.per_class is None or "data.num_dev" in dict(self.table.settings):
            yield "data.num_dev", SMALL["dev"]
        if line.how == "train":
            yield from (("train.steps", SMALL["steps"]), ("train.batch_size", SMALL["batch"]))
            yield from ((key, min(count, 1)) for key, count in line.settings if key.startswith("train.feedback"))
            if "rank" in line.options:
                yield "method.rank", SMALL["rank"]


def make_grid(
    table: Table,
    *,
    model: str | None,
    small: bool,
    data_dir: str | None,
    only: Sequence[str] = (),
    directions: Scale | None = None,
    settings: Sequence[Setting] = (),
) -> Grid:
    """The runs of a table.

    Args:
        table: methods and tasks.
        model: model to use instead of the table's; None: the table's.
        small: whether to reduce all sizes to `SMALL`, as a test.
        data_dir: folder with the tasks' rows; None: the hub.
        only: methods (labels of the table, in any case), tasks and columns (such as sst2-16) to keep; empty: all.
        directions: scale of low-rank directions; None: the table's.
        settings: given for all runs; an option of a method is for the lines that have it.

    Raises:
        RequestError: a name in `only` is not a method, task or column of the table, or a setting is not for its runs.
    """
    kept = replace(_chosen(table, only), directions=directions or table.directions)
    check_settings(settings, kept.lines)
    grid = Grid(_small(kept) if small else kept, model or table.model, small, data_dir, tuple(settings))
    for cell in {cell.line.key: cell for cell in grid.search()}.values():
        parse_config(cell.tree)
    return grid


def _chosen(table: Table, only: Sequence[str]) -> Table:
    """The table with the lines and columns of `only`."""
    lines = {line.key for line in table.lines}
    tasks = {name for column in table.columns for name in (column.task, column.key)}
    wanted = {key_of(name) for name in only}
    for name in sorted(wanted - lines - tasks):
        raise RequestError(
            f"only: {name!r} is not a method or task of {table.name}. " + nearest(name, [*lines, *tasks])
        )
    places = [
        place
        for place, column in enumerate(table.columns)
        if not wanted & tasks or {column.task, column.key} & wanted
    ]  # fmt: skip
    return replace(
        table,
        columns=tuple(table.columns[place] for place in places),
        lines=tuple(
            _narrowed(line, table.columns, places) for line in table.lines if not wanted & lines or line.key in wanted
        ),
    )


def _narrowed(line: Line, columns: Sequence[Column], places: Sequence[int]) -> Line:
    """The line with the published numbers of the columns at `places`, and the averages of whole groups."""
    partial = {column.group for place, column in enumerate(columns) if place not in places}
    return replace(
        line,
        published=tuple(line.published[place] for place in places) if line.published else (),
        published_averages={group: of for group, of in line.published_averages.items() if group not in partial},
    )


def _small(table: Table) -> Table:
    return replace(
        table,
        seeds=table.seeds[:1],
        search_seeds=1,
        columns=tuple(replace(c, per_class=SMALL_SHOTS.get(c.per_class or 0, c.per_class)) for c in table.columns),
        lines=tuple(replace(line, rates=line.rates[1:2]) for line in table.lines),
    )
