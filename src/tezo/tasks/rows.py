"""Formats, which turn rows into examples; those of rows whose answer is free text."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol, cast

from tezo.system.errors import RequestError, TezoError, nearest
from tezo.system.files import reading
from tezo.tasks.examples import Example, Measure, Row
from tezo.tasks.row_files import DataConfig


@dataclass(kw_only=True)
class Format(ABC):
    """Conversion of rows of one shape into examples.

    Attributes:
        columns: the fields that are read; empty for a task, which knows them.
        answers: those of them that have the answer alone, which a reward does not need.
        labels: the labels in order; empty if the rows do not share their options.
        options: the text that stands for each label in the model's answer; empty if the rows do not share them.
        measures: metrics that compare an answer with the references of its example.
        max_new_tokens: maximum length in tokens of an answer in free text; None if the data set no limit.
        notices: notes for the user on the choice of fields.
    """

    shape: ClassVar[Literal["completion", "messages", "instruction", "label", "text", "task"]]
    columns: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    max_new_tokens: int | None = None
    notices: tuple[str, ...] = ()

    @abstractmethod
    def example(self, row: Row, *, answered: bool = True) -> Example:
        """Returns the example of a row. With `answered=False` the answer is not read; it may be missing or invalid."""

    def training_example(self, row: Row) -> Example:
        """Returns the example to train on; by default the same as for evaluation."""
        return self.example(row)

    def fitted(self, rows: Sequence[Row], data: DataConfig) -> "Format":
        """Returns the format for other rows of the same run, whose fields may have other names; by default itself.

        Args:
            rows: the others; may be empty.
            data: the settings, as they were asked for.

        Raises:
            RequestError: it is not clear which of their fields is the text.
        """
        del rows, data
        return self


def text_in(row: Row, name: str) -> str:
    """Returns the text of a field, whole numbers as text; `RequestError` if it is missing or of another type."""
    field = row.column(name)
    if field is None:
        raise RequestError(
            f"{row.where}: there is no field {name!r}; set data.text, data.label, data.template, ... to the names of "
            f"your fields. {nearest(name, row.fields)}"
        )
    value = row.fields[field]
    if value is None:
        raise RequestError(
            f"{row.where}: field {field!r} is missing (null), not a string or a whole number; fill it in, or remove "
            "that row."
        )
    if not isinstance(value, str | int):
        raise RequestError(f"{row.where}: field {field!r} is {type(value).__name__}, not a string or a whole number.")
    return str(value)


def answer_in(row: Row, name: str, way_out: str) -> str:
    """Returns the text of a field as `text_in`, and "" where it has no value: `check_answers` counts these rows."""
    field = row.column(name)
    if field is None:
        raise RequestError(f"{row.where}: there is no field {name!r}, but {', '.join(row.fields)}; set {way_out}.")
    return "" if row.fields[field] is None else text_in(row, name)


Messages = list[dict[str, Any]]
"""Messages of a conversation, each {"role": ..., "content": ...}."""


class RenderChat(Protocol):
    """Messages -> the prompt for the next message, or the `whole` conversation; raises whatever the template does."""

    def __call__(self, messages: Messages, *, tools: Messages | None = None, whole: bool = False) -> str: ...
    def __hash__(self) -> int: ...


CONVERSATIONS = "conversations"
"""The field of ShareGPT's messages, taken where the one that data.messages names is missing."""

TOOLS = "tools"
"""The field with descriptions of the functions that the assistant may call, a list or JSON of one."""

INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
"""The fields of Alpaca's rows; the input may be empty or missing."""

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)

_ROLES: Mapping[str, str] = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""Who a message is from, in any case and in ShareGPT's words -> its role."""


_CALLS = "tool_calls"
"""The key of a message with calls of tools."""

_THOUGHT, _THOUGHT_END = "<think>", "</think>"
"""The marks around a thought, for all models that write one in plain text."""


