"""What a server of vLLM sends, checked and typed: the one place where its numbers are read.

A number is taken where vLLM could have computed it for what was asked, and nowhere else. All functions raise a
`MalformedError` that names the place in the answer and what is there. Log-probabilities are at most 0, without a
tolerance: vLLM takes a log-softmax in float32, in which the likeliest token's term is 1, so that none is above 0.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tezo.engines.connection import Reply, shown
from tezo.engines.prompts import Answer, Prompt
from tezo.forward.answers import MalformedError

Kind = TypeVar("Kind", dict[str, Any], list[Any], str, int)
Table = dict[int, tuple[float, int]]
"""Token -> (log-probability, rank from 1)."""

LEAST = -torch.finfo(torch.float32).max
"""Least log-probability: what is below it is infinite in float32. vLLM sends -9999 for minus infinity."""
MOST_PROBABILITY = 1.001
"""Largest sum of probabilities, with rounding."""
ENDS = ("stop", "length")
"""Why a continuation may have ended."""
ENDED, ECHO, MARK = "finish_reason", "prompt_token_ids", "token_id:"
OF_NEXT = ("tokens", "token_logprobs", "top_logprobs")
NAMES = {dict: "an object", list: "a list", str: "text", int: "a whole number"}


@dataclass(frozen=True)
class Model:
    """A model of a server; adapters have a parent."""

    name: str
    parent: str | None


def models_of(found: Any) -> list[Model]:
    """Returns the models in an answer of /v1/models, one without a parent among them."""
    models = []
    for i, own in enumerate(_member(found, "data", list)):
        with _inside(f"data[{i}]"):
            name, parent = _member(own, "id", str), own.get("parent")
            models.append(Model(name, None if parent is None else _of(str, parent, "parent")))
    if all(model.parent is not None for model in models):
        raise MalformedError("it has no model")
    return models


def tokens_of(found: Any, vocabulary: int) -> list[int]:
    """Returns the tokens in an answer of /tokenize."""
    return _tokens(_member(found, "tokens", list), vocabulary)


def check_loaded(reply: Reply, name: str) -> None:
    """Checks an answer of /v1/load_lora_adapter, which is a sentence that names the adapter."""
    if not (reply.text.startswith("Success") and name in reply.text):
        raise MalformedError(f"no word that the adapter is loaded, but {shown(reply.text)}")


def answers_of(found: Any, model: str, prompts: Sequence[Prompt], likely: int, vocabulary: int) -> list[Answer]:
    """Returns the answers to some prompts.

    Args:
        found: an answer of /v1/completions.
        model: that was asked.
        prompts: that were sent.
        likely: number of most likely tokens that were asked for at each place, where no tokens are wanted.
        vocabulary: number of tokens of the model.
    """
    answers = []
    choices = _choices(found, model, [prompt.tokens for prompt in prompts])
    for i, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        with _inside(f"choice {i}"):
            if prompt.wanted:
                table = _wanted(_member(choice, "logprobs", dict), prompt.wanted, vocabulary)
                answers.append(Answer({len(prompt.tokens): table}))
            else:
                places = _member(choice, "prompt_logprobs", list)
                answers.append(Answer(_places(places, prompt.tokens, likely, vocabulary)))
    return answers


def continuations_of(
    found: Any, model: str, prompts: Sequence[Sequence[int]], most: int, vocabulary: int
) -> list[list[int]]:
    """Returns the tokens that continue some prompts.

    Args:
        found: an answer of /v1/completions.
        model: that was asked.
        prompts: that were sent.
        most: number of tokens after which a continuation is cut.
        vocabulary: number of tokens of the model.
    """
    written = []
    for i, choice in enumerate(_choices(found, model, prompts)):
        with _inside(f"choice {i}"):
            tokens, reason = _tokens(_member(choice, "token_ids", list), vocabulary), _member(choice, ENDED, str)
            if not 1 <= len(tokens) <= most:
                raise MalformedError(f"{len(tokens)} tokens, where 1 to {most} were asked for")
            if reason not in ENDS:
                raise MalformedError(f"{ENDED} is {shown(reason)}")
            written.append(tokens)
    counted, count = _member(_member(found, "usage", dict), "completion_tokens", int), sum(map(len, written))
    if counted != count:
        raise MalformedError(f"{count} tokens, where usage counts {counted}")
    return written


def _choices(found: Any, model: str, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Returns the answer to each prompt."""
    choices, own = _member(found, "choices", list), _member(found, "model", str)
    if own != model:
        raise MalformedError(f"an answer of the model {shown(own)}, where the adapter {model} was asked")
    if len(choices) != len(prompts):
        raise MalformedError(f"{len(choices)} choices for {len(prompts)} prompts")
    by_index = {_member(choice, "index", int): choice for choice in choices}
    if by_index.keys() != set(range(len(prompts))):
        raise MalformedError(f"choices of index {shown(sorted(by_index))} for {len(prompts)} prompts")
    for i, prompt in enumerate(prompts):
        if _member(by_index[i], ECHO, list) != list(prompt):
            raise MalformedError(
                f"choice {i}: {ECHO} is {shown(by_index[i][ECHO])}, and the prompt was {shown([*prompt])}"
            )
    return [by_index[i] for i in range(len(prompts))]


