"""The format of rows, by the fields of the first one: labelled rows, or rows whose answer is free text."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tezo.models.kinds import Kind
from tezo.system.errors import RequestError, nearest
from tezo.tasks.columns import are_classes, text_fields, with_texts
from tezo.tasks.examples import Example, Row, visible
from tezo.tasks.row_files import DataConfig
from tezo.tasks.rows import (
    CONVERSATIONS,
    INSTRUCTION,
    OUTPUT,
    CompletionFormat,
    Format,
    InstructionFormat,
    MessagesFormat,
    RenderChat,
    TextFormat,
    text_in,
)

TEMPLATES: dict[Kind, str] = {
    "causal": "{text}\nLabel:",
    "masked": "{text} It was {mask}.",
    "encoder": "{text}",
    "classifier": "{text}",
}
"""Default templates of text/label rows."""

MOST_DECIMALS = 20
"""Labels that may be numbers with decimals; more of them are measurements, and no classes."""

LIKE = 0.8
"""Likeness, of `difflib`, from which a field's name may be meant for another; that of "lable" and "label"."""

NO_TEXT = "the text is empty, so only the template is left to predict the label; fill it in, or remove such rows."
"""The notice on labelled rows whose fields of text are all blank."""

NO_LABEL = "the label is empty; fill it in, or remove the row."

_TABLE = re.compile(r"\.[ct]sv\b", re.IGNORECASE)
"""In the place of a row: a file whose fields have names in the first line alone."""

_DECIMALS = re.compile(r"[+-]?\d+\.\d+")

_FIELD = re.compile(r"""\{\s*([^\s{}"':,][^{}"':,\n]*?)\s*\}""")
"""A field in a template. Braces around anything else, such as JSON, are plain text."""


def _label_in(row: Row, name: str) -> str:
    """Returns the label of a row, without blanks around it.

    Raises:
        RequestError: it is missing, a number with decimals or several labels.
    """
    field, value = row.column(name), row.get(name)
    if isinstance(value, float) and value.is_integer():  # as pandas has whole numbers where one of them is missing
        return str(int(value))
    if isinstance(value, float):
        raise RequestError(
            f"{row.where}: field {field!r} is {value}, and numbers with decimals are not learnt; write classes as "
            "strings or whole numbers, or give rows with a prompt and a completion."
        )
    if isinstance(value, list | dict):
        raise RequestError(
            f"{row.where}: field {field!r} has several labels, and one is learnt for each row; write a row for each "
            "question with one answer, or give rows with a prompt and a completion that names the labels."
        )
    return text_in(row, name).strip()


def _names_of_classes(row: Row, name: str) -> Sequence[str]:
    """Returns the names that the data set has for the numbers in a field; empty if it has none."""
    return [each.strip() for each in row.classes.get(row.column(name) or name, ())]


def _class_in(row: Row, name: str) -> str:
    """Returns the label of a row, by its name where the data set has names; `RequestError` if none fits its number."""
    label, names = _label_in(row, name), _names_of_classes(row, name)
    if not names or label in names:
        return label
    if not label.isdecimal() or int(label) >= len(names):
        raise RequestError(
            f"{row.where}: the label is {label}{_unlabelled(label)}; the data set's classes are 0 to {len(names) - 1} "
            f"({', '.join(names)}). Filter such rows out, or give a split that is labelled."
        )
    return names[int(label)]


def _unlabelled(label: str) -> str:
    """Returns the meaning of a label of -1, in words; "" for others."""
    return ", which data sets have for a row without a label" if label == "-1" else ""


