"""What every shape of row has in common: a format turns a row into an example."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from tezo.errors import RequestError, nearest
from tezo.tasks.answer_metrics import Measure
from tezo.tasks.examples import Example, Row


class Format(ABC):
    """Turns rows of one shape into examples."""

    shape: ClassVar[Literal["completion", "messages", "instruction", "label", "text", "task"]]

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
    if name not in row.fields:
        raise RequestError(
            f"{row.where}: there is no field {name!r}; set data.text, data.label, data.template, ... to the names of "
            f"your fields. {nearest(name, row.fields)}"
        )
    value = row.fields[name]
    if not isinstance(value, str | int):
        raise RequestError(f"{row.where}: field {name!r} is {type(value).__name__}, not a string or a whole number.")
    return str(value)


def label_in(row: Row, name: str) -> str:
    """The label of a row; `RequestError` if it is missing, a number with decimals or several labels."""
    value = row.fields.get(name)
    if isinstance(value, float):
        raise RequestError(
            f"{row.where}: field {name!r} is {value}, and numbers with decimals are not learnt; write classes as "
            "strings or whole numbers, or give rows with a prompt and a completion."
        )
    if isinstance(value, list | dict):
        raise RequestError(
            f"{row.where}: field {name!r} has several labels, and one is learnt for each row; write a row for each "
            "question with one answer, or give rows with a prompt and a completion that names the labels."
        )
    return text_in(row, name)
