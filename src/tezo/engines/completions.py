"""What a server of vLLM sends, checked and typed: the one place where its numbers are read.

A number is taken where vLLM could have computed it for what was asked, and nowhere else. All functions raise a
`MalformedError` that names the place in the answer and what is there. Log-probabilities are at most 0, without a
tolerance: vLLM takes a log-softmax in float32, in which the likeliest token's term is 1, so that none is above 0.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from tezo.engines.connection import Reply, shown
from tezo.engines.prompts import Answer, Prompt
from tezo.engines.states import SUFFIX, StatesFile
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
MOST_DIGITS = 9
"""Digits of a token that a vocabulary may have."""
ENDED, ECHO, MARK = "finish_reason", "prompt_token_ids", "token_id:"
STATES, ANSWER = "hidden_states_path", "cmpl-"
OF_NEXT = ("tokens", "token_logprobs", "top_logprobs")
VALUE = "the value"
NAMES = {dict: "an object", list: "a list", str: "text", int: "a whole number"}


@dataclass(frozen=True)
class Model:
    """A model of a server; adapters have a parent."""

    name: str
    parent: str | None


def models_of(found: Any) -> list[Model]:
    """Returns the models in an answer of /v1/models, one without a parent among them."""
    models = []
    for i, entry in enumerate(_member(found, "data", list)):
        with _inside(f"data[{i}]"):
            name, parent = _member(entry, "id", str), entry.get("parent")
            models.append(Model(name, None if parent is None else _of(str, parent, "parent")))
    if all(model.parent is not None for model in models):
        raise MalformedError("there is no model without a parent")
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
                answers.append(Answer(_places(places, prompt, likely, vocabulary)))
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


def states_of(found: Any, model: str, prompt: Sequence[int]) -> StatesFile | None:
    """Returns the file with the states of a prompt, which was the only one; None: the server shows no states."""
    _choices(found, model, [prompt])
    return states_file(found)


def states_file(found: Any) -> StatesFile | None:
    """Returns the file that an answer of /v1/completions names; None: it names none."""
    if (more := _of(dict, found, VALUE).get("kv_transfer_params")) is None or STATES not in more:
        return None
    path, answer = Path(_member(more, STATES, str)), _member(found, "id", str)
    is_own = answer.startswith(ANSWER) and len(answer) > len(ANSWER) and path.name.startswith(answer)
    if not (is_own and path.is_absolute() and path.suffix == SUFFIX):  # it is going to be removed
        raise MalformedError(f"{STATES} is {shown(str(path))}, not an absolute path of a file for {shown(answer)}")
    return StatesFile(path, answer, len(_member(found, "choices", list)))


def _choices(found: Any, model: str, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Returns the answer to each prompt."""
    choices, named = _member(found, "choices", list), _member(found, "model", str)
    if named != model:
        raise MalformedError(f"an answer of the model {shown(named)}, where the adapter {model} was asked")
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


def _places(places: list[Any], prompt: Prompt, likely: int, vocabulary: int) -> dict[int, Table]:
    """Returns the tables of the tokens of a prompt that are asked for; all but the first have one."""
    if len(places) != len(prompt.tokens) or places[0] is not None:
        count = len(prompt.tokens)
        raise MalformedError(f"prompt_logprobs of {len(places)} places for {count} tokens, the first without any")
    found, asked = {}, {position + 1 for position in prompt.places.values()}
    for i, token in enumerate(prompt.tokens[1:], start=1):
        with _inside(f"place {i}"):
            if i in asked:
                found[i] = _ranked(_of(dict, places[i], VALUE), token, likely, vocabulary)
            else:
                _member(places[i], str(token), dict)
    return found