@dataclass
class LabelFormat(Format):
    """Rows {"text": ..., "label": ...}, with a template for the prompt and a word for each label.

    Blanks around a text and around a label are not read. `text` is the field of the text in a default template.
    """

    shape = "label"
    label: str
    template: str
    words: Mapping[str, str]
    kind: Kind
    text: str = DataConfig.text

    def __post_init__(self) -> None:
        space = " " if self.kind in ("causal", "masked") else ""
        fields = [name for name in dict.fromkeys(_FIELD.findall(self.template)) if name != "mask"]
        self.columns, self.labels = (*fields, self.label), tuple(self.words)
        self.options = tuple(space + word for word in self.words.values())

    def fitted(self, rows: Sequence[Row], data: DataConfig) -> Format:
        usual = self.template == default_template(self.kind, self.text)
        if not rows or not usual or any(row.column(self.text) is not None for row in rows):
            return self
        found, taken = with_texts(rows, data, TEMPLATES[self.kind])
        if found.template is not None:  # two texts, where the other rows have one
            return self
        return replace(self, template=default_template(self.kind, found.text), text=found.text, notices=taken)

    def example(self, row: Row, *, answered: bool = True) -> Example:
        prompt, slot, options, note = "", None, self.options, NO_TEXT
        for place, piece in enumerate(_FIELD.split(self.template)):  # braces in a field are plain text
            if place % 2 == 0:
                prompt += piece
            elif piece == "mask":
                slot = len(prompt)
            else:
                text = text_in(row, piece).strip()
                prompt, note = prompt + text, "" if visible(text) else note
        if not answered:
            return Example(prompt, "", options, None, row.where, slot=slot, names=self.labels, note=note)
        label = _label_in(row, self.label)
        if label not in self.words:  # the words are given by the numbers of the classes, or else by their names
            label = _class_in(row, self.label)
        if not visible(label) and label not in self.words:
            raise RequestError(f"{row.where}: {NO_LABEL}")
        if label not in self.words:
            raise RequestError(
                f"{row.where}: the label {label!r} is unknown{_unlabelled(label)}; fix the row, or name all labels in "
                f"data.label_words. {nearest(label, self.words)}"
            )
        index = self.labels.index(label)
        return Example(prompt, options[index], options, index, row.where, slot=slot, names=self.labels, note=note)


def choose_format(
    rows: Sequence[Row], kind: Kind, data: DataConfig, render: RenderChat, classes: Sequence[str] = ()
) -> Format:
    """Returns the format of training rows, which must contain every label unless `data.label_words` names the labels.

    `classes`: those of a classifier, in the order of its logits.

    Raises:
        RequestError: no shape fits, or the model does not support the shape or the template.
    """
    shape: str = data.shape
    if shape == "auto":
        unlabelled = bool(data.label_words or classes) and shape_of(rows[0], data) in (None, "text")
        shape = "label" if unlabelled else _shape(rows, data)
        if shape == "text":
            _check_text_alone(rows, data)
    if shape == "label":
        data, taken = with_texts(rows, data, TEMPLATES[kind])
        return replace(_label_format(rows, kind, data, classes), notices=taken)
    for key in ("template", "label_words"):
        if getattr(data, key):
            raise RequestError(
                f"data.{key} is for labelled rows, and these are {shape} rows; leave it out, or set data.shape=label."
            )
    if kind != "causal":
        raise RequestError(
            f"data.shape: {shape} rows need a causal model, but this model is {kind}; give labelled rows "
            f"({data.text!r} and {data.label!r}), or name the labels in data.label_words."
        )
    if shape == "messages":
        named = rows[0].get(data.messages) is not None or rows[0].column(CONVERSATIONS) is None
        return MessagesFormat(data.messages if named else CONVERSATIONS, render)
    if shape == "instruction":
        return InstructionFormat()
    if shape == "text":
        return TextFormat(data.text)
    chat = isinstance(rows[0].get(data.prompt), list)
    return CompletionFormat(data.prompt, data.completion, render, chat=chat)


def shape_of(row: Row, data: DataConfig) -> str | None:
    """Returns the shape that the fields of a row fit; None if they fit none."""
    if row.get(data.messages) is not None:
        return "messages"
    if row.get(data.prompt) is not None and row.get(data.completion) is not None:
        return "completion"
    if row.column(data.label) is not None:
        return "label"
    by_field = {  # these may lack their answer
        CONVERSATIONS: "messages", INSTRUCTION: "instruction", data.prompt: "completion", data.text: "text",
    }  # fmt: skip
    return next((shape for name, shape in by_field.items() if row.get(name) is not None), None)


