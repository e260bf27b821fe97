"""Formats of rows whose answer is free text: prompt and completion, conversations, instructions, plain text."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tezo.errors import RequestError, nearest
from tezo.tasks.examples import Example, Row
from tezo.tasks.row_format import Format, answer_in, text_in

Messages = list[dict[str, Any]]
"""Messages of a conversation, each {"role": ..., "content": ...}."""


class RenderChat(Protocol):
    """Messages -> the prompt for the next message, or the `whole` conversation; special tokens included."""

    def __call__(self, messages: Messages, *, whole: bool = False) -> str: ...
    def __hash__(self) -> int: ...


CONVERSATIONS = "conversations"
"""The field of ShareGPT's messages, taken where the one that data.messages names is missing."""

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
    "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""Who a message is from, in ShareGPT's words -> its role."""


_THOUGHT, _THOUGHT_END = "<think>", "</think>"
"""What a thought stands between, in the words of all models that write one in plain text."""


@dataclass(frozen=True)
class CompletionFormat(Format):
    """Rows {"prompt": ..., "completion": ...}: two texts, or two lists of messages, the second of one message."""

    shape = "completion"
    prompt: str
    completion: str
    render: RenderChat

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt, self.completion

    def example(self, row: Row, *, answered: bool = True) -> Example:
        if isinstance(row.fields.get(row.column(self.prompt) or self.prompt), list):
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


@dataclass(frozen=True)
class MessagesFormat(Format):
    """Rows {"messages": [{"role": ..., "content": ...}, ...]}; the assistant's last message is the answer.

    ShareGPT's {"from": ..., "value": ...} are messages too.
    """

    shape = "messages"
    messages: str
    render: RenderChat

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.messages,)

    def example(self, row: Row, *, answered: bool = True) -> Example:
        messages = messages_in(row, self.messages)
        answer = None
        if messages and messages[-1]["role"] == "assistant":
            answer, messages = messages[-1], messages[:-1]
        elif answered:
            raise RequestError(f"{row.where}: the last message is not the assistant's, so there is nothing to learn.")
        return _chat_example(self.render, row, messages, answer)


@dataclass(frozen=True)
class InstructionFormat(Format):
    """Alpaca's rows {"instruction": ..., "input": ..., "output": ...}, in Alpaca's words."""

    shape = "instruction"

    @property
    def columns(self) -> tuple[str, ...]:
        return INSTRUCTION, INPUT, OUTPUT

    def example(self, row: Row, *, answered: bool = True) -> Example:
        context = text_in(row, INPUT) if row.fields.get(row.column(INPUT) or INPUT) is not None else ""
        words = _WITH_INPUT if context.strip() else _WITHOUT_INPUT
        prompt = words.format(instruction=text_in(row, INSTRUCTION), input=context)
        way_out = f"data.prompt={INSTRUCTION} and data.completion to the one with the answer"
        return Example(prompt, answer_in(row, OUTPUT, way_out) if answered else "", (), None, row.where)


@dataclass(frozen=True)
class TextFormat(Format):
    """Rows {"text": ...}: every token after the first is learnt; asked for an answer, a model continues the text."""

    shape = "text"
    text: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text,)

    def example(self, row: Row, *, answered: bool = True) -> Example:
        text = text_in(row, self.text)
        if not answered:
            return Example(text, "", (), None, row.where)
        return Example("", text, (), None, row.where, whole=True)


def messages_in(row: Row, name: str) -> Messages:
    """The messages of a field, in the words of transformers; other keys of a message are kept.

    Raises:
        RequestError: the field is no list of messages, or who one is from is not known.
    """
    messages = row.fields.get(row.column(name) or name)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _no_messages(row, name)
    return [_message(row, name, message) for message in messages]


def _message(row: Row, name: str, message: dict[str, Any]) -> dict[str, Any]:
    if "from" in message and "role" not in message:
        speaker, content = message["from"], message.get("value")
        if not isinstance(speaker, str) or not isinstance(content, str):
            raise _no_messages(row, name)
        if speaker not in _ROLES:
            raise RequestError(f"{row.where}: a message is from {speaker!r}. {nearest(speaker, _ROLES)}")
        return {"role": _ROLES[speaker], "content": content}
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise _no_messages(row, name)
    return message


def _chat_example(render: RenderChat, row: Row, messages: Messages, answer: dict[str, Any] | None) -> Example:
    """The example of a conversation: the answer is what the template makes of it, without the end of the turn.

    A template may strip the content, put a space or a thought before it, and write keys such as a message's reasoning.
    """
    if answer is not None and answer.get("weight") == 0:
        raise RequestError(
            f"{row.where}: the last message has weight 0, so there is nothing to learn; remove that row."
        )
    prompt = render(messages)
    lost, header, end = _written(render, tuple(message["role"] for message in messages))
    if lost is not None and all(message.keys() <= {"role", "content"} for message in messages):
        raise RequestError(
            f"{row.where}: the model's chat template leaves out messages of the role {lost!r}; give them another role, "
            "or take them out."
        )
    prompt += header
    if answer is None:
        return Example(prompt, "", (), None, row.where, chat=True)
    text, whole = answer["content"], render([*messages, answer], whole=True)
    if end is not None and whole.startswith(prompt) and whole.endswith(end):
        text = whole[len(prompt) : len(whole) - len(end)]
    elif prompt.rstrip().endswith(_THOUGHT) and text.lstrip().startswith(_THOUGHT):
        text = text.lstrip().removeprefix(_THOUGHT).lstrip()
    elif prompt.rstrip().endswith(_THOUGHT) and _THOUGHT_END not in text:
        raise RequestError(
            f"{row.where}: the model's chat template opens a thought ({_THOUGHT}), which this answer does not close; "
            f"put the thought and {_THOUGHT_END} before it, or give rows with a prompt and a completion as texts."
        )
    return Example(prompt, text, (), None, row.where, chat=True)


@lru_cache(maxsize=128)
def _written(render: RenderChat, roles: tuple[str, ...]) -> tuple[str | None, str, str | None]:
    """What a template writes around the answer to messages of these roles, found by marks in the place of contents.

    Returns (the role of the first message that it leaves out, or None; what opens the answer's turn, where the
    template does not write it into prompts; what it writes after an answer, None where that cannot be told).
    """
    marks = [f"mark-{place}-of-a-message" for place in range(len(roles) + 1)]
    asked: Messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=False)]
    try:
        prompt = render(asked)
        whole = render([*asked, {"role": "assistant", "content": marks[-1]}], whole=True)
        opens = prompt != render(asked, whole=True)
    except RequestError:  # the template needs more than roles and contents
        return None, "", None
    lost = next((role for role, mark in zip(roles, marks, strict=False) if mark not in prompt), None)
    before, found, end = whole.partition(marks[-1])
    if not found or not before.startswith(prompt):
        return lost, "", end if found else None
    # a space belongs to the word behind it, for most tokenizers
    return lost, "" if opens else before[len(prompt) :].rstrip(" "), end


def _no_messages(row: Row, name: str) -> RequestError:
    return RequestError(f'{row.where}: field {name!r} is not a list of {{"role": ..., "content": ...}}; fix that row.')