def _ranked(entries: dict[str, Any], right: int, likely: int, vocabulary: int) -> Table:
    """Returns the table of a place, which has the prompt's token and the `likely` likeliest."""
    tokens = _named([*entries], vocabulary)
    try:
        said = [(entry["logprob"], entry["rank"]) for entry in entries.values()]
    except (TypeError, KeyError):
        raise MalformedError(f"{shown(entries)} in place of a logprob and a rank for each token") from None
    if wrong := [rank for _, rank in said if type(rank) is not int]:
        raise MalformedError(f"ranks {shown(wrong)}, not whole numbers")
    checked = zip(tokens, _log_probs([value for value, _ in said]), said, strict=True)
    table = {token: (value, rank) for token, value, (_, rank) in checked}
    by_rank = sorted(table.values(), key=itemgetter(1))
    ranks, values = [rank for _, rank in by_rank], [value for value, _ in by_rank]
    # the prompt's token is one of the likeliest, or is behind them
    count = likely if table.get(right, (0.0, 0))[1] <= likely else likely + 1
    if right not in table or len(ranks) != count or ranks[:likely] != list(range(1, likely + 1)):
        raise MalformedError(
            f"tokens {shown([*table])} with ranks {shown(ranks)}, where token {right} and the {likely} likeliest were "
            "asked for"
        )
    if any(later > earlier for earlier, later in pairwise(values)):
        raise MalformedError(f"log-probabilities {shown(values)} in the order of their ranks")
    _check_sum(values)
    return table


def _wanted(said: dict[str, Any], wanted: Sequence[int], vocabulary: int) -> Table:
    """Returns the table of the next token, which has the wanted tokens and the likeliest; the others have rank 2."""
    name, value, entries = (_one(_member(said, key, list), key) for key in OF_NEXT)
    marked = [_of(str, text, "a token") for text in (name, *_of(dict, entries, OF_NEXT[2]))]
    if wrong := [text for text in marked if not text.startswith(MARK)]:  # text, which may be a number
        raise MalformedError(f"tokens {shown(wrong)}, not {MARK}NUMBER")
    likeliest, *tokens = _named([text.removeprefix(MARK) for text in marked], vocabulary)
    first, *others = _log_probs([value, *entries.values()])
    values = dict(zip(tokens, others, strict=True))
    if values.keys() != {*wanted, likeliest}:
        raise MalformedError(f"tokens {shown([*values])}, where {shown([*wanted])} and the likeliest were asked for")
    if values[likeliest] != first:
        raise MalformedError(f"token {likeliest} has the log-probabilities {values[likeliest]} and {first}")
    if values[likeliest] != max(values.values()):
        raise MalformedError(
            f"token {likeliest} is the likeliest at {values[likeliest]}, and another has {max(values.values())}"
        )
    _check_sum(values.values())
    return {token: (value, 1 if token == likeliest else 2) for token, value in values.items()}


def _check_sum(values: Iterable[float]) -> None:
    if (total := sum(map(math.exp, values))) > MOST_PROBABILITY:
        raise MalformedError(f"probabilities whose sum is {total:.3f}")


def _log_probs(values: list[Any]) -> list[float]:
    if wrong := [value for value in values if type(value) not in (float, int) or not LEAST <= value <= 0]:
        raise MalformedError(f"log-probabilities {shown(wrong)}, not finite numbers of at most 0")
    return [float(value) for value in values]


def _named(names: list[str], vocabulary: int) -> list[int]:
    """Returns the tokens that an object has as names, as JSON writes numbers."""
    wrong = [name for name in names if not (name.isascii() and name.isdigit() and len(name) <= MOST_DIGITS)]
    tokens = [] if wrong else [int(name) for name in names]
    if wrong or [str(token) for token in tokens] != names:
        raise MalformedError(f"tokens {shown(wrong or names)}, not whole numbers from 0 to {vocabulary - 1}")
    return _tokens(tokens, vocabulary)


def _tokens(values: list[Any], vocabulary: int) -> list[int]:
    if wrong := [value for value in values if type(value) is not int or not 0 <= value < vocabulary]:
        raise MalformedError(f"tokens {shown(wrong)}, not whole numbers from 0 to {vocabulary - 1}")
    return values


def _one(values: list[Any], name: str) -> Any:
    """Returns the only element of a list."""
    if len(values) != 1:
        raise MalformedError(f"{name} has {len(values)} elements in place of 1")
    return values[0]


def _member(found: Any, name: str, kind: type[Kind]) -> Kind:
    """Returns what an object has under a name, which must be of this kind."""
    if name not in (members := _of(dict, found, VALUE)):
        raise MalformedError(f"{shown(name)} is missing in {shown(found)}")
    return _of(kind, members[name], name)


def _of(kind: type[Kind], value: Any, name: str) -> Kind:
    """Returns a value of this kind; true and false are not whole numbers."""
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
