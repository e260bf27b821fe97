"""What a task is: where its rows are, and a wording for each kind of model that can take it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tezo.errors import RequestError
from tezo.models.kinds import Kind
from tezo.tasks.answer_metrics import Measure
from tezo.tasks.examples import Example, Row, blank
from tezo.tasks.formats import Format

Text = Callable[[Row], str]
Metric = Literal["accuracy", "f1"]

NEW_TOKENS = 50
"""Longest answer in free text, as MeZO and the papers after it have it."""

MASK = "\0"
"""Where a masked wording has its mask; no text of a row holds this character."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its name, the name of its configuration, and the splits to train and to test on."""

    name: str
    subset: str | None = None
    train: str = "train"
    test: str = "validation"


class Wording(ABC):
    """How rows are put to a model."""

    words: tuple[str, ...] = ()
    """The options, where all rows have the same."""
    labels: tuple[str, ...] = ()
    """Their names."""
    writes = False
    """Whether the model answers in words of its own."""

    @abstractmethod
    def example(self, row: Row, *, answered: bool) -> Example:
        """What the model is asked, and what it chooses among or is to write."""

    def training_example(self, row: Row) -> Example:
        """What it learns from: by default the choice among the options."""
        return self.example(row, answered=True)


@dataclass(frozen=True)
class Choice(Wording):
    """The same options for every row.

    Attributes:
        prompt: row -> the text, for a masked model with `MASK` in it.
        words: of the labels 0, 1, ...: what the model chooses among, to the letter, leading space included.
        label: field of the number of the right one.
    """

    prompt: Text
    words: tuple[str, ...]
    label: str = "label"

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(word.strip() for word in self.words)

    def example(self, row: Row, *, answered: bool) -> Example:
        prompt = self.prompt(row)
        if prompt.count(MASK) > 1:
            raise RequestError(f"{row.where}: the text has a NUL character in it; remove it.")
        slot = prompt.index(MASK) if MASK in prompt else None
        null = self.prompt(blank(row)) if slot is None else None
        asked = Example(
            prompt.replace(MASK, ""), "", self.words, None, row.where, slot=slot, names=self.labels, null=null
        )
        if not answered:
            return asked
        label = index_of(row, self.label, len(self.words))
        return replace(asked, answer=self.words[label], label=label)


@dataclass(frozen=True)
class OwnOptions(Wording):
    """Every row has options of its own, and is learnt by writing the right one.

    Attributes:
        prompt: row -> the text.
        options: row -> the options, leading space included.
        right: row -> indices of those that are right; the first is learnt.
        names: row -> what they are called in answers; None: as they are.
        kept: fields that shape the prompt but are not in it.
    """

    prompt: Text
    options: Callable[[Row], Sequence[str]]
    right: Callable[[Row], Sequence[int]]
    names: Callable[[Row], Sequence[str]] | None = None
    kept: tuple[str, ...] = ()

    def example(self, row: Row, *, answered: bool) -> Example:
        options = tuple(self.options(row))
        names = tuple(self.names(row)) if self.names is not None else ()
        null = self.prompt(blank(row, self.kept))
        asked = Example(self.prompt(row), "", options, None, row.where, names=names, null=null)
        if not answered:
            return asked
        right = tuple(self.right(row))
        references = tuple(asked.name_of(i) for i in right)
        return replace(asked, answer=options[right[0]], label=right[0], right=right, references=references)

    def training_example(self, row: Row) -> Example:
        known = self.example(row, answered=True)
        return Example(known.prompt, known.answer, (), None, row.where, ends=False)


@dataclass(frozen=True)
class FreeText(Wording):
    """The model writes; it is compared with one reference or several.

    Attributes:
        prompt: row -> the text.
        references: row -> right answers, without a space before them; the first is learnt, and a line end after it.
    """

    prompt: Text
    references: Callable[[Row], Sequence[str]]
    writes = True

    def example(self, row: Row, *, answered: bool) -> Example:
        prompt = self.prompt(row)
        if not answered:
            return Example(prompt, "", (), None, row.where, ends=False)
        references = tuple(self.references(row))
        return Example(prompt, f" {references[0]}\n", (), None, row.where, references=references, ends=False)


@dataclass(frozen=True)
class Task:
    """A data set of the paper's.

    Attributes:
        name: of the task, and of its folder in a local copy of the data.
        hub: where its rows are.
        wordings: by kind of model.
        metric: the one of the papers' tables.
        measures: what compares answers with the references, where there are any.
        unlabelled: the label of rows without one, which are left out.
        num_dev: rows that choose the checkpoint, as MeZO and the papers after it take them.
    """

    name: str
    hub: Hub
    wordings: Mapping[Kind, Wording]
    metric: Metric = "accuracy"
    measures: tuple[Measure, ...] = ()
    unlabelled: int | None = None
    num_dev: int = 500

    def wording(self, kind: Kind) -> Wording:
        """For models of this kind."""
        if kind not in self.wordings:
            raise RequestError(
                f"data.task: {self.name} is for {' and '.join(self.wordings)} models, and this one is {kind}; "
                "choose another model or task."
            )
        return self.wordings[kind]


@dataclass(frozen=True)
class TaskFormat(Format):
    """The rows of a task, put to one kind of model."""

    shape = "task"
    task: Task
    wording: Wording

    @property
    def labels(self) -> tuple[str, ...]:
        return self.wording.labels

    @property
    def options(self) -> tuple[str, ...]:
        return self.wording.words

    @property
    def measures(self) -> tuple[Measure, ...]:
        return self.task.measures

    @property
    def max_new_tokens(self) -> int | None:
        return NEW_TOKENS if self.wording.writes else None

    def example(self, row: Row, *, answered: bool = True) -> Example:
        return self.wording.example(row, answered=answered)

    def training_example(self, row: Row) -> Example:
        return self.wording.training_example(row)


def index_of(row: Row, field: str, count: int) -> int:
    """The number in `field`, which must be one of 0 ... count - 1."""
    value = row.value(field, int)
    if not 0 <= value < count:
        raise RequestError(f"{row.where}: {field} is {value}; it must be a whole number from 0 to {count - 1}.")
    return value