@dataclass
class CompletionFormat(Format):
    """Rows {"prompt": ..., "completion": ...}: two texts, or two lists of messages, the second of one message."""

    shape = "completion"
    prompt: str
    completion: str
    render: RenderChat
    chat: bool = False

    def __post_init__(self) -> None:
        self.columns = (self.prompt, self.completion, *((TOOLS,) if self.chat else ()))
        self.answers = (self.completion,)

    def example(self, row: Row, *, answered: bool = True) -> Example:
        if isinstance(row.get(self.prompt), list):
            return self._conversation(row, answered)
        answer = answer_in(row, self.completion, "data.completion to the one with the answer") if answered else ""
        return Example(text_in(row, self.prompt), answer, (), None, row.where)

    def _conversation(self, row: Row, answered: bool) -> Example:
        prompt = messages_in(row, self.prompt)
        if prompt and prompt[-1]["role"] == "assistant":
            raise RequestError(
                f"{row.where}: the last message of {self.prompt!r} is the assistant's, and the answer would begin "
                f"another turn; put both into {self.completion!r}, as one message."
            )
        answer = None
        if answered:
            completion = messages_in(row, self.completion)
            if [message["role"] for message in completion] != ["assistant"]:
                raise RequestError(
                    f"{row.where}: field {self.completion!r} is not one message of the assistant's; put the messages "
                    f"before the answer into {self.prompt!r}."
                )
            answer = completion[0]
        return _chat_example(self.render, row, prompt, answer)


@dataclass
class MessagesFormat(Format):
    """Rows {"messages": [{"role": ..., "content": ...}, ...]}; the assistant's last message is the answer.

    ShareGPT's {"from": ..., "value": ...} are messages too.
    """

    shape = "messages"
    messages: str
    render: RenderChat

    def __post_init__(self) -> None:
        self.columns = (self.messages, TOOLS)

    def example(self, row: Row, *, answered: bool = True) -> Example:
        messages = messages_in(row, self.messages)
        answer = None
        if messages and messages[-1]["role"] == "assistant":
            answer, messages = messages[-1], messages[:-1]
        elif answered:
            raise RequestError(f"{row.where}: the last message is not the assistant's, so there is nothing to learn.")
        return _chat_example(self.render, row, messages, answer)


@dataclass
class InstructionFormat(Format):
    """Alpaca's rows {"instruction": ..., "input": ..., "output": ...}, in Alpaca's words."""

    shape = "instruction"
    columns: tuple[str, ...] = field(default=(INSTRUCTION, INPUT, OUTPUT), kw_only=True)
    answers: tuple[str, ...] = field(default=(OUTPUT,), kw_only=True)

    def example(self, row: Row, *, answered: bool = True) -> Example:
        context = text_in(row, INPUT) if row.get(INPUT) is not None else ""
        words = _WITH_INPUT if context.strip() else _WITHOUT_INPUT
        prompt = words.format(instruction=text_in(row, INSTRUCTION), input=context)
        way_out = f"data.prompt={INSTRUCTION} and data.completion to the one with the answer"
        return Example(prompt, answer_in(row, OUTPUT, way_out) if answered else "", (), None, row.where)


@dataclass
class TextFormat(Format):
    """Rows {"text": ...}: every token after the first is learnt; asked for an answer, a model continues the text."""

    shape = "text"
    text: str

    def __post_init__(self) -> None:
        self.columns = (self.text,)

    def example(self, row: Row, *, answered: bool = True) -> Example:
        text = text_in(row, self.text)
        if not answered:
            return Example(text, "", (), None, row.where)
        return Example("", text, (), None, row.where, whole=True)


def messages_in(row: Row, name: str) -> Messages:
    """Returns the messages of a field, in the words of transformers; other keys of a message are kept.

    Raises:
        RequestError: the field is no list of messages, or who one is from is not known.
    """
    messages = row.get(name)
    fault = RequestError(f'{row.where}: field {name!r} is not a list of {{"role": ..., "content": ...}}; fix that row.')
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise fault
    return [_message(row, without_nulls(message), fault) for message in messages]


