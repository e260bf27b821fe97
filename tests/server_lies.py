"""Lies of a server: functions that alter a right answer, by what they are about."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_server import Lie, Reply, failure

from tezo.engines.server import OWN

FIRST, LAST, ABSENT = "<first>", "<last>", "<absent>"
"""In the place of the first and last key of an object, and of a value that is taken away."""
PLACES = ("choices", -1, "prompt_logprobs")
PLACE = (*PLACES, -1)
"""Log-probabilities at the last token of a prompt, of which the first is that of the token itself."""
SAID = ("choices", -1, "logprobs")
WRITTEN = ("choices", -1, "token_ids")


def change(*path: Any, by: Callable[[Any], Any]) -> Lie:
    """Replaces what an answer has at a path, and tells the truth where the answer has nothing there."""

    def lie(reply: Reply) -> Reply:
        found = [json.loads(reply.body)]
        inside, key = found, 0
        for step in path:
            inside = inside[key]
            if inside is None:
                return reply
            key = [*inside][0 if step is FIRST else -1] if step in (FIRST, LAST) else step
        if isinstance(key, str) and inside[key] is None:
            return reply
        value = by(inside[key])
        if value is ABSENT:
            inside.pop(key)
        else:
            inside[key] = value
        return replace(reply, body=json.dumps(found[0]).encode())

    return lie


def put(*path: Any, value: Any) -> Lie:
    return change(*path, by=lambda _: value)


def put_each(name: str, *path: Any, values: Any) -> dict[str, Lie]:
    return {f"{name} {value!r:.20}": put(*path, value=value) for value in values}


def renamed(*path: Any, new: Callable[[str], str]) -> Lie:
    """Has another name for the first key of an object."""
    return change(
        *path, by=lambda table: {new(token) if not i else token: table[token] for i, token in enumerate(table)}
    )


def of_body(by: Callable[[bytes], bytes]) -> Lie:
    return lambda reply: replace(reply, body=by(reply.body))


def instead(reply: Reply | None) -> Lie:
    return lambda _: reply


def of_all(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns a function that puts values into each entry of an object."""
    return lambda table: {token: own | values for token, own in table.items()}


def swapped_ranks(table: dict[str, Any]) -> dict[str, Any]:
    first, second = sorted(table, key=lambda token: table[token]["rank"])[:2]
    ranks = {first: table[second]["rank"], second: table[first]["rank"]}
    return {token: own | {"rank": ranks.get(token, own["rank"])} for token, own in table.items()}


def swapped_answers(choices: list[Any]) -> list[Any]:
    return [own | {"index": other["index"]} for own, other in zip(choices, reversed(choices), strict=True)]


def other_prompts(choices: list[Any]) -> list[Any]:
    prompts = [own["prompt_token_ids"] for own in choices]
    return [own | {"prompt_token_ids": prompt} for own, prompt in zip(choices, reversed(prompts), strict=True)]


def next_tokens(places: list[Any]) -> list[Any]:
    return [None, *({str(int(token) + 1): own for token, own in table.items()} for table in places[1:])]


def of_length(count: int) -> Lie:
    """Has continuations of another length, and counts them so."""

    def written(found: dict[str, Any]) -> dict[str, Any]:
        choices = [own | {"token_ids": [5] * count} for own in found["choices"]]
        return found | {"choices": choices, "usage": {"completion_tokens": count * len(choices)}}

    return change(by=written)


def below_another(said: dict[str, Any]) -> dict[str, Any]:
    """The greedy token is not the likeliest."""
    return said | {"token_logprobs": [-40.0], "top_logprobs": [said["top_logprobs"][0] | {said["tokens"][0]: -40.0}]}


