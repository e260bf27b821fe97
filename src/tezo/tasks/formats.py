"""Formats that turn rows into examples, one for each shape of row: prompt/completion, messages, text/label."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tezo.errors import RequestError, nearest
from tezo.models.kinds import Kind
from tezo.tasks.answer_metrics import Measure
from tezo.tasks.examples import Example, Row, visible

RenderChat = Callable[[list[dict[str, Any]]], str]
"""Messages -> the prompt for the next message, special tokens included."""

TEMPLATES: dict[Kind, str] = {
    "causal": "{text}\nLabel:",
    "masked": "{text} It was {mask}.",
    "encoder": "{text}",
    "classifier": "{text}",
}
"""Default templates of text/label rows."""

_FIELD = re.compile(r"""\{\s*([^\s{}"':,][^{}"':,\n]*?)\s*\}""")
"""A field in a template. Braces around anything else, such as JSON, are plain text."""


class Format(ABC):
    """Turns rows of one shape into examples."""

    shape: ClassVar[Literal["completion", "messages", "label", "task"]]

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


@dataclass(frozen=True)
class CompletionFormat(Format):
    """Rows {"prompt": ..., "completion": ...}."""

    shape = "completion"
    prompt: str
    completion: str

    def example(self, row: Row, *, answered: bool = True) -> Example:
        answer = _field(row, self.completion) if answered else ""
        return Example(_field(row, self.prompt), answer, (), None, row.where)


@dataclass(frozen=True)
class MessagesFormat(Format):
    """Rows {"messages": [{"role": ..., "content": ...}, ...]}; the assistant's last message is the answer."""

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
                f'{row.where}: field {self.messages!r} is not a list of {{"role": ..., "content": ...}}; fix that row.'
            )
        answer = ""
        if messages and messages[-1]["role"] == "assistant":
            answer, messages = messages[-1]["content"], messages[:-1]
        elif answered:
            raise RequestError(f"{row.where}: the last message is not the assistant's, so there is nothing to learn.")
        return Example(self.render(messages), answer, (), None, row.where, chat=True)


@dataclass(frozen=True)
class LabelFormat(Format):
    """Rows {"text": ..., "label": ...}, with a template for the prompt and a word for each label."""

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
        space = " " if self.kind in ("causal", "masked") else ""
        return tuple(space + word for word in self.words.values())

    def example(self, row: Row, *, answered: bool = True) -> Example:
        prompt, slot = self._fill(row)
        options = self.options
        if not answered:
            return Example(prompt, "", options, None, row.where, slot=slot, names=self.labels)
        label = str(_value(row, self.label))
        if label not in self.words:
            raise RequestError(
                f"{row.where}: the label {label!r} is unknown; fix the row, or name all labels in data.label_words. "
                + nearest(label, self.words)
            )
        index = self.labels.index(label)
        return Example(prompt, options[index], options, index, row.where, slot=slot, names=self.labels)

    def _fill(self, row: Row) -> tuple[str, int | None]:
        """(the template with the row's fields, the position of the mask or None); braces in a field are plain text."""
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
    """Field names of a data set, and the prompts of labelled rows.

    Attributes:
        shape: completion, messages or label; "auto": by the fields of the first row.
        text: name of the field with the text of a labelled row.
        label: name of the field with the label.
        prompt: name of the field with the prompt.
        completion: name of the field with the completion.
        messages: name of the field with the messages of a conversation.
        template: prompt of labelled rows: "{field}" inserts a field, "{mask}" the mask token; None: `TEMPLATES`.
        label_words: label -> word (for an encoder: description, for a classifier: class); None: the labels themselves.
    """

    shape: str = "auto"
    text: str = "text"
    label: str = "label"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    template: str | None = None
    label_words: Mapping[str, str] | None = None


def choose_format(
    rows: Sequence[Row], kind: Kind, fields: Fields, render: RenderChat, classes: Sequence[str] = ()
) -> Format:
    """The format of `rows`.

    Args:
        rows: training rows; they must contain every label unless `fields.label_words` names the labels.
        kind: kind of the model.
        fields: field names and templates.
        render: renders messages into a prompt.
        classes: classes of a classifier, in the order of its logits.

    Raises:
        RequestError: no shape fits, or the model does not support the shape or the template.
    """
    shape = _shape(rows[0], fields) if fields.shape == "auto" else fields.shape
    if shape == "label":
        return _label_format(rows, kind, fields, classes)
    for key in ("template", "label_words"):
        if getattr(fields, key):
            raise RequestError(
                f"data.{key} is for labelled rows, and these are {shape} rows; leave it out, or set data.shape=label."
            )
    if kind != "causal":
        raise RequestError(
            f"data.shape: {shape} rows need a causal model, but this model is {kind}; give labelled rows "
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
    if fields.prompt in row.fields:  # enough for a reward
        return "completion"
    raise RequestError(
        f"{row.where}: the fields {', '.join(row.fields)} fit no known shape. Rows need {fields.prompt!r} and "
        f"{fields.completion!r}, or {fields.messages!r}, or {fields.text!r} and {fields.label!r}; other names are set "
        "with data.prompt, data.completion, data.messages, data.text, data.label."
    )


def _label_format(rows: Sequence[Row], kind: Kind, fields: Fields, classes: Sequence[str]) -> LabelFormat:
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
            f"data.template: {template!r} names no field, so all prompts would be equal; "
            f"put one in braces: {', '.join(rows[0].fields)}."
        )
    words = dict(fields.label_words or _words_of(rows, fields.label, classes))
    if len(words) < 2:
        raise RequestError(f"data.label: there is only one label ({', '.join(words)}); give rows with two or more.")
    for word, count in Counter(words.values()).items():
        if count > 1:
            raise RequestError(f"data.label_words: two labels have the word {word!r}; give each label its own word.")
    return LabelFormat(fields.label, template, words, kind)


def _words_of(rows: Sequence[Row], label: str, classes: Sequence[str]) -> dict[str, str]:
    """Label -> word where none is given: the labels themselves, or all classes by their names or their indices."""
    if not classes:
        return {name: name for name in _labels_of(rows, label)}
    by_index = {str(index): name for index, name in enumerate(classes)}
    given = {str(_value(row, label)) for row in rows}
    return by_index if given <= set(by_index) and not given <= set(classes) else {name: name for name in classes}


def _labels_of(rows: Sequence[Row], label: str) -> list[str]:
    by_look: dict[str, str] = {}
    for row in rows:
        name = str(_value(row, label))
        if not visible(name):
            raise RequestError(f"{row.where}: the label is empty; fill it in, or remove the row.")
        if by_look.setdefault(visible(name), name) != name:
            raise RequestError(
                f"{row.where}: the label {name!a} differs from {by_look[visible(name)]!a} only by white space or "
                "characters that are not seen; write them the same way, or name all labels in data.label_words."
            )
    return sorted(by_look.values())


def _value(row: Row, name: str) -> str | int:
    if name not in row.fields:
        raise RequestError(
            f"{row.where}: there is no field {name!r}; set data.text, data.label, data.template, ... to the names of "
            f"your fields. {nearest(name, row.fields)}"
        )
    value = row.fields[name]
    if not isinstance(value, str | int):
        raise RequestError(f"{row.where}: field {name!r} is {type(value).__name__}, not a string or a whole number.")
    return value


def _field(row: Row, name: str) -> str:
    return str(_value(row, name))
