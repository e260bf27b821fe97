"""What every shape of row has in common: a format turns a row into an example."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from tezo.errors import RequestError, nearest
from tezo.tasks.answer_metrics import Measure
from tezo.tasks.examples import Example, Row


class Format(ABC):
    """Turns rows of one shape into examples."""

    shape: ClassVar[Literal["completion", "messages", "instruction", "label", "text", "task"]]

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read; empty for a task, which knows its own."""
        return ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in order; empty if the rows do not share their options."""
        return ()

    @property
    def options(self) -> tuple[str, ...]:
        """The text that stands for each label in the model's answer; empty if the rows do not share them."""
        return ()

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Metrics that compare an answer with the references of its example."""
        return ()

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum length in tokens of an answer in free text; None if the data set no limit."""
        return None

    @abstractmethod
    def example(self, row: Row, *, answered: bool = True) -> Example:
        """The example of a row. With `answered=False` the answer is not read; it may be missing or invalid."""

    def training_example(self, row: Row) -> Example:
        """The example to train on; by default the same as for evaluation."""
        return self.example(row)


def text_in(row: Row, name: str) -> str:
    """The text of a field, whole numbers as text; `RequestError` if it is missing or of another type."""
    own = row.column(name)
    if own is None:
        raise RequestError(
            f"{row.where}: there is no field {name!r}; set data.text, data.label, data.template, ... to the names of "
            f"your fields. {nearest(name, row.fields)}"
        )
    value = row.fields[own]
    if value is None:
        raise RequestError(
            f"{row.where}: field {own!r} is missing (null), not a string or a whole number; fill it in, or remove that "
            "row."
        )
    if not isinstance(value, str | int):
        raise RequestError(f"{row.where}: field {own!r} is {type(value).__name__}, not a string or a whole number.")
    return str(value)


def answer_in(row: Row, name: str, way_out: str) -> str:
    """As `text_in`, and "" where the field has no value: `check_answers` counts these rows.

    Args:
        row: of free text.
        name: of the field with the answer.
        way_out: what to set where there is none.
    """
    own = row.column(name)
    if own is None:
        raise RequestError(f"{row.where}: there is no field {name!r}, but {', '.join(row.fields)}; set {way_out}.")
    return "" if row.fields[own] is None else text_in(row, name)


def label_in(row: Row, name: str) -> str:
    """The label of a row; `RequestError` if it is missing, a number with decimals or several labels."""
    own = row.column(name)
    value = None if own is None else row.fields[own]
    if isinstance(value, float) and value.is_integer():  # as pandas has whole numbers where one of them is missing
        return str(int(value))
    if isinstance(value, float):
        raise RequestError(
            f"{row.where}: field {own!r} is {value}, and numbers with decimals are not learnt; write classes as "
            "strings or whole numbers, or give rows with a prompt and a completion."
        )
    if isinstance(value, list | dict):
        raise RequestError(
            f"{row.where}: field {own!r} has several labels, and one is learnt for each row; write a row for each "
            "question with one answer, or give rows with a prompt and a completion that names the labels."
        )
    return text_in(row, name)


def names_of_classes(row: Row, name: str) -> Sequence[str]:
    """The names that the data set has for the numbers in a field; empty if it has none."""
    return row.classes.get(row.column(name) or name, ())


def class_in(row: Row, name: str) -> str:
    """The label of a row, by its name where the data set has one for its number.

    Raises:
        RequestError: as for `label_in`; or the data set has names, and none for this number.
    """
    label, names = label_in(row, name), names_of_classes(row, name)
    if not names or label in names:
        return label
    if not label.isdecimal() or int(label) >= len(names):
        raise RequestError(
            f"{row.where}: the label is {label}{unlabelled(label)}; the data set's classes are 0 to {len(names) - 1} "
            f"({', '.join(names)}). Filter such rows out, or give a split that is labelled."
        )
    return names[int(label)]


def unlabelled(label: str) -> str:
    """What a label of -1 means, in words; "" for others."""
    return ", which data sets have for a row without a label" if label == "-1" else ""
