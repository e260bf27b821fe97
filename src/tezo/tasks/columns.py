"""The fields with the texts of labelled rows, where none has the name that it usually has."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tezo.system.errors import RequestError
from tezo.tasks.examples import Row, visible
from tezo.tasks.row_files import DataConfig

USUAL = frozenset(
    ("text", "sentence", "content", "message", "question", "title", "review", "utterance", "query", "body")
)
"""Names of fields with a text. One of them is taken although there are others, if these are shorter."""

PAIRS = (
    ("premise", "hypothesis"), ("claim", "evidence"), ("question", "passage"), ("question", "context"),
    ("question", "sentence"), ("question", "answer"), ("query", "passage"), ("query", "document"), ("title", "body"),
    ("title", "content"),
)  # fmt: skip
"""Names of two texts that are read together, in the order of the prompt. Names that differ by a number or letter at
their end are such a pair too, as sentence1 and sentence2 are."""

_NUMBERED = re.compile(r"(?P<name>.*[^\W\d_])[ _-]?(?P<number>[12]|(?<=[ _-])[ab])")

NUMBERS = frozenset(("id", "idx", "index", "uuid", "guid", "unnamed"))
"""Words in the names of fields that number rows; a field without a name does too, as the index of pandas."""

MOST_CLASSES, REPEATED = 20, 5
"""Values of a field that may be labels, and rows that each of them has on average."""


def with_texts(rows: Sequence[Row], data: DataConfig, template: str) -> tuple[DataConfig, tuple[str, ...]]:
    """Returns (the settings with the text or the two texts of these labelled rows, notices on this choice).

    The text is the field that `data.text` names. Where that is at its default and there is no such field, it is the
    only field of text, or two that are a pair, see `PAIRS`, or the longest one, if it alone has one of the names
    `USUAL`. A pair makes a template with the names of both.

    Args:
        rows: labelled rows, of which the first has all fields.
        data: the settings; one with a template names its fields itself.
        template: the prompt by default, with {text} in it.

    Raises:
        RequestError: there is no such field, or it is not clear which one it is.
    """
    first = rows[0]
    if data.template is not None or data.text != DataConfig.text or first.column(data.text) is not None:
        return data, ()
    texts = text_fields(rows, first.column(data.label))
    pair = _pair(texts)
    if pair is not None:
        prompt = template.replace("{text}", "\n".join(f"{name.strip()}: {{{name.strip()}}}" for name in pair))
        return replace(data, template=prompt), (
            f"there is no field {data.text!r}: {pair[0]!r} and {pair[1]!r} are taken for the texts, {data.label!r} for "
            f"the label; the prompt is {prompt!r}. Others are set with data.text, data.template and data.label.",
        )
    usual = [name for name in texts if _is_usual(name)]
    longest = max(texts, key=lambda name: sum(len(str(row.fields.get(name))) for row in rows), default=None)
    found = usual if usual == [longest] else texts
    if len(found) == 1:
        others = [name for name in texts if name not in found]
        beside = f", and {', '.join(map(repr, others))} not read" if others else ""
        return replace(data, text=found[0]), (
            f"there is no field {data.text!r}: {found[0]!r} is taken for the text, {data.label!r} for the label"
            f"{beside}. Other fields are named with data.text and data.label.",
        )
    missing = f"{first.where}: there is no field {data.text!r}, but {', '.join(map(repr, first.fields))}"
    if not found:
        raise RequestError(f"{missing}; set data.text to the field with the text.")
    both = template.replace("{text}", " ".join(f"{{{name}}}" for name in found)).replace("\n", " ")  # for a shell
    raise RequestError(
        f"{missing}, of which {' and '.join(map(repr, found))} may be the text; set data.text={found[0]} to read one, "
        f"or a template to read several, such as data.template={both!r}."
    )


def text_fields(rows: Sequence[Row], label: str | None = None) -> list[str]:
    """Returns the fields of text. Those of a few values are none, unless they alone have a usual name.

    Args:
        rows: of which the first has all fields.
        label: the field with the label, which is left out; None: there is none.
    """
    names = [name for name in rows[0].fields if name != label]
    texts = [name for name in names if _is_text(rows, name) and not are_classes(_shown(rows, name))]
    return texts or [name for name in names if _is_usual(name) and _is_text(rows, name)]


def _is_usual(name: str) -> bool:
    return name.strip().casefold() in USUAL


def _pair(texts: Sequence[str]) -> tuple[str, str] | None:
    """Returns these fields in the order of a prompt if they are a pair; None if they are not."""
    by_name = {name.strip().casefold(): name for name in texts}
    if len(texts) != 2 or len(by_name) != 2:
        return None
    for first, second in PAIRS:
        if by_name.keys() == {first, second}:
            return by_name[first], by_name[second]
    first, second = sorted(by_name)
    ends = [_NUMBERED.fullmatch(name) for name in (first, second)]
    parts = [(end["name"], end["number"]) for end in ends if end is not None]
    alike = len(parts) == 2 and parts[0][0] == parts[1][0] and parts[0][1] + parts[1][1] in ("12", "ab")
    return (by_name[first], by_name[second]) if alike else None


def _is_text(rows: Sequence[Row], name: str) -> bool:
    """Whether a field has texts: strings, most of them with letters, that do not number rows."""
    if not name.strip() or NUMBERS & set(re.split(r"[^a-z0-9]+", name.casefold())):
        return False
    values, texts = _values(rows, name), _shown(rows, name)
    lettered = sum(any(map(str.isalpha, text)) for text in texts)
    return len(texts) == len(values) and 2 * lettered > len(values)


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    return [value for row in rows if (value := row.fields.get(name)) is not None]


def _shown(rows: Sequence[Row], name: str) -> list[str]:
    return [visible(value) for value in _values(rows, name) if isinstance(value, str)]


def are_classes(values: Sequence[str]) -> bool:
    """Whether so few values occur so often that they may be labels, or are the same in all rows."""
    count = len(set(values))
    return count <= MOST_CLASSES and len(values) >= REPEATED * count