OF_NUMBERS = {
    **put_each(
        "log-probability", *PLACE, FIRST, "logprob",
        values=[0.5, 1e-9, True, False, "-1.0", None, [-1.0], {"value": -1.0}, math.nan, math.inf, -math.inf, -1e39,
                -(10**400), ABSENT],
    ),
    **put_each("rank", *PLACE, FIRST, "rank", values=[0, -1, True, 1.5, 1.0, "1", None, [1], math.nan, ABSENT]),
    "two tokens of a rank": change(*PLACE, by=of_all(rank=1)),
    "ranks against log-probabilities": change(*PLACE, by=swapped_ranks),
    "all are likely": change(*PLACE, by=of_all(logprob=-0.1)),
}  # fmt: skip
OF_TOKENS = {
    **{
        f"token {new!r:.20}": renamed(*PLACE, new=lambda _, new=new: new)
        for new in ("-1", "320", "9" * 5000, "seven", "7.0", "", "\u0667", "nan")
    },
    "a blank before a token": renamed(*PLACE, new=lambda old: f" {old}"),
    "a zero before a token": renamed(*PLACE, new=lambda old: f"0{old}"),
    "not the token of the prompt": put(*PLACE, FIRST, value=ABSENT),
    "the token of the prompt alone": change(*PLACE, by=lambda table: dict([*table.items()][:1])),
    "a token that nobody asked for": change(
        *PLACE, by=lambda table: table | {str(max(map(int, table)) - 1): {"logprob": -30.0, "rank": 300}}
    ),
    "tokens shifted by a place": change(*PLACES, by=lambda places: [None, *places[2:], places[1]]),
    "the next token each": change(*PLACES, by=next_tokens),
}
OF_PLACES = {
    "a place too few": put(*PLACES, -1, value=ABSENT),
    "a place too many": change(*PLACES, by=lambda places: [*places, places[-1]]),
    "no first place": put(*PLACES, 0, value=ABSENT),
    **put_each("for a place", *PLACE, values=[None, [-1.0], -1.0, {}, "-1.0"]),
    **put_each("for a token", *PLACE, FIRST, values=[-1.0, None, [-1.0, 1], "-1.0"]),
    **put_each("for places", *PLACES, values=[ABSENT, None, {}, [], -1.0]),
    "an object for places": change(*PLACES, by=lambda places: dict(enumerate(places))),
}
OF_CHOICES = {
    "a choice too few": put("choices", -1, value=ABSENT),
    "a choice too many": change("choices", by=lambda choices: [*choices, choices[0]]),
    "a choice twice": change("choices", by=lambda choices: [choices[0], *choices[:-1]]),
    **put_each("index", "choices", 0, "index", values=[ABSENT, -1, 99, False, "0", 0.0, None, [0]]),
    "answers to other prompts": change("choices", by=swapped_answers),
    "other prompts echoed": change("choices", by=other_prompts),
    **put_each("for the prompt", "choices", 0, "prompt_token_ids", values=[ABSENT, None, [], 5, "5 6"]),
    **put_each("for a choice", "choices", 0, values=[7, None, [], "yes"]),
    **put_each("for choices", "choices", values=[ABSENT, None, {}, [], 7]),
    "an object for choices": change("choices", by=lambda choices: dict(enumerate(choices))),
    **put_each("for the model", "model", values=["tiny", ABSENT, None, ["tiny"]]),
    "an answer in a list": change(by=lambda found: [found]),
    **put_each("alone", values=[{}, [], 0, "yes", False, None]),
    "an error with status 200": put(value={"error": {"message": "out of memory", "code": 500}}),
}
OF_WANTED = {
    "a token that was asked for is not there": put(*SAID, "top_logprobs", 0, LAST, value=ABSENT),
    "a token beside those that were asked for": change(
        *SAID, "top_logprobs", 0, by=lambda table: table | {"token_id:77": -30.0}
    ),
    "tokens without a mark": change(
        *SAID,
        by=lambda said: said
        | {
            "tokens": [said["tokens"][0].removeprefix("token_id:")],
            "top_logprobs": [{t.removeprefix("token_id:"): v for t, v in said["top_logprobs"][0].items()}],
        },
    ),
    "tokens as text": renamed(*SAID, "top_logprobs", 0, new=lambda _: " good"),
    **put_each("likeliest", *SAID, "tokens", 0, values=["token_id:-1", "token_id:320", " the", "18", 7, None]),
    "a likeliest token that is not": change(*SAID, by=below_another),
    "two values of a token": change(*SAID, "token_logprobs", 0, by=lambda value: value - 0.5),
    **{f"two for one of {key}": change(*SAID, key, by=lambda own: own * 2)
       for key in ("tokens", "token_logprobs", "top_logprobs")},
    **{f"none of {key}": put(*SAID, key, value=[]) for key in ("tokens", "token_logprobs", "top_logprobs")},
    **{f"no {key}": put(*SAID, key, value=ABSENT) for key in ("tokens", "token_logprobs", "top_logprobs")},
    **put_each("for log-probabilities", *SAID, values=[None, [], 0, ABSENT]),
    **put_each("for a table", *SAID, "top_logprobs", 0, values=[None, [], -1.0]),
    **put_each("wanted", *SAID, "top_logprobs", 0, LAST, values=[0.5, True, "-1", None, math.nan, -math.inf]),
    **put_each("of the likeliest", *SAID, "token_logprobs", 0, values=[0.5, True, None, math.inf]),
}  # fmt: skip
HTML = b"<html>\n<body>Welcome to nginx!</body></html>"
OF_HTTP = {
    "truncated JSON": of_body(lambda body: body[:-20]),
    "two answers": of_body(lambda body: body * 2),
    "HTML": instead(Reply(HTML, kind="text/html")),
    "HTML as JSON": instead(Reply(HTML)),
    "nothing": instead(Reply(b"")),
    "no content": instead(Reply(b"", status=204)),
    "another type": lambda reply: replace(reply, kind="text/plain"),
    "no type": lambda reply: replace(reply, kind=None),
    "a stream of events": lambda reply: replace(reply, body=b"data: " + reply.body, kind="text/event-stream"),
    "not UTF-8": of_body(lambda body: body.replace(b'"', b'"\xff\xfe', 1)),
    "packed in no way": lambda reply: replace(reply, headers={"Content-Encoding": "gzip"}),
    "depth without end": of_body(lambda _: b"[" * 200_000),
    "a number without end": of_body(lambda _: b'{"data": ' + b"9" * 50_000 + b"}"),
    "a body without end": of_body(lambda body: body + b" " * 10_000_000),
    "redirected": instead(Reply(b"", status=302, headers={"Location": "http://127.0.0.1:1/"})),
    "redirected for good": instead(Reply(b"", status=308, headers={"Location": "/v1/completions"})),
    "redirected to nowhere": instead(Reply(b"", status=302)),
}
OF_FAILURES = {
    "cut short": lambda reply: replace(reply, length=len(reply.body) + 50),
    "hung up": instead(None),
    "a failure that moves the cursor": instead(failure(500, "CUDA\x1b[2J error\n\u202e")),
    "status 500": instead(failure(500, "CUDA error: an illegal memory access was encountered")),
    "status 503": instead(Reply(HTML, 503, "text/html")),
    "status 429": instead(failure(429, "too many requests")),
    "status 404": instead(failure(404, "The model does not exist.")),
}
OF_WRITTEN = {
    **put_each("for tokens", *WRITTEN, values=[ABSENT, "5 6", {}, [], 5]),
    "a token is missing": change(*WRITTEN, by=lambda tokens: tokens[:-1]),
    "tokens without end": change(*WRITTEN, by=lambda tokens: tokens * 99),
    "tokens without end that are counted": of_length(99),
    "nothing that is counted": of_length(0),
    **put_each("token", *WRITTEN, 0, values=[-1, 320, True, "5", 5.0, None, [5], 10**30]),
    **put_each("reason", "choices", -1, "finish_reason", values=[ABSENT, "abort", None, True]),
    **put_each("count", "usage", values=[ABSENT, {}, {"completion_tokens": True}, {"completion_tokens": 1}]),
}
OF_MODELS = {
    **put_each("for models", "data", values=[ABSENT, None, [], {"tiny": 1}, ["tiny"], 7]),
    **put_each("name", "data", 0, "id", values=[ABSENT, None, 7, ["tiny"]]),
    "adapters alone": put("data", value=[{"id": "tiny", "parent": "other"}]),
    "a name of a process without end": put("data", value=[{"id": f"{OWN}{'9' * 5000}-1", "parent": "tiny"}]),
    "a parent that is a number": put("data", value=[{"id": "tiny", "parent": 7}]),
}
OF_TOKENIZING = {
    **put_each("for a text", "tokens", values=[ABSENT, None, [], {}, "5 6"]),
    **put_each("token of a text", "tokens", 0, values=[True, -1, "5", 5.0, None]),
    "other tokens": change("tokens", by=lambda tokens: tokens[::-1]),
}
OF_LOADING = {
    "an error with status 200": lambda reply: failure(200, reply.body.decode()),
    "HTML": instead(Reply(HTML, kind="text/html")),
    "another adapter": instead(Reply(b"Success: LoRA adapter 'x' added successfully.", kind=None)),
    "nothing": instead(Reply(b"", kind=None)),
    "redirected": OF_HTTP["redirected"],
    "a body without end": OF_HTTP["a body without end"],
}
OF_PROMPTS = OF_NUMBERS | OF_TOKENS | OF_PLACES | OF_CHOICES | OF_HTTP | OF_FAILURES
