"""Tasks: the source of the rows, and a wording (prompts and options) for each kind of model.

In-context learning: rows with their answers before the question.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tezo.directions.random import permutation
from tezo.models.kinds import Kind
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example, Measure, Row, blank
from tezo.tasks.rows import Format

Text = Callable[[Row], str]
Metric = Literal["accuracy", "f1"]

NEW_TOKENS = 50
"""Maximum length in tokens of an answer in free text, as in MeZO and later papers."""

MASK = "\0"
"""Stands for the mask in the prompts of masked models; no text of a row may contain this character."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its name, its configuration name, and its training and test splits."""

    name: str
    subset: str | None = None
    train: str = "train"
    test: str = "validation"


class Wording(ABC):
    """Turns the rows of a task into examples for one kind of model."""

    words: tuple[str, ...] = ()
    """The options, if all rows have the same; otherwise empty."""
    labels: tuple[str, ...] = ()
    """Names of the options in `words`."""
    writes = False
    """Whether the model answers in free text."""

    @abstractmethod
    def example(self, row: Row, *, answered: bool) -> Example:
        """The example of a row, with its prompt and options; with `answered` also its label, answer and references."""

    def training_example(self, row: Row) -> Example:
        """The example to train on; by default `example`."""
        return self.example(row, answered=True)


@dataclass(frozen=True)
class Choice(Wording):
    """The same options for every row.

    Attributes:
        prompt: row -> prompt, for a masked model with `MASK` in it.
        words: options of the labels 0, 1, ..., exactly as the model writes them, leading space included.
        label: name of the field with the number of the correct option.
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
            raise RequestError(f"{row.where}: the text has a NUL character in it; remove that character.")
        slot = prompt.index(MASK) if MASK in prompt else None
        null = self.prompt(blank(row)) if slot is None else None
        question = Example(
            prompt.replace(MASK, ""), "", self.words, None, row.where, slot=slot, names=self.labels, null=null
        )
        if not answered:
            return question
        label = index_of(row, self.label, len(self.words))
        return replace(question, answer=self.words[label], label=label)


@dataclass(frozen=True)
class OwnOptions(Wording):
    """Every row has its own options; the model learns to write the correct one.

    Attributes:
        prompt: row -> prompt.
        options: row -> options, leading space included.
        right: row -> indices of the correct options; the first is learnt.
        names: row -> names of the options in predictions; None: the options without surrounding spaces.
        kept: fields that select the wording of the prompt; the null prompt keeps them.
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
        question = Example(self.prompt(row), "", options, None, row.where, names=names, null=null)
        if not answered:
            return question
        right = tuple(self.right(row))
        references = tuple(question.name_of(i) for i in right)
        return replace(question, answer=options[right[0]], label=right[0], right=right, references=references)

    def training_example(self, row: Row) -> Example:
        known = self.example(row, answered=True)
        return Example(known.prompt, known.answer, (), None, row.where, ends=False)


@dataclass(frozen=True)
class FreeText(Wording):
    """The model writes free text, which is compared with one or more references.

    Attributes:
        prompt: row -> prompt.
        references: row -> correct answers without leading space; the model learns the first, followed by a newline.
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
    """One of the paper's data sets.

    Attributes:
        name: name of the task, and of its folder in a local copy of the data.
        hub: the data set on the hub.
        wordings: wording for each supported kind of model.
        metric: the metric in the papers' tables.
        measures: metrics that compare answers with the references.
        unlabelled: label value that marks rows without a label, which are left out; None: all rows are labelled.
        num_dev: default number of dev rows, as in MeZO and later papers.
    """

    name: str
    hub: Hub
    wordings: Mapping[Kind, Wording]
    metric: Metric = "accuracy"
    measures: tuple[Measure, ...] = ()
    unlabelled: int | None = None
    num_dev: int = 500

    def wording(self, kind: Kind) -> Wording:
        """The wording for models of this kind; `RequestError` if there is none."""
        if kind not in self.wordings:
            raise RequestError(
                f"data.task: {self.name} is for {' and '.join(self.wordings)} models, but this model is {kind}; "
                "choose another model or task."
            )
        return self.wordings[kind]


@dataclass(frozen=True)
class TaskFormat(Format):
    """The format of a task's rows for one kind of model."""

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
    """The whole number in `field`; `RequestError` unless it is from 0 to count - 1."""
    value = row.value(field, int)
    if not 0 <= value < count:
        raise RequestError(f"{row.where}: {field} is {value}; it must be a whole number from 0 to {count - 1}.")
    return value


JOINT = "\n\n"
"""Separator of demonstrations, as in MeZO and later papers."""


@dataclass(frozen=True)
class Demonstrated(Format):
    """A format whose prompts begin with `count` rows of `pool` and their answers, drawn separately for every row.

    A row is never a demonstration for itself.
    """

    shape = "task"
    inner: Format
    pool: Sequence[Row]
    count: int
    seed: int

    @property
    def labels(self) -> tuple[str, ...]:
        return self.inner.labels

    @property
    def options(self) -> tuple[str, ...]:
        return self.inner.options

    @property
    def measures(self) -> tuple[Measure, ...]:
        return self.inner.measures

    @property
    def max_new_tokens(self) -> int | None:
        return self.inner.max_new_tokens

    def example(self, row: Row, *, answered: bool = True) -> Example:
        question = self.inner.example(row, answered=answered)
        if question.chat:
            raise RequestError(f"shots is {self.count}, but conversations cannot be shown in a prompt; leave it out.")
        others = [i for i in permutation(len(self.pool), seed=self.seed, step=0, name=f"shots.{row.where}")
                  if self.pool[i].fields != row.fields][: self.count]  # fmt: skip
        if len(others) < self.count:
            raise RequestError(f"shots is {self.count}, but there are {len(others)} other rows to show; lower it.")
        examples = [self.inner.example(self.pool[i]) for i in others]
        demonstrations = [(example.prompt + example.answer).strip() for example in examples]
        return replace(question, prompt=JOINT.join([*demonstrations, question.prompt]))
