"""The field with the text of labelled rows, where none has the name that it usually has."""

import re
from collections.abc import Sequence
from dataclasses import replace

from tezo.system.errors import RequestError
from tezo.tasks.examples import Row, visible
from tezo.tasks.row_files import DataConfig

USUAL = frozenset(
    ("text", "sentence", "content", "message", "question", "title", "review", "utterance", "query", "body")
)
"""Names of fields with a text. One of them is taken although there are others, if these are shorter."""

NUMBERS = frozenset(("id", "idx", "index", "uuid", "guid", "unnamed"))
"""Words in the names of fields that number rows; a field without a name does too, as the index of pandas."""

MOST_CLASSES, REPEATED = 20, 5
"""Values of a field that may be labels, and rows that each of them has on average."""


def with_text(rows: Sequence[Row], data: DataConfig, template: str) -> tuple[DataConfig, tuple[str, ...]]:
    """Returns (the settings with the field that is the text of these labelled rows, notices on this choice).

    It is the field that `data.text` names. Where that is at its default and there is no such field, it is the only
    field of text, or the longest one, if it alone has one of the names `USUAL`.

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
    texts = [name for name in first.fields if name != first.column(data.label) and _is_text(rows, name)]
    usual = [name for name in texts if name.strip().casefold() in USUAL]
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


def _is_text(rows: Sequence[Row], name: str) -> bool:
    """Whether a field has texts: strings with letters, most of them, that neither number rows nor are a few classes."""
    if not name.strip() or NUMBERS & set(re.split(r"[^a-z0-9]+", name.casefold())):
        return False
    values = [value for row in rows if (value := row.fields.get(name)) is not None]
    texts = [visible(value) for value in values if isinstance(value, str)]
    lettered = sum(any(map(str.isalpha, text)) for text in texts)
    return len(texts) == len(values) and 2 * lettered > len(values) and not are_classes(texts)


def are_classes(values: Sequence[str]) -> bool:
    """Whether so few values occur so often that they may be labels, or are the same in all rows."""
    count = len(set(values))
    return count <= MOST_CLASSES and len(values) >= REPEATED * count