def _check_text_alone(rows: Sequence[Row], data: DataConfig) -> None:
    """Refuses rows of plain text of which a setting, a field's name or its values say that there is an answer too."""
    row = rows[0]
    alone = f"or data.shape=text to learn {data.text!r} alone"
    for name in ("label", "prompt", "completion", "messages"):
        value = getattr(data, name)
        if value != getattr(DataConfig, name):
            raise RequestError(
                f"data.{name} is {value!r}, and {row.where} has no such field, but {', '.join(row.fields)}; set "
                f"data.{name} to one of them, {alone}."
            )
    others = [field for field in row.fields if field != row.column(data.text)]
    for field in others:
        if _is_near(field, data.label):
            ways = f"data.label={field} to learn it as the label"
        elif _is_near(field, data.completion) or _is_near(field, OUTPUT):
            ways = f"data.prompt={data.text} and data.completion={field} to learn it as the answer"
        else:
            continue
        raise RequestError(f"{row.where}: beside {data.text!r} there is the field {field!r}; set {ways}, {alone}.")
    for field in others:
        values = Counter(_values(rows, field))
        if len(values) > 1 and are_classes([*values.elements()]):
            most = [name for name, _ in values.most_common(3)]
            raise RequestError(
                f"{row.where}: beside {data.text!r} the field {field!r} has {len(values)} values "
                f"({', '.join(most)}{', ...' * (len(values) > len(most))}); set data.label={field} to learn them as "
                f"labels, {alone}."
            )


def _values(rows: Sequence[Row], field: str) -> list[str]:
    return [str(row.fields.get(field)).strip() for row in rows]


def _class_fields(rows: Sequence[Row]) -> list[str]:
    """Returns the fields whose values may be labels."""
    values = {name: _values(rows, name) for name in rows[0].fields}
    return [name for name, found in values.items() if len(set(found)) > 1 and are_classes(found)]


def _is_near(field: str, name: str) -> bool:
    """Whether a field's name is like `name`, or has it as one of its words."""
    words = re.split(r"[^a-z0-9]+", field.casefold())
    plural = [form for word in (*words, field.strip().casefold()) for form in (word, word.removesuffix("s"))]
    return bool(difflib.get_close_matches(name.casefold(), plural, n=1, cutoff=LIKE))


def _shape(rows: Sequence[Row], data: DataConfig) -> str:
    row = rows[0]
    shape = shape_of(row, data)
    preference = {"chosen", "rejected"} <= set(row.fields) and shape in (None, "completion")
    if preference and data.completion not in row.fields:
        raise RequestError(
            f"{row.where}: a chosen and a rejected answer are a preference, which is not learnt; set "
            "data.completion=chosen (or data.messages=chosen for whole conversations) to learn the chosen answers."
        )
    if shape is not None:
        return shape
    meant = [
        f"data.{name}={field}"
        for name in ("prompt", "completion", "messages", "text", "label")
        for field in row.fields
        if field != row.column(getattr(data, name)) and _is_near(field, getattr(data, name))
    ]
    answer = row.column(data.completion)
    if answer is not None and row.column(data.prompt) is None and not meant:
        raise RequestError(
            f"{row.where}: beside {answer!r} there is no field {data.prompt!r}, but {', '.join(row.fields)}; set "
            f"data.prompt to the name of the prompt's field, or data.text={answer} to learn that field alone."
        )
    if not meant and text_fields(rows):
        meant = [f"data.label={field}" for field in _class_fields(rows)[:1]]
    raise RequestError(
        f"{row.where}: the fields {', '.join(row.fields)} fit no known shape"
        + (f"; did you mean {' '.join(meant)}?" if meant else ".")
        + (" The first line of a table has the names of its fields." if _TABLE.search(row.where) and not meant else "")
        + f" Rows need {data.prompt!r} and "
        f"{data.completion!r}, or {data.messages!r}, or {data.text!r} and {data.label!r}; other names are set "
        "with data.prompt, data.completion, data.messages, data.text, data.label (docs/rows.md has all shapes)."
    )


