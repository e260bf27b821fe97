"""answers.json of a run read back, with every value checked; `tezo.training.execution.kept_answers` makes it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tezo.files import UntrustedError, read_object

MOST_ROWS = 1 << 30
OUTCOMES = {
    (False, True): "wrong before, right after",
    (True, False): "right before, wrong after",
    (False, False): "wrong before and after",
    (True, True): "right before and after",
}
"""(right before, right after) -> the words for it, in the order in which rows are shown."""


@dataclass(frozen=True)
class Counts:
    """How often a label was answered, and how often that was right."""

    answered: int
    right: int


@dataclass(frozen=True)
class LabelCounts:
    """Answers to the rows of one label.

    Attributes:
        label: its name.
        rows: number of rows whose right answer it is.
        before: answers with this label before the first step.
        after: those with the parameters that were kept.
    """

    label: str
    rows: int
    before: Counts
    after: Counts


@dataclass(frozen=True)
class ShownAnswer:
    """A row with its text, the right answer and the answers before and after.

    `right` is empty where there is none, as with a reward; `outcome` is empty for free text.
    """

    row: str
    text: str
    right: str
    before: str
    after: str
    outcome: str


@dataclass(frozen=True)
class KeptAnswers:
    """The content of answers.json.

    Attributes:
        rows: number of rows that were counted, the first ones of the test rows.
        of: number of test rows.
        outcomes: in words -> number of rows; empty for free text.
        labels: empty where rows do not share their options.
        shown: a few rows.
    """

    rows: int
    of: int
    outcomes: Mapping[str, int] = field(default_factory=dict)
    labels: Sequence[LabelCounts] = ()
    shown: Sequence[ShownAnswer] = ()


def read_answers(path: Path) -> KeptAnswers | None:
    """The file; None where there is none.

    Raises:
        UntrustedError: it is damaged.
    """
    if not os.path.lexists(path):
        return None
    tree = read_object(path)
    try:
        return KeptAnswers(
            rows=_count(tree["rows"]),
            of=_count(tree["of"]),
            outcomes={str(outcome): _count(number) for outcome, number in tree.get("outcomes", {}).items()},
            labels=[_label(entry) for entry in tree.get("labels", [])],
            shown=[_shown(entry) for entry in tree["shown"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UntrustedError(f"{path.name} has no counts of answers") from None


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_ROWS:
        raise ValueError
    return value


def _label(entry: Any) -> LabelCounts:
    counts = [Counts(_count(entry[when]["answered"]), _count(entry[when]["right"])) for when in ("before", "after")]
    rows = _count(entry["rows"])
    if any(one.right > min(rows, one.answered) for one in counts):
        raise ValueError
    return LabelCounts(_text(entry["label"]), rows, *counts)


def _shown(entry: Any) -> ShownAnswer:
    row, text, right, before, after = (_text(entry[key]) for key in ("row", "text", "right", "before", "after"))
    return ShownAnswer(row, text, right, before, after, _text(entry.get("outcome", "")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
