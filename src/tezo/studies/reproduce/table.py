"""What a table of accuracies is: rows, columns, published numbers, how each cell is run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def key_of(label: str) -> str:
    """A label for file names and the command line."""
    return re.sub(r"[^a-z0-9.-]+", "-", label.lower()).strip("-")


@dataclass(frozen=True)
class Column:
    """A task, and how many rows of each class it is learnt from (None: 1000 in all)."""

    task: str
    per_class: int | None = None

    @property
    def key(self) -> str:
        """For file names."""
        return self.task if self.per_class is None else f"{self.task}-{self.per_class}"


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        label: as it is printed.
        how: a run of training; or the model as it is; or a linear probe of it.
        method: of this library, where it trains.
        rates: learning rates to search.
        recommended: the one that the paper's appendix recommends; for FT the first of MeZO's.
        options: of the method.
        published: percent, a column each; empty: nobody has.
        settings: (dotted key, value) pairs laid over the configuration of its cells, after the table's.
    """

    label: str
    how: Literal["train", "zero-shot", "probe"]
    method: str = ""
    rates: tuple[float, ...] = ()
    recommended: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    published: tuple[float, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """For file names."""
        return key_of(self.label)

    @property
    def is_zeroth_order(self) -> bool:
        """Whether it trains by forward passes alone."""
        return self.how == "train" and self.method != "adam"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Methods against tasks.

    Attributes:
        name: on the command line.
        title: what it shows.
        model: on the hub, or embedded.
        kind: of the model.
        columns: in order; runs go column by column.
        lines: likewise.
        seeds: one run each.
        search_seeds: on how many of them the learning rate is searched; the others run at the rate that it chose.
        steps: of zeroth-order methods.
        batch_size: likewise.
        targets: parameters that are tuned.
        ft_epochs: of first-order fine-tuning.
        ft_batch: its rows a step.
        ft_most_steps: that it takes, where so many epochs were more; None: all of them.
        settings: (dotted key, value) pairs laid over the configuration of every cell.
        notes: differences in convention.
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
    ft_epochs: int = 5
    ft_batch: int = 8
    ft_most_steps: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def keeps_best(self) -> bool:
        """Whether a run ends with the parameters of its lowest dev loss, rather than with its last ones."""
        return bool(dict(self.settings).get("train.keep_best", True))