def _places(places: list[Any], prompt: Sequence[int], likely: int, vocabulary: int) -> dict[int, Table]:
    """Returns the table of each token of a prompt but the first."""
    if len(places) != len(prompt) or places[0] is not None:
        raise MalformedError(f"prompt_logprobs of {len(places)} places for {len(prompt)} tokens, the first without any")
    found = {}
    for i, token in enumerate(prompt[1:], start=1):
        with _inside(f"place {i}"):
            found[i] = _ranked(_of(dict, places[i], "it"), token, likely, vocabulary)
    return found


def _ranked(entries: dict[str, Any], own: int, likely: int, vocabulary: int) -> Table:
    """Returns the table of a place, which has the prompt's token and the `likely` likeliest."""
    table: Table = {}
    for name, entry in entries.items():
        token = _named(name, vocabulary)
        rank = _member(entry, "rank", int)
        if rank < 1:
            raise MalformedError(f"token {name} has rank {rank}")
        table[token] = _log_prob(entry.get("logprob"), name), rank
    ranks = sorted(rank for token, (_, rank) in table.items() if token != own or rank <= likely)
    if own not in table or ranks != list(range(1, likely + 1)):
        raise MalformedError(
            f"tokens {shown([*table])} with ranks {shown([rank for _, rank in table.values()])}, where token {own} and "
            f"the {likely} likeliest were asked for"
        )
    values = [value for value, _ in sorted(table.values(), key=lambda pair: pair[1])]
    if values != sorted(values, reverse=True):
        raise MalformedError(f"log-probabilities {shown(values)} in the order of their ranks")
    _check_sum(values)
    return table


def _wanted(said: dict[str, Any], wanted: Sequence[int], vocabulary: int) -> Table:
    """Returns the table of the next token, which has the wanted tokens and the likeliest; the others have rank 2."""
    name, value, entries = (_one(_member(said, key, list), key) for key in OF_NEXT)
    likeliest = _marked(name, vocabulary)
    values = {
        _marked(other, vocabulary): _log_prob(own, other) for other, own in _of(dict, entries, OF_NEXT[2]).items()
    }
    if values.keys() != {*wanted, likeliest}:
        raise MalformedError(f"tokens {shown([*values])}, where {shown([*wanted])} and the likeliest were asked for")
    if values[likeliest] != _log_prob(value, name):
        raise MalformedError(f"token {likeliest} has the log-probabilities {values[likeliest]} and {value}")
    if values[likeliest] != max(values.values()):
        raise MalformedError(
            f"token {likeliest} is the likeliest at {values[likeliest]}, and another has {max(values.values())}"
        )
    _check_sum(values.values())
    return {token: (own, 1 if token == likeliest else 2) for token, own in values.items()}


def _check_sum(values: Iterable[float]) -> None:
    if (total := sum(map(math.exp, values))) > MOST_PROBABILITY:
        raise MalformedError(f"probabilities whose sum is {total:.3f}")


def _log_prob(value: Any, token: str) -> float:
    if type(value) not in (float, int) or not LEAST <= value <= 0:
        raise MalformedError(
            f"the log-probability of {shown(token)} is {shown(value)}, not a finite number of at most 0"
        )
    return float(value)


def _named(name: str, vocabulary: int) -> int:
    """Returns the token that an object has as a name."""
    if name.isascii() and name.isdigit() and len(name) <= len(str(vocabulary)) and name == str(token := int(name)):
        return _token(token, vocabulary)
    raise MalformedError(f"{shown(name)} in place of a token of 0 to {vocabulary - 1}")


def _marked(name: Any, vocabulary: int) -> int:
    """Returns the token that is meant by token_id:NUMBER."""
    return _named(_of(str, name, "a token").removeprefix(MARK), vocabulary)


def _tokens(values: list[Any], vocabulary: int) -> list[int]:
    return [_token(value, vocabulary) for value in values]


def _token(value: Any, vocabulary: int) -> int:
    if type(value) is not int or not 0 <= value < vocabulary:
        raise MalformedError(f"{shown(value)} in place of a token of 0 to {vocabulary - 1}")
    return value


def _one(values: list[Any], name: str) -> Any:
    """Returns the only element of a list."""
    if len(values) != 1:
        raise MalformedError(f"{name} has {len(values)} elements in place of 1")
    return values[0]


def _member(found: Any, name: str, kind: type[Kind]) -> Kind:
    """Returns what an object has under a name, which must be of this kind."""
    if name not in (members := _of(dict, found, "it")):
        raise MalformedError(f"there is no {name} in {shown(found)}")
    return _of(kind, members[name], name)


def _of(kind: type[Kind], value: Any, name: str) -> Kind:
    """Returns a value of this kind, of which true and false are none."""
    if type(value) is not kind:
        raise MalformedError(f"{name} is {shown(value)}, not {NAMES[kind]}")
    return value


@contextmanager
def _inside(where: str) -> Iterator[None]:
    """Adds the place to what is said of a wrong value."""
    try:
        yield
    except MalformedError as error:
        raise MalformedError(f"{where}: {error}") from None
