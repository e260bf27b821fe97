"""Rows of data files, examples with prompt and answer, and metrics of answers."""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tezo.system.errors import RequestError

T = TypeVar("T")

MOST_TEXT = 1 << 22
"""Characters of a prompt, an answer or an option. A tokenizer takes some hundred bytes for each, and aborts the process
where there is no memory left."""


class _Seen(dict[int, int | None]):
    """Maps a character to itself, or to None if it is not seen, for `str.translate`."""

    def __missing__(self, code: int) -> int | None:
        seen = chr(code).isspace() or unicodedata.category(chr(code)) not in ("Cf", "Cc")
        self[code] = code if seen else None
        return self[code]


_SEEN = _Seen()


def visible(text: str) -> str:
    """Returns the text in Unicode form C, without space around it and without characters that are not seen."""
    return unicodedata.normalize("NFC", text).translate(_SEEN).strip()


def folded(text: str) -> str:
    """Returns the result of `visible` in lower case and with single blanks: texts are alike if it is equal."""
    return " ".join(visible(text).split()).casefold()


@dataclass(frozen=True)
class Row:
    """A row of a data file.

    Attributes:
        fields: name -> value.
        where: its place ("train.jsonl, line 3"), for messages.
        classes: field -> the names of the classes that its numbers stand for, as a data set of `datasets` has them.
    """

    fields: dict[str, Any]
    where: str
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def column(self, name: str) -> str | None:
        """Returns the field of this name, or else the one whose name differs only in case or in blanks around it.

        Raises:
            RequestError: there are several of those.
        """
        if name in self.fields:
            return name
        alike = [field for field in self.fields if field.strip().casefold() == name.strip().casefold()]
        if len(alike) > 1:
            raise RequestError(f"{self.where}: the fields {alike[0]!r} and {alike[1]!r} are both {name!r}; rename one.")
        return alike[0] if alike else None

    def get(self, name: str) -> Any:
        """Returns the value of a field, found as by `column`; None if it is missing."""
        field = self.column(name)
        return None if field is None else self.fields[field]

    def __getitem__(self, name: str) -> str:
        """Returns the string in a field of exactly this name; see `value`."""
        return self.value(name, str)

    def value(self, name: str, kind: type[T]) -> T:
        """Returns the value of a field; `RequestError` if it is missing or not of type `kind`."""
        if name not in self.fields:
            raise RequestError(f"{self.where}: there is no field {name!r}; it has {', '.join(self.fields) or 'none'}.")
        value = self.fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(
                f"{self.where}: field {name!r} is {type(value).__name__}, not {kind.__name__}; fix that row."
            )
        return value


def plain(value: Any) -> Any:
    """Returns the value as JSON has it: scalars and arrays of numpy and torch as Python's, None where it is missing."""
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
        if isinstance(value, list):
            return plain(value)
    missing = (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in ("NAType", "NaTType")
    return None if missing else value


def rows_of_fields(fields: Iterable[Mapping[str, Any]], place: str, classes: Mapping[str, Sequence[str]]) -> list[Row]:
    """Makes rows of mappings, with plain values, that are called row 1, 2, ... of `place`."""
    return [Row(plain(row), f"{place}row {number}", classes) for number, row in enumerate(fields, start=1)]


def check_fields_differ(names: Sequence[str], place: str) -> None:
    """Raises an error where two fields have one name, of which one would be lost."""
    count, name = max(((names.count(name), name) for name in names if name.strip()), default=(1, ""))
    if count > 1:
        raise RequestError(f"{place} has {count} fields called {name!r}; rename them, or leave one.")


def class_names(features: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Returns the names of the classes of each field that has some, by the features of a data set of `datasets`."""
    return {name: tuple(feature.names) for name, feature in (features or {}).items() if hasattr(feature, "int2str")}


def blank(row: Row, kept: tuple[str, ...] = ()) -> Row:
    """Returns the row with its strings emptied, except the fields in `kept`."""
    emptied = {k: "" if isinstance(v, str) and k not in kept else v for k, v in row.fields.items()}
    return replace(row, fields=emptied)


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
        null: the prompt without the row's text, for calibrated scores; None if there is none.
        right: indices of all correct options, if there can be several; empty: only `label`.
        references: correct answers to compare a predicted text with.
        ends: whether the token that ends an answer is learnt as part of it.
        whole: whether the answer is a whole text without a prompt; all of its tokens after the first are learnt.
        fields: the fields of the row, for a reward; otherwise empty.
        messages: of the prompt, where the row is a conversation; otherwise empty.
        note: text of a notice on the row; "" if there is none.
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
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    note: str = ""

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

    @property
    def content(self) -> tuple[str, str]:
        """Prompt and answer, both `folded`: two rows with the same content are the same row to a model."""
        return folded(self.prompt), folded(self.answer)

    def name_of(self, option: int) -> str:
        """Returns the name of an option in predictions."""
        return self.names[option] if self.names else self.options[option].strip()

    def is_right(self, option: int) -> bool:
        """Whether an option is correct."""
        return option in (self.right or (self.label,))


def check_answers(examples: Sequence[Example]) -> None:
    """Raises an error where an answer in free text is empty."""
    empty = [example.where for example in examples if not example.options and not example.answer.strip()]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise RequestError(
            f"{len(empty)} of {len(examples)} rows have an empty answer ({'; '.join(empty[:3])}{more}); fill it in, or "
            "remove them. Where the model shall say nothing, write the token that ends its answers as the answer."
        )


Measure = Callable[[str, Sequence[str]], dict[str, float]]
"""(answer, correct answers) -> metrics by name, each from 0 to 1."""


def squad(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's "exact_match" after normalisation and "f1" of the common words, each the best over references."""
    said, correct = normalized(prediction), [normalized(reference) for reference in references]
    return {"exact_match": float(said in correct), "f1": max(_word_f1(said.split(), r.split()) for r in correct)}


def normalized(text: str) -> str:
    """Returns SQuAD's normal form: lower case, without punctuation, articles and repeated spaces."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _word_f1(said: list[str], right: list[str]) -> float:
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def drop(prediction: str, spans: Sequence[str]) -> dict[str, float]:
    """Returns DROP's official "drop_exact_match" and "drop_f1" of one span; `spans` together are the correct answer.

    Words are compared after normalisation, in order or, for F1, as sets; numbers by value. F1 is that of the best span,
    divided by the number of spans; of a span with numbers it is 0 unless the answer has one of them.
    """
    said, right = _drop_words(prediction), [_drop_words(span) for span in spans]
    f1 = round(max(_bag_f1(frozenset(said), frozenset(words)) for words in right) / len(right), 2)
    return {"drop_exact_match": float(right == [said]), "drop_f1": f1}


def _drop_words(text: str) -> list[str]:
    """Returns a span's words: numbers as floats, words in lower case without articles and punctuation."""
    words = (_drop_word(word) for word in re.split(r"[ -]", text))
    return [part for word in words for part in word.split()]


def _drop_word(word: str) -> str:
    lower = word.lower()
    bare = lower if _number(lower) is not None else "".join(c for c in lower if c not in string.punctuation)
    value = _number(bare)
    return str(value) if value is not None else re.sub(r"\b(a|an|the)\b", " ", bare)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _bag_f1(said: frozenset[str], right: frozenset[str]) -> float:
    numbers = {word for word in right if _number(word) is not None}
    if numbers and not numbers & said:
        return 0.0
    common = len(said & right)
    precision = common / len(said) if said else 1.0
    recall = common / len(right) if right else 1.0
    return 2 * precision * recall / (precision + recall) if common or not (said or right) else 0.0
