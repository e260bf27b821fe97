"""The two records of this room: a row as it was read, an example as a model sees it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A row of a data file: its fields, and where it stands ("train.jsonl, line 3") for messages."""

    fields: dict[str, Any]
    where: str


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
    """

    prompt: str
    answer: str
    options: tuple[str, ...]
    label: int | None
    where: str
    chat: bool = False
    slot: int | None = None
