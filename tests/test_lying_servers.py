"""A server's numbers are checked: of whatever is wrong nothing is learnt, and what is wrong once is asked for again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from server_lies import (
    OF_CHOICES,
    OF_HTTP,
    OF_LOADING,
    OF_MODELS,
    OF_PROMPTS,
    OF_TOKENIZING,
    OF_WANTED,
    OF_WRITTEN,
)
from vllm_server import COMPLETIONS, a_change, vllm_home, vllm_server

from tezo.engines import load
from tezo.engines.client import Client
from tezo.engines.server import Server
from tezo.forward.engine import Asked, Continuing
from tezo.models.kinds import ModelConfig
from tezo.system.errors import RequestError

TEXTS = [(5, 6, 7, 8, 9), (5, 6, 11, 12)]


def prompts(engine: Server, change: Any) -> torch.Tensor:
    """Log-probabilities of prompts, and the likeliest tokens."""
    return scored(engine, change, [[13], [14]], likely=3)


def wanted(engine: Server, change: Any) -> torch.Tensor:
    """Log-probabilities of tokens that are asked for by number."""
    return scored(engine, change, [[13, 14], [13, 14]], likely=1)


def scored(engine: Server, change: Any, tokens: list[list[int]], likely: int) -> torch.Tensor:
    asked = Asked(TEXTS, torch.tensor([0, 1]), torch.tensor([4, 3]), torch.tensor(tokens), likely)
    (told,) = engine.log_probs([change], asked)
    return torch.cat([told.log_probs_PC, told.likely_PL, told.likely_log_probs_PL], 1)


def written(engine: Server, change: Any) -> list[list[list[int]]]:
    """What is written behind prompts."""
    return engine.generate([change], TEXTS, Continuing(4, [2], True))


LIES = [
    *((prompts, COMPLETIONS, name, lie) for name, lie in OF_PROMPTS.items()),
    *((wanted, COMPLETIONS, name, lie) for name, lie in OF_WANTED.items()),
    *((written, COMPLETIONS, name, lie) for name, lie in (OF_WRITTEN | OF_CHOICES).items()),
    *((prompts, "/v1/load_lora_adapter", name, lie) for name, lie in OF_LOADING.items()),
    *((written, "/v1/load_lora_adapter", name, lie) for name, lie in OF_LOADING.items()),
]
AT_THE_START = [
    *(("/v1/models", name, lie) for name, lie in (OF_MODELS | OF_HTTP).items()),
    *(("/tokenize", name, lie) for name, lie in OF_TOKENIZING.items()),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return vllm_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def standin(home):
    with vllm_server(home / "tiny") as server:
        yield server


@pytest.fixture(scope="module")
def loaded(home, standin):
    return load(ModelConfig(name=str(home / "tiny"), engine=standin.url))


@pytest.fixture(scope="module")
def change(loaded):
    return a_change(loaded.model)


@pytest.fixture(scope="module")
def right(loaded, change):
    """What an honest server answers."""
    return {ask: ask(loaded.engine, change) for ask in (prompts, wanted, written)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch, standin):
    """A server that is gone is not waited for long, and lies in no later test."""
    monkeypatch.setattr("tezo.engines.server.FIRST_WAIT", 0.001)
    monkeypatch.setattr("tezo.engines.server.SECONDS_OF_A_RESTART", 0.2)
    yield
    standin.lie = None


def check_refused(standin, ask: Callable[[], Any]) -> str:
    """It ends with a sentence or two that name the server, which is left without adapters."""
    with pytest.raises(RequestError) as caught:
        ask()
    said = str(caught.value)
    assert standin.url in said and said.endswith(".") and len(said) < 700 and said.isprintable()
    assert not standin.adapters
    return said


def same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize(("ask", "at", "name", "lie"), LIES, ids=[f"{own[0].__name__}: {own[2]}" for own in LIES])
def test_nothing_is_taken_from_a_lie_and_one_that_is_told_once_does_no_harm(
    standin, loaded, change, right, ask, at, name, lie
):
    check_refused(standin.lying(lie, at=at), lambda: ask(loaded.engine, change))
    standin.lying(lie, 1, at=at)
    assert same(ask(loaded.engine, change), right[ask]) and not standin.lies and not standin.adapters


@pytest.mark.parametrize(("at", "name", "lie"), AT_THE_START, ids=[f"{own[0]}: {own[1]}" for own in AT_THE_START])
def test_a_server_that_lies_at_the_start_is_refused_and_one_that_does_so_once_is_taken(standin, loaded, at, name, lie):
    def begin():
        return Server(Client(standin.url), loaded.model, loaded.tokenizer)

    check_refused(standin.lying(lie, at=at), begin)
    standin.lying(lie, 1, at=at)
    assert begin() and not standin.lies
