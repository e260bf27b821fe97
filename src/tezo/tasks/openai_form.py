"""Requests and answers in OpenAI's form, of /v1/models, /v1/completions and /v1/chat/completions.

A request is refused where it asks for something that would change the answer and is not done here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tezo.tasks.scores import shown

T = TypeVar("T")

MOST_ANSWERS = 128
"""Answers that one request may ask for."""
LARGEST_SEED = 1 << 63
MOST_STOPS = 16

INERT = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
"""Parameters that change no answer."""
AT_REST: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logprobs": (False,),
    "echo": (False,),
    "best_of": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "modalities": (["text"],),
}
"""Parameter -> its values that change nothing, beside null; other values are refused."""


class Refused(Exception):  # noqa: N818 - an answer, not an error of the program
    """A request is refused.

    Args:
        message: for the user.
        param: name of the parameter that is wrong; None: it is another thing.
        status: of HTTP.
        code: of OpenAI's.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def no_such_model(name: str) -> Refused:
    """Returns the answer to a request for a model that does not exist."""
    return Refused(f"The model `{name}` does not exist.", "model", 404, "model_not_found")


@dataclass(frozen=True)
class Request:
    """A request for answers.

    Attributes:
        model: name of the model.
        messages: of a conversation; None: it has prompts.
        prompts: texts, or tokens, that are continued.
        count: answers to each.
        most: tokens of an answer, at most; None: not said.
        temperature: 0 or more; None: not said.
        seed: of sampling; None: not said.
        stops: texts before which an answer ends.
    """

    model: str
    messages: Sequence[Mapping[str, Any]] | None
    prompts: Sequence[str | Sequence[int]]
    count: int
    most: int | None
    temperature: float | None
    seed: int | None
    stops: Sequence[str]


def request_of(body: Any, *, chat: bool) -> Request:
    """Returns the request in the body of a call, for a conversation or for prompts.

    Raises:
        Refused: it is not one, or asks for something that is not done here.
    """
    if not isinstance(body, Mapping):
        raise Refused("The body is not a JSON object.")
    given = {name: value for name, value in body.items() if value is not None and name not in INERT}
    model = _taken(given, "model", lambda value: isinstance(value, str), "a name")
    if model is None:
        raise Refused("There is no model; name one of /v1/models.", "model")
    messages, prompts = (_messages(given), []) if chat else (None, _prompts(given))
    count = _taken(given, "n", lambda value: _is_count(value, 1, MOST_ANSWERS), f"a number from 1 to {MOST_ANSWERS}")
    most = [
        _taken(given, name, lambda value: _is_count(value, 1), "a number from 1 on")
        for name in ("max_tokens", *(["max_completion_tokens"] if chat else []))
    ]
    stops = _taken(given, "stop", _are_stops, f"a text, or a list of up to {MOST_STOPS}") or []
    request = Request(
        model,
        messages,
        prompts,
        count or 1,
        min((value for value in most if value is not None), default=None),
        _taken(given, "temperature", _is_temperature, "a number from 0 to 100"),
        _taken(given, "seed", lambda value: _is_count(value, -LARGEST_SEED, LARGEST_SEED - 1), "a whole number"),
        [stops] if isinstance(stops, str) else stops,
    )
    if request.count * max(1, len(prompts)) > MOST_ANSWERS:
        raise Refused(f"A request has up to {MOST_ANSWERS} answers; send several.", "n")
    for name, value in given.items():
        if name not in AT_REST or not any(_is_same(value, rest) for rest in AT_REST[name]):
            raise Refused(f"{name} is {shown(value)}, which is not done here; leave it out.", name)
    return request


def _taken(given: dict[str, Any], name: str, fits: Callable[[Any], bool], form: str) -> Any:
    """Takes a parameter out of those that are given; None where it is not among them."""
    value = given.pop(name, None)
    if value is not None and not fits(value):
        raise Refused(f"{name} is {shown(value)}; it must be {form}.", name)
    return value


def _is_count(value: Any, least: int, most: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value and (most is None or value <= most)


def _is_temperature(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100


def _are_stops(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= MOST_STOPS and all(isinstance(t, str) and t for t in texts)


def _is_same(value: Any, rest: Any) -> bool:
    return value == rest and isinstance(value, bool) == isinstance(rest, bool)


def _messages(given: dict[str, Any]) -> list[dict[str, Any]]:
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of messages.", "messages")
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Refused(f"messages[{i}] must be an object with a role and a content.", "messages")
        if message.get("tool_calls"):
            raise Refused(f"messages[{i}] has tool_calls, which are not done here; write them as text.", "messages")
        found.append({"role": message["role"], "content": _content(message.get("content"), f"messages[{i}]")})
    return found


def _content(content: Any, place: str) -> str:
    """Returns the text of a message, which may have several parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "\n".join(part["text"] for part in content)
    raise Refused(f"{place} has a content that is not text.", "messages")


def _prompts(given: dict[str, Any]) -> list[str | list[int]]:
    prompt = given.pop("prompt", None)
    several = prompt if isinstance(prompt, list) and not _are_tokens(prompt) else [prompt]
    if not several or not all(isinstance(each, str) or _are_tokens(each) for each in several):
        raise Refused("prompt must be a text, a list of texts, tokens, or a list of tokens.", "prompt")
    return several


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_count(token, 0) for token in value)


@dataclass(frozen=True)
class Written:
    """An answer.

    Attributes:
        text: the answer.
        tokens: number of its tokens.
        cut: whether it ended at the most tokens.
    """

    text: str
    tokens: int
    cut: bool


def answer_to(request: Request, number: str, now: int, asked: int, answers: Sequence[Written]) -> dict[str, Any]:
    """Returns the answer to a request.

    Args:
        request: the request.
        number: that no other answer has.
        now: seconds of Unix time.
        asked: tokens of its prompts.
        answers: to each prompt, `request.count` in turn.
    """
    chat, written = request.messages is not None, sum(each.tokens for each in answers)
    choices = [
        {
            "index": i,
            **({"message": {"role": "assistant", "content": each.text}} if chat else {"text": each.text}),
            "logprobs": None,
            "finish_reason": "length" if each.cut else "stop",
        }
        for i, each in enumerate(answers)
    ]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": now,
        "model": request.model,
        "choices": choices,
        "usage": {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written},
    }


def models_as(names: Sequence[str], now: int) -> dict[str, Any]:
    """Returns the answer of /v1/models."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": now, "owned_by": "tezo"} for name in names],
    }
