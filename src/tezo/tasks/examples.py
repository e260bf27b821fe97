"""The two records of this package: a row of a data file, and an example with prompt and answer."""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tezo.errors import RequestError

T = TypeVar("T")

MOST_TEXT = 1 << 22
"""Characters of a prompt, an answer or an option. A tokenizer takes some hundred bytes for each, and aborts the process
where there is no memory left."""


def visible(text: str) -> str:
    """The text in Unicode form C, without space around it and without characters that are not seen."""
    seen = (c for c in unicodedata.normalize("NFC", text) if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc"))
    return "".join(seen).strip()


@dataclass(frozen=True)
class Row:
    """A row of a data file: its fields, and its place ("train.jsonl, line 3") for messages."""

    fields: dict[str, Any]
    where: str

    def __getitem__(self, name: str) -> str:
        """The string in a field; see `value`."""
        return self.value(name, str)

    def value(self, name: str, kind: type[T]) -> T:
        """The value of a field; `RequestError` if the field is missing or not of type `kind`."""
        if name not in self.fields:
            raise RequestError(f"{self.where}: there is no field {name!r}; it has {', '.join(self.fields) or 'none'}.")
        value = self.fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(
                f"{self.where}: field {name!r} is {type(value).__name__}, not {kind.__name__}; fix that row."
            )
        return value


def blank(row: Row, kept: tuple[str, ...] = ()) -> Row:
    """The row with its strings emptied, except the fields in `kept`."""
    emptied = {k: "" if isinstance(v, str) and k not in kept else v for k, v in row.fields.items()}
    return Row(emptied, row.where)


@dataclass(frozen=True)
class Example:
    """A prompt with its answer.

    Attributes:
        prompt: the text before the answer; for a masked model, the whole text without the mask.
        answer: the text to learn; "" if it is unknown.
        options: the answers to choose from; empty for free text.
        label: index of the correct option; None if it is unknown, or for free text.
        where: place of the row it was made from, for messages.
        chat: whether the prompt was rendered by a chat template, special tokens included.
        slot: for a masked model, the position of the mask in the prompt, in characters; otherwise None.
        names: names of the options in predictions; empty: the options without surrounding spaces.
        null: the prompt without the row's own text, for calibrated scores; None if there is none.
        right: indices of all correct options, if there can be several; empty: only `label`.
        references: correct answers to compare a predicted text with.
        ends: whether the end-of-text token is learnt as part of the answer.
        whole: whether the answer is a whole text without a prompt; all of its tokens after the first are learnt.
        fields: the fields of the row, for a reward; otherwise empty.
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
    whole: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        longest = max(map(len, (self.prompt, self.answer, *self.options)))
        if longest > MOST_TEXT:
            raise RequestError(
                f"{self.where}: a text of {longest} characters is too long, the most is {MOST_TEXT}; shorten that row, "
                "or remove it."
            )
        try:
            f"{self.prompt}{self.answer}".encode()
        except UnicodeEncodeError:
            raise RequestError(f"{self.where}: a text has half of a surrogate pair; fix that row.") from None

    def name_of(self, option: int) -> str:
        """The name of an option in predictions."""
        return self.names[option] if self.names else self.options[option].strip()

    def is_right(self, option: int) -> bool:
        """Whether an option is correct."""
        return option in (self.right or (self.label,))
