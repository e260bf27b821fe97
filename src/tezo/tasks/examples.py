"""The two records of this room: a row as it was read, an example as a model sees it."""

from dataclasses import dataclass
from typing import Any, TypeVar

from tezo.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A row of a data file: its fields, and where it stands ("train.jsonl, line 3") for messages."""

    fields: dict[str, Any]
    where: str

    def __getitem__(self, name: str) -> str:
        """The text in a field."""
        return self.value(name, str)

    def value(self, name: str, kind: type[T]) -> T:
        """What is in a field; an error where there is no such field or it is of another type."""
        if name not in self.fields:
            raise RequestError(f"{self.where}: there is no field {name!r}; it has {', '.join(self.fields) or 'none'}.")
        value = self.fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(
                f"{self.where}: field {name!r} is {type(value).__name__}, not {kind.__name__}; mend that row."
            )
        return value


def blank(row: Row, kept: tuple[str, ...] = ()) -> Row:
    """The row with its texts emptied, but for the fields named in `kept`."""
    emptied = {k: "" if isinstance(v, str) and k not in kept else v for k, v in row.fields.items()}
    return Row(emptied, row.where)


@dataclass(frozen=True)
class Example:
    """A question with its answer.

    Attributes:
        prompt: what comes before the answer, or for a masked model all but the mask.
        answer: the text to be learnt; "" where it is not known.
        options: the answers to choose among; empty for free text.
        label: index of the right option; None where it is not known, or for free text.
        where: the row it was made from.
        chat: whether the prompt was rendered by a chat template, special tokens included.
        slot: for a masked model, the place of the mask: how many characters of the prompt precede it.
        names: what the options are called in answers; empty: as they are, without the space around them.
        null: the prompt without the row's own text, for calibrated scores; None where there is no such thing.
        right: indices of all options that are right, where there may be several; empty: `label` alone.
        references: right answers of free text, to compare with.
        ends: whether the end of the text is learnt as part of the answer.
    """

    prompt: str
    answer: str
    options: tuple[str, ...]
    label: int | None
    where: str
    chat: bool = False
    slot: int | None = None
    names: tuple[str, ...] = ()
    null: str | None = None
    right: tuple[int, ...] = ()
    references: tuple[str, ...] = ()
    ends: bool = True

    def name_of(self, option: int) -> str:
        """What an option is called in answers."""
        return self.names[option] if self.names else self.options[option].strip()

    def is_right(self, option: int) -> bool:
        """Whether an option is a right one."""
        return option in (self.right or (self.label,))