def default_template(kind: Kind, text: str) -> str:
    """Returns the prompt of labelled rows where none is given; `text` names the field with the text."""
    return TEMPLATES[kind].replace("{text}", "{" + text + "}")


def _label_format(rows: Sequence[Row], kind: Kind, data: DataConfig, classes: Sequence[str]) -> LabelFormat:
    template = data.template or default_template(kind, data.text)
    names, answer = _FIELD.findall(template), rows[0].column(data.label)
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
            f"put one in braces: {', '.join(field for field in rows[0].fields if field != answer)}."
        )
    read = {*names, *map(rows[0].column, names)} - {None}
    if read & {data.label, answer}:
        key, value = ("template", template) if data.template else ("text", data.text)
        raise RequestError(
            f"data.{key} is {value!r}, which puts the label into the prompt (data.label={data.label}); "
            "name only fields that are known before the answer."
        )
    words = dict(data.label_words or _words_of(rows, data.label, classes))
    if len(words) < 2:
        key, verb = ("label_words", "name") if data.label_words else ("label", "give rows with")
        raise RequestError(f"data.{key}: there is only one label ({', '.join(words)}); {verb} two or more.")
    for label, word in words.items():
        if not visible(word):
            raise RequestError(f"data.label_words: the word of the label {label!r} is empty; give it one.")
    for word, count in Counter(words.values()).items():
        if count > 1:
            raise RequestError(
                f"data.label_words: two labels have the word {word!r}; give each label a different word."
            )
    return LabelFormat(data.label, template, words, kind, data.text)


def _words_of(rows: Sequence[Row], label: str, classes: Sequence[str]) -> dict[str, str]:
    """Maps labels to words where none are given: to themselves, or to all classes by their names or their indices."""
    if not classes:
        return {name: name for name in _names_of_classes(rows[0], label) or _labels_of(rows, label)}
    by_index = {str(index): name for index, name in enumerate(classes)}
    names = _names_of_classes(rows[0], label)
    if names:  # a classifier without names of its classes has those of transformers
        return by_index if all(n == f"LABEL_{i}" for i, n in enumerate(classes)) else _matched(names, classes)
    given = {_label_in(row, label) for row in rows if row.column(label) is not None}
    return by_index if given <= set(by_index) and not given <= set(classes) else {name: name for name in classes}


def _matched(names: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Maps the names of a data set's classes to the classifier's classes of these names; their numbers may differ."""
    by_name = {name.casefold(): name for name in classes}
    unknown = [name for name in names if name.casefold() not in by_name]
    if unknown:
        raise RequestError(
            f"data.label_words: the data set's classes are {', '.join(names)}, and the model's {', '.join(classes)}; "
            f"name the model's class for each, such as data.label_words={{{unknown[0]}: {classes[0]}, ...}}."
        )
    return {name: by_name[name.casefold()] for name in names}


def _labels_of(rows: Sequence[Row], label: str) -> list[str]:
    by_look: dict[str, str] = {}
    for row in rows:
        name = _label_in(row, label)
        if not visible(name):
            raise RequestError(f"{row.where}: {NO_LABEL}")
        if by_look.setdefault(visible(name), name) != name:
            raise RequestError(
                f"{row.where}: the label {name!a} differs from {by_look[visible(name)]!a} only by characters that are "
                "not seen; write them the same way, or name all labels in data.label_words."
            )
    names = sorted(by_look.values())
    if len(names) > MOST_DECIMALS and all(map(_DECIMALS.fullmatch, names)):
        raise RequestError(
            f"data.label: the labels are {len(names)} numbers with decimals, such as {names[0]}, and numbers are not "
            "learnt; write classes, or give rows with a prompt and a completion."
        )
    return names
