"""Definition of a table of accuracies: rows, columns, published numbers, and how each cell is run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tezo.directions.low_rank import Scale
from tezo.models.kinds import Kind
from tezo.system.errors import RequestError
from tezo.tasks.catalogue import task
from tezo.tasks.splits import NUM_TRAIN


def key_of(label: str) -> str:
    """The label in the form for file names and the command line: lower case, other characters as "-"."""
    return re.sub(r"[^a-z0-9.-]+", "-", label.lower()).strip("-")


@dataclass(frozen=True)
class Column:
    """A task and its number of training rows per class (None: 1000 rows in total).

    Attributes:
        task: name of the task.
        per_class: training rows per class.
        batch_size: rows per step of zeroth-order methods; None: the table's.
        group: columns of the same group are averaged together; "": all columns of the table.
    """

    task: str
    per_class: int | None = None
    batch_size: int | None = None
    group: str = ""

    @property
    def key(self) -> str:
        """Name in file names and on the command line, such as sst2-16 or completions-batch-64."""
        parts = [self.task, self.per_class, self.batch_size and f"batch-{self.batch_size}"]
        return "-".join(str(part) for part in parts if part is not None)

    @property
    def metric(self) -> str:
        """Name of the metric of the table's cells."""
        return task(self.task).metric

    def data(self, folder: str | None, seed: int) -> dict[str, Any]:
        """Keys of the section `data`, for rows in `folder`; None: the hub."""
        own = {"task": self.task, "dir": folder, "seed": seed}
        return own if self.per_class is None else own | {"per_class": self.per_class, "allow_fewer": True}

    def num_rows(self, kind: Kind) -> int | None:
        """Number of training rows for a kind of model; None: not known."""
        return NUM_TRAIN if self.per_class is None else self.per_class * len(task(self.task).wording(kind).options)


@dataclass(frozen=True)
class CompletionsColumn(Column):
    """Rows of prompt and completion: FOLDER/TASK/train.jsonl, dev.jsonl and test.jsonl."""

    @property
    def metric(self) -> str:
        return "token_accuracy"

    def data(self, folder: str | None, seed: int) -> dict[str, Any]:
        if folder is None:
            raise RequestError(f"data-dir: {self.task} is not on the hub; give the folder of {self.task}/train.jsonl.")
        return {part: f"{folder}/{self.task}/{part}.jsonl" for part in ("train", "dev", "test")} | {"seed": seed}

    def num_rows(self, kind: Kind) -> None:
        del kind


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        label: printed label.
        how: "train" a run, evaluate the model "zero-shot", or fit a linear "probe".
        method: method of this library, if `how` is "train".
        rates: learning rates to search.
        recommended: learning rate that the paper's appendix recommends; for FT the first of MeZO's.
        options: options of the method.
        published: published numbers in percent, one per column; empty if there are none.
        published_averages: group of columns -> its published average; without groups that lack a column.
        settings: (dotted key, value) pairs set in the configuration of its cells, after those of the table.
    """

    label: str
    how: Literal["train", "zero-shot", "probe"]
    method: str = ""
    rates: tuple[float, ...] = ()
    recommended: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    published: tuple[float, ...] = ()
    published_averages: Mapping[str, float] = field(default_factory=dict)
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """Name in file names and on the command line."""
        return key_of(self.label)

    @property
    def is_zeroth_order(self) -> bool:
        """Whether it trains with a zeroth-order method."""
        return self.how == "train" and self.method != "adam"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a row per method and a column per task.

    Attributes:
        name: name on the command line.
        title: title of the table.
        model: hub name, or an embedded model.
        kind: kind of the model.
        columns: columns in order; runs go column by column.
        lines: rows in order.
        seeds: seeds of the runs.
        search_seeds: number of seeds, from the first, for the search of the learning rate; the other seeds run only at
            the chosen rate.
        steps: steps of zeroth-order methods.
        batch_size: rows per step of zeroth-order methods.
        targets: patterns of the tuned parameters.
        directions: scale of low-rank directions that the rates are for, see `tezo.directions.low_rank.Scale`.
        ft_epochs: epochs of first-order fine-tuning.
        ft_batch: rows per step of first-order fine-tuning.
        ft_most_steps: maximum number of steps of first-order fine-tuning; None: no maximum.
        settings: (dotted key, value) pairs set in the configuration of every cell.
        notes: notes on conventions that differ from the published tables.
    """

    name: str
    title: str
    model: str
    kind: Literal["causal", "masked", "encoder"]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    seeds: tuple[int, ...]
    search_seeds: int
    steps: int
    batch_size: int
    targets: tuple[str, ...] = ("all",)
    directions: Scale = "unit"
    ft_epochs: int = 5
    ft_batch: int = 8
    ft_most_steps: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of its columns, in order."""
        return tuple(dict.fromkeys(column.group for column in self.columns))

    @property
    def keeps_best(self) -> bool:
        """Whether runs end with the parameters of the lowest dev loss instead of the last ones."""
        return bool(dict(self.settings).get("train.keep_best", True))
