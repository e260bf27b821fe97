"""Rows to examples, for each shape of data: prompt/completion, messages, text/label."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tezo.errors import RequestError, nearest
from tezo.models.kinds import Kind
from tezo.tasks.answer_metrics import Measure
from tezo.tasks.examples import Example, Row

RenderChat = Callable[[list[dict[str, Any]]], str]
"""Messages -> the prompt that asks for the next one, special tokens included."""

TEMPLATES: dict[Kind, str] = {"causal": "{text}\nLabel:", "masked": "{text} It was {mask}.", "encoder": "{text}"}
"""Of text/label rows, where no template is given."""

_FIELD = re.compile(r"""\{\s*([^\s{}"':,][^{}"':,\n]*?)\s*\}""")
"""A field of a template; braces around anything else, such as JSON, are text."""


class Format(ABC):
    """A shape of data."""

    shape: ClassVar[Literal["completion", "messages", "label", "task"]]

    @property
    def labels(self) -> tuple[str, ...]:
        """Of labelled data, in order; empty where rows do not share their options."""
        return ()

    @property
    def options(self) -> tuple[str, ...]:
        """What stands for each label in the model's answer."""
        return ()

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What compares an answer with the references of its example, where it has any."""
        return ()

    @property
    def max_new_tokens(self) -> int | None:
        """How long an answer in free text may be; None: not settled by the data."""
        return None

    @abstractmethod
    def example(self, row: Row, *, answered: bool = True) -> Example:
        """The example of a row; with `answered=False` without its answer, which may be missing or wrong."""

    def training_example(self, row: Row) -> Example:
        """The example to learn from: by default the one to be answered."""
        return self.example(row)


@dataclass(frozen=True)
class CompletionFormat(Format):
    """{"prompt": ..., "completion": ...}."""

    shape = "completion"
    prompt: str
    completion: str

    def example(self, row: Row, *, answered: bool = True) -> Example:
        answer = _field(row, self.completion) if answered else ""
        return Example(_field(row, self.prompt), answer, (), None, row.where)


@dataclass(frozen=True)
class MessagesFormat(Format):
    """{"messages": [{"role": ..., "content": ...}, ...]}: the last message, the assistant's, is the answer."""

    shape = "messages"
    messages: str
    render: RenderChat

    def example(self, row: Row, *, answered: bool = True) -> Example:
        messages = row.fields.get(self.messages)
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise RequestError(
                f'{row.where}: field {self.messages!r} is not a list of {{"role": ..., "content": ...}}; mend that row.'
            )
        answer = ""
        if messages and messages[-1]["role"] == "assistant":
            answer, messages = messages[-1]["content"], messages[:-1]
        elif answered:
            raise RequestError(f"{row.where}: the last message is not the assistant's, so there is nothing to learn.")
        return Example(self.render(messages), answer, (), None, row.where, chat=True)


@dataclass(frozen=True)
class LabelFormat(Format):
    """{"text": ..., "label": ...} with a template, and words that stand for the labels."""

    shape = "label"
    label: str
    template: str
    words: Mapping[str, str]
    kind: Kind

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.words)

    @property
    def options(self) -> tuple[str, ...]:
        space = "" if self.kind == "encoder" else " "
        return tuple(space + word for word in self.words.values())

    def example(self, row: Row, *, answered: bool = True) -> Example:
        prompt, slot = self._fill(row)
        options = self.options
        if not answered:
            return Example(prompt, "", options, None, row.where, slot=slot, names=self.labels)
        label = str(_value(row, self.label))
        if label not in self.words:
            raise RequestError(
                f"{row.where}: the label {label!r} is unknown; mend the row, or name all labels in data.label_words. "
                + nearest(label, self.words)
            )
        index = self.labels.index(label)
        return Example(prompt, options[index], options, index, row.where, slot=slot, names=self.labels)

    def _fill(self, row: Row) -> tuple[str, int | None]:
        """The template with the row's fields, and where the mask goes; braces in a field are only text."""
        prompt, slot = "", None
        for place, piece in enumerate(_FIELD.split(self.template)):
            if place % 2 == 0:
                prompt += piece
            elif piece == "mask":
                slot = len(prompt)
            else:
                prompt += _field(row, piece)
        return prompt, slot


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The names that a data set gives its fields, and how labelled rows are put to the model.

    Attributes:
        shape: completion, messages or label; "auto" goes by the fields of the first row.
        text: field of a labelled text.
        label: field of its label.
        prompt: field of a prompt.
        completion: field of its completion.
        messages: field of a conversation.
        template: of labelled rows: "{field}" stands for a field, "{mask}" for the mask; None: `TEMPLATES`.
        label_words: label -> word (or, for an encoder, description); None: the labels found, as they are.
    """

    shape: str = "auto"
    text: str = "text"
    label: str = "label"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    template: str | None = None
    label_words: Mapping[str, str] | None = None


def choose_format(rows: Sequence[Row], kind: Kind, fields: Fields, render: RenderChat) -> Format:
    """The format of `rows`.

    Args:
        rows: training rows, whose labels are all there are unless `fields.label_words` names them.
        kind: of the model.
        fields: names and templates.
        render: makes a prompt of messages.

    Raises:
        RequestError: no shape fits, or the shape or template does not go with the model.
    """
    shape = _shape(rows[0], fields) if fields.shape == "auto" else fields.shape
    if shape == "label":
        return _label_format(rows, kind, fields)
    for key in ("template", "label_words"):
        if getattr(fields, key):
            raise RequestError(
                f"data.{key} is for labelled rows, and these are {shape} rows; leave it out, or set data.shape=label."
            )
    if kind != "causal":
        raise RequestError(
            f"data.shape: {shape} rows need a causal model, and this one is {kind}; give labelled rows "
            f"({fields.text!r} and {fields.label!r})."
        )
    if shape == "messages":
        return MessagesFormat(fields.messages, render)
    return CompletionFormat(fields.prompt, fields.completion)


def _shape(row: Row, fields: Fields) -> str:
    if fields.messages in row.fields:
        return "messages"
    if fields.prompt in row.fields and fields.completion in row.fields:
        return "completion"
    if fields.label in row.fields:
        return "label"
    raise RequestError(
        f"{row.where}: the fields {', '.join(row.fields)} fit no known shape. Rows need {fields.prompt!r} and "
        f"{fields.completion!r}, or {fields.messages!r}, or {fields.text!r} and {fields.label!r}; other names are set "
        "with data.prompt, data.completion, data.messages, data.text, data.label."
    )


def _label_format(rows: Sequence[Row], kind: Kind, fields: Fields) -> LabelFormat:
    template = fields.template or TEMPLATES[kind].replace("{text}", "{" + fields.text + "}")
    names = _FIELD.findall(template)
    if (kind == "masked") != ("mask" in names):
        fault = (
            "has no {mask}, which a masked model needs" if kind == "masked" else f"has {{mask}}; the model is {kind}"
        )
        raise RequestError(f"data.template: {template!r} {fault}.")
    if names.count("mask") > 1:
        raise RequestError(f"data.template: {template!r} has {names.count('mask')} masks; leave one.")
    if set(names) <= {"mask"}:
        raise RequestError(
            f"data.template: {template!r} names no field, so that all rows would read alike; "
            f"put one in braces: {', '.join(rows[0].fields)}."
        )
    words = dict(fields.label_words or {name: name for name in _labels_of(rows, fields.label)})
    if len(words) < 2:
        raise RequestError(f"data.label: there is but one label ({', '.join(words)}); give rows of two or more.")
    for word in words.values():
        if list(words.values()).count(word) > 1:
            raise RequestError(f"data.label_words: two labels have the word {word!r}; give each one of its own.")
    return LabelFormat(fields.label, template, words, kind)


def _labels_of(rows: Sequence[Row], label: str) -> list[str]:
    found: dict[str, str] = {}
    for row in rows:
        name = str(_value(row, label))
        if not name.strip():
            raise RequestError(f"{row.where}: the label is empty; fill it in, or leave the row out.")
        if found.setdefault(name.strip(), name) != name:
            raise RequestError(
                f"{row.where}: the label {name!r} differs from {found[name.strip()]!r} by white space alone; "
                "write them alike, or name all labels in data.label_words."
            )
    return sorted(found.values())


def _value(row: Row, name: str) -> str | int:
    if name not in row.fields:
        raise RequestError(
            f"{row.where}: there is no field {name!r}; set data.text, data.label, data.template and the like to the "
            f"names your rows have. {nearest(name, row.fields)}"
        )
    value = row.fields[name]
    if not isinstance(value, str | int):
        raise RequestError(f"{row.where}: field {name!r} is {type(value).__name__}, not a string or a whole number.")
    return value


def _field(row: Row, name: str) -> str:
    return str(_value(row, name))
