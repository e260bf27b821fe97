"""Formats and objectives, by the data settings and a model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.tasks.catalogue import task
from tezo.tasks.examples import Row
from tezo.tasks.formats import LabelFormat, choose_format, shape_of
from tezo.tasks.objectives import objective_for
from tezo.tasks.objectives.objective import Objective
from tezo.tasks.row_files import DataConfig
from tezo.tasks.rows import INSTRUCTION, Format, Messages
from tezo.tasks.splits import training_rows
from tezo.tasks.wordings import Demonstrated

DEFAULT_LENGTH = 2048
"""Input length in tokens where data.max_length is not set; models with a lower maximum have that."""


def make_format(data: DataConfig, loaded: LoadedModel, rows: Sequence[Row]) -> Format:
    """Returns the format of the rows, by the settings and the kind of the model.

    Labelled rows whose labels are not given have the labels and the prompt that came with the model.
    """
    if data.task is not None:
        return task(data.task).wording(loaded.kind)
    carried = loaded.labels
    if carried is not None and data.label_words is None:
        shape = shape_of(rows[0], data) if data.shape == "auto" else data.shape
        if shape in ("label", "text"):
            template = data.template or carried.template
            data = replace(data, shape="label", label_words=dict(carried.label_words), template=template)
    return choose_format(rows, loaded.kind, data, partial(render_chat, loaded.tokenizer), loaded.classes)


def row_of_prompt(data: DataConfig, loaded: LoadedModel, prompt: str) -> Row:
    """Returns a row without an answer, in the shape of a run's rows, that asks a prompt.

    A base model whose rows are not known is asked by its chat template, or where it has none with the prompt as it is.

    Raises:
        RequestError: the rows of the run have more than one field beside the answer.
    """
    shape: str = data.shape
    if shape == "auto" and data.task is None:
        has_labels = loaded.labels is not None or data.label_words is not None
        shape = "label" if has_labels else "messages" if loaded.tokenizer.chat_template is not None else "completion"
    values: dict[str, tuple[str, Any]] = {
        "label": (data.text, prompt),
        "text": (data.text, prompt),
        "completion": (data.prompt, prompt),
        "instruction": (INSTRUCTION, prompt),
        "messages": (data.messages, [{"role": "user", "content": prompt}]),
    }
    row = Row(dict([values.get(shape, values["text"])]), "the prompt")
    form = make_format(data, loaded, [row])
    if form.shape == "task" or (isinstance(form, LabelFormat) and form.columns != (data.text, form.label)):
        fields = ", ".join(name for name in form.columns if name not in form.answers) or "those of the task"
        raise RequestError(f"a row of this run has the fields {fields}; answer rows with them by `tezo predict`.")
    return row


def with_shots(form: Format, data: DataConfig, loaded: LoadedModel, shots: int, seed: int) -> Format:
    """Returns the format with `shots` training rows and their answers before each question; itself for 0 shots."""
    if shots == 0:
        return form
    if shots < 0:
        raise RequestError(f"shots is {shots}; it must be 0 or more.")
    if loaded.kind != "causal":
        raise RequestError(f"shots is {shots}, and the model is {loaded.kind}; leave it out, or take a causal model.")
    if form.shape in ("messages", "text"):
        what = "conversations" if form.shape == "messages" else "texts without a question"
        raise RequestError(f"shots is {shots}, but {what} cannot be shown in a prompt; leave it out.")
    return Demonstrated(form, training_rows(data), shots, seed)


def make_objective(data: DataConfig, loaded: LoadedModel, form: Format, max_new_tokens: int | None = None) -> Objective:
    """Returns the objective of a model on rows of this format.

    Prompts are cut so that an answer of `max_new_tokens` fits; None: the maximum of the format.
    """
    new = form.max_new_tokens or 0 if max_new_tokens is None else max_new_tokens
    longest = loaded.max_length - new
    if longest < 1:
        raise RequestError(
            f"max_new_tokens is {new}, but the model takes {loaded.max_length} tokens for prompt and answer; lower it."
        )
    if data.max_length is not None and data.max_length > loaded.max_length:
        raise RequestError(
            f"data.max_length is {data.max_length}, but the model takes {loaded.max_length} tokens; lower it."
        )
    wanted = data.max_length if data.max_length is not None else max(1, DEFAULT_LENGTH - new)
    return objective_for(loaded, form.options, min(wanted, longest))


def render_chat(tokenizer: Any, messages: Messages, *, tools: Messages | None = None, whole: bool = False) -> str:
    """Returns the prompt for the next message, by the tokenizer's chat template; `RequestError` if it has none.

    `whole`: the conversation as it stands, without the opening of a next message.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "data.messages: the tokenizer of this model has no chat template; use a chat model, or rows with "
            "'prompt' and 'completion'."
        )
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=not whole))
