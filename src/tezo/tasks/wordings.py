"""Tasks: the source of the rows, and a wording (prompts and options) for each kind of model; demonstrations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from tezo.directions.random import permutation
from tezo.models.kinds import Kind
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example, Measure, Row, blank, folded
from tezo.tasks.rows import Format

Text = Callable[[Row], str]
Metric = Literal["accuracy", "f1"]

NEW_TOKENS = 50
"""Maximum length in tokens of an answer in free text, as in MeZO and later papers."""

MASK = "\0"
"""Stands for the mask in the prompts of masked models; no text of a row may contain this character."""

JOINT = "\n\n"
"""Separator of demonstrations, as in MeZO and later papers."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its name, its configuration name, and its training and test splits."""

    name: str
    subset: str | None = None
    train: str = "train"
    test: str = "validation"


@dataclass
class Choice(Format):
    """The same options for every row.

    Attributes:
        prompt: row -> prompt, for a masked model with `MASK` in it.
        words: options of the labels 0, 1, ..., exactly as the model writes them, leading space included.
        label: name of the field with the number of the correct option.
    """

    shape = "task"
    prompt: Text
    words: tuple[str, ...]
    label: str = "label"

    def __post_init__(self) -> None:
        self.options, self.labels = self.words, tuple(word.strip() for word in self.words)

    def example(self, row: Row, *, answered: bool = True) -> Example:
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


@dataclass
class OwnOptions(Format):
    """Options of each row; the model learns to write the correct one.

    Attributes:
        prompt: row -> prompt.
        choices: row -> options, leading space included.
        right: row -> indices of the correct options; the first is learnt.
        names: row -> names of the options in predictions; None: the options without surrounding spaces.
        kept: fields that select the wording of the prompt; the null prompt keeps them.
    """

    shape = "task"
    prompt: Text
    choices: Callable[[Row], Sequence[str]]
    right: Callable[[Row], Sequence[int]]
    names: Callable[[Row], Sequence[str]] | None = None
    kept: tuple[str, ...] = ()

    def example(self, row: Row, *, answered: bool = True) -> Example:
        options = tuple(self.choices(row))
        names = tuple(self.names(row)) if self.names is not None else ()
        null = self.prompt(blank(row, self.kept))
        question = Example(self.prompt(row), "", options, None, row.where, names=names, null=null)
        if not answered:
            return question
        right = tuple(self.right(row))
        references = tuple(question.name_of(i) for i in right)
        return replace(question, answer=options[right[0]], label=right[0], right=right, references=references)

    def training_example(self, row: Row) -> Example:
        known = self.example(row)
        return Example(known.prompt, known.answer, (), None, row.where, ends=False)


@dataclass
class FreeText(Format):
    """Free text, which is compared with one or more references.

    Attributes:
        prompt: row -> prompt.
        references: row -> correct answers without leading space; the model learns the first, followed by a newline.
    """

    shape = "task"
    prompt: Text
    references: Callable[[Row], Sequence[str]]
    max_new_tokens: int | None = field(default=NEW_TOKENS, kw_only=True)

    def example(self, row: Row, *, answered: bool = True) -> Example:
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
    wordings: Mapping[Kind, Format]
    metric: Metric = "accuracy"
    measures: tuple[Measure, ...] = ()
    unlabelled: int | None = None
    num_dev: int = 500

    def wording(self, kind: Kind) -> Format:
        """Returns the format of the rows for models of this kind; `RequestError` if there is none."""
        if kind not in self.wordings:
            raise RequestError(
                f"data.task: {self.name} is for {' and '.join(self.wordings)} models, but this model is {kind}; "
                "choose another model or task."
            )
        return replace(self.wordings[kind], measures=self.measures)


def index_of(row: Row, field: str, count: int) -> int:
    """Returns the whole number in `field`; `RequestError` unless it is from 0 to count - 1."""
    value = row.value(field, int)
    if not 0 <= value < count:
        raise RequestError(f"{row.where}: {field} is {value}; it must be a whole number from 0 to {count - 1}.")
    return value


@dataclass
class Demonstrated(Format):
    """A format whose prompts begin with `count` rows of `pool` and their answers, drawn for every row.

    A row whose prompt is that of the question, white space and case aside, is not shown: it has the answer.
    """

    shape = "task"
    inner: Format
    pool: Sequence[Row]
    count: int
    seed: int

    def __post_init__(self) -> None:
        inner = self.inner
        self.labels, self.options, self.measures = inner.labels, inner.options, inner.measures
        self.max_new_tokens, self.notices = inner.max_new_tokens, inner.notices

    def example(self, row: Row, *, answered: bool = True) -> Example:
        question = self.inner.example(row, answered=answered)
        if question.chat:
            raise RequestError(f"shots is {self.count}, but conversations cannot be shown in a prompt; leave it out.")
        order = permutation(len(self.pool), seed=self.seed, step=0, name=f"shots.{row.where}")
        asked = folded(question.prompt)  # the answer may be unknown, and no other fields are read
        others = (shown for shown in (self.inner.example(self.pool[i]) for i in order) if folded(shown.prompt) != asked)
        examples = list(islice(others, self.count))
        if len(examples) < self.count:
            raise RequestError(f"shots is {self.count}, but there are {len(examples)} other rows to show; lower it.")
        demonstrations = [(example.prompt + example.answer).strip() for example in examples]
        return replace(question, prompt=JOINT.join([*demonstrations, question.prompt]))