def _message(row: Row, message: dict[str, Any], fault: RequestError) -> dict[str, Any]:
    shared = "role" not in message
    speaker, content = (message.get(key) for key in (("from", "value") if shared else ("role", "content")))
    if not isinstance(speaker, str):
        raise fault
    role = _ROLES.get(speaker.strip().casefold(), speaker)
    if shared and role not in _ROLES.values():
        raise RequestError(f"{row.where}: a message is from {speaker!r}. {nearest(speaker, _ROLES)}")
    if isinstance(content, list):
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        for part, text in zip(content, texts, strict=True):
            if not isinstance(text, str):
                kind = part.get("type", "without a type") if isinstance(part, dict) else type(part).__name__
                raise RequestError(
                    f"{row.where}: a message has a part {kind!r}, and only parts of text are learnt; take it out, or "
                    "remove that row."
                )
        content = "".join(texts)
    if content is None and role == "assistant":  # it may be calls of tools alone
        content = None if message.get(_CALLS) else ""
    elif not isinstance(content, str) and not (role == "tool" and isinstance(content, dict)):
        raise fault
    others = {key: value for key, value in message.items() if not (shared and key in ("from", "value"))}
    return {**others, "role": role, "content": content}


def without_nulls(value: Any) -> Any:
    """Removes keys that have null, which tables write where other rows have a key."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _tools_in(row: Row) -> Messages | None:
    """Returns the descriptions of tools of a conversation; None where there are none."""
    field, tools = row.column(TOOLS), row.get(TOOLS)
    is_text = isinstance(tools, str)
    if is_text:
        try:
            tools = json.loads(tools or "null")
        except ValueError:
            tools = ""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(
            f"{row.where}: field {field!r} is not a list of descriptions of functions, or JSON of one; fix that row, "
            "or take the field out."
        )
    return cast("Messages", tools if is_text else without_nulls(tools))  # nulls in JSON are intended


def _with_parsed_calls(messages: Messages) -> Messages:
    """Replaces JSON in the arguments of tool calls by objects, which templates write as JSON."""

    def parsed(value: Any) -> Any:
        if isinstance(value, list):
            return [parsed(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        found = {key: parsed(inner) for key, inner in value.items()}
        try:
            inner = json.loads(found["arguments"])
        except (KeyError, TypeError, ValueError):
            return found
        return found | ({"arguments": inner} if isinstance(inner, dict) else {})

    return [message | ({_CALLS: parsed(message[_CALLS])} if _CALLS in message else {}) for message in messages]


def _rendered(render: RenderChat, row: Row, messages: Messages, tools: Messages | None, *, whole: bool = False) -> str:
    """Renders messages by the template; `RequestError` where it fails, or leaves out calls of tools.

    Some templates want the arguments of calls as JSON, or a content beside calls: the first form that it takes counts.
    """
    roles = ", ".join(message["role"] for message in messages) or "none"
    parsed = _with_parsed_calls(messages)
    spoken = [message | {"content": message["content"] or ""} for message in parsed]
    text, used, first = None, parsed, None
    with reading(
        f"{row.where}: the model's chat template does not accept these messages, of the roles {roles}",
        "change that row, or give rows with 'prompt' and 'completion'",
    ):
        for used in (parsed, messages, spoken):
            try:
                text = render(used, tools=tools, whole=whole)
                break
            except TezoError:
                raise
            except Exception as error:
                first = first or error
        if text is None:
            assert first is not None
            raise first
    bare = [{key: value for key, value in message.items() if key != _CALLS} for message in used]
    try:
        ignored = bare != used and render(bare, tools=tools, whole=whole) == text
    except Exception:  # the template has no message without content
        ignored = False
    if ignored:
        raise RequestError(
            f"{row.where}: the model's chat template leaves out calls of tools; write them into the content, or remove "
            "that row."
        )
    return text


def _chat_example(render: RenderChat, row: Row, messages: Messages, answer: dict[str, Any] | None) -> Example:
    """Makes the example of a conversation, whose answer is written by the template, without the end of the turn.

    A template may strip the content, put a space or a thought before it, and write keys such as a message's reasoning.
    """
    if answer is not None and answer.get("weight") == 0:
        raise RequestError(
            f"{row.where}: the last message has weight 0, so there is nothing to learn; remove that row."
        )
    tools = _tools_in(row)
    prompt = _rendered(render, row, messages, tools)
    unread = tools is not None and prompt == _rendered(render, row, messages, None)
    note = "the model's chat template does not write tools, so the model does not see them" if unread else ""
    lost, header, end = _written(render, tuple(message["role"] for message in messages))
    if lost is not None and all(message.keys() <= {"role", "content"} for message in messages):
        raise RequestError(
            f"{row.where}: the model's chat template leaves out messages of the role {lost!r}; give them another role, "
            "or take them out."
        )
    prompt += header
    if answer is None:
        return Example(prompt, "", (), None, row.where, chat=True, messages=tuple(messages), note=note)
    text, whole = answer["content"] or "", _rendered(render, row, [*messages, answer], tools, whole=True)
    if end is None:
        end = _written(render, ("user",))[2]
    if end is not None and whole.startswith(prompt) and whole.endswith(end):
        text = whole[len(prompt) : len(whole) - len(end)]
    elif prompt.rstrip().endswith(_THOUGHT) and text.lstrip().startswith(_THOUGHT):
        text = text.lstrip().removeprefix(_THOUGHT).lstrip()
    elif prompt.rstrip().endswith(_THOUGHT) and _THOUGHT_END not in text:
        raise RequestError(
            f"{row.where}: the model's chat template opens a thought ({_THOUGHT}), which this answer does not close; "
            f"put the thought and {_THOUGHT_END} before it, or give rows with a prompt and a completion as texts."
        )
    elif answer.get(_CALLS):
        if not whole.startswith(prompt):
            raise RequestError(
                f"{row.where}: the model's chat template does not write the last message behind those before it, so "
                "its calls of tools cannot be learnt; write them into the content, or remove that row."
            )
        text = whole[len(prompt) :].rstrip()
    elif not whole.startswith(prompt):
        alone = (
            "the model's chat template opens this answer otherwise than its prompts end, so the content alone is learnt"
        )
        note = "; ".join(filter(None, (note, alone)))
    return Example(prompt, text, (), None, row.where, chat=True, messages=tuple(messages), note=note)


@lru_cache(maxsize=128)
def _written(render: RenderChat, roles: tuple[str, ...]) -> tuple[str | None, str, str | None]:
    """Finds, by marks in place of contents, the text of a template around the answer to messages of these roles.

    Returns (the role of the first message that it leaves out, or None; the text that opens the answer's turn, if the
    template does not write it into prompts; the text after an answer, or None if that is unknown).
    """
    marks = [f"mark-{place}-of-a-message" for place in range(len(roles) + 1)]
    asked: Messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=False)]
    try:
        prompt = render(asked)
        whole = render([*asked, {"role": "assistant", "content": marks[-1]}], whole=True)
        opens = prompt != render(asked, whole=True)
    except Exception:  # the template needs more than roles and contents
        return None, "", None
    lost = next((role for role, mark in zip(roles, marks, strict=False) if mark not in prompt), None)
    before, found, end = whole.partition(marks[-1])
    if not found or not before.startswith(prompt):
        return lost, "", end if found else None
    # a space belongs to the word behind it, for most tokenizers
    return lost, "" if opens else before[len(prompt) :].rstrip(" "), end
