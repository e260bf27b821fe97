"""A server's numbers are checked: of whatever is wrong nothing is learnt, and what is wrong once is asked for again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import read_jsonl, refused, tezo, write_rows
from server_lies import (
    OF_CHOICES,
    OF_FAILURES,
    OF_HTTP,
    OF_LOADING,
    OF_MODELS,
    OF_PROMPTS,
    OF_TOKENIZING,
    OF_WANTED,
    OF_WRITTEN,
)
from short_runs import result
from short_runs import same as same_tensors
from vllm_server import COMPLETIONS, a_change, check_ends_alike, vllm_home, vllm_server

from tezo.engines import load
from tezo.engines.client import Client
from tezo.engines.server import Server
from tezo.forward.engine import Asked, Continuing
from tezo.models.kinds import ModelConfig
from tezo.runs.step_log import read_log
from tezo.system.errors import RequestError
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import parse_config, to_tree

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
    return engine.generate([change], TEXTS, Continuing(2, [2], True))


LIES = [
    *((prompts, COMPLETIONS, name, lie) for name, lie in OF_PROMPTS.items()),
    *((wanted, COMPLETIONS, name, lie) for name, lie in OF_WANTED.items()),
    *((written, COMPLETIONS, name, lie) for name, lie in (OF_WRITTEN | OF_CHOICES).items()),
    *((prompts, "/v1/load_lora_adapter", name, lie) for name, lie in OF_LOADING.items()),
    *(
        pytest.param(written, "/v1/load_lora_adapter", name, lie, marks=pytest.mark.slow)
        for name, lie in OF_LOADING.items()
    ),
]
AT_THE_START = [
    *(("/v1/models", name, lie) for name, lie in (OF_MODELS | OF_HTTP | OF_FAILURES).items()),
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
    return dict([*a_change(loaded.model).items()][:2])


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


@pytest.mark.parametrize(("ask", "at", "name", "lie"), LIES, ids=lambda own: getattr(own, "__name__", None))
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


def more(*names: str) -> list[Any]:
    """Cases of a test that are left out where time is short."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def request(home: Path, engine: str, **method: Any) -> Any:
    named = {"name": "tezo-cadam", "rank": 4, "num_directions": 2, "rho": 0.03, "lr": 0.05} | method
    return parse_config(
        {
            "model": {"name": str(home / "tiny"), "engine": engine},
            "data": {part: str(home / "few.jsonl") for part in ("train", "dev", "test")},
            "method": {key: value for key, value in named.items() if value is not None},
            "train": {"steps": 3, "batch_size": 4, "eval_every": 3, "keep_best": False, "guard": False},
        }
    )


@pytest.fixture(scope="module")
def honest(home, standin, tmp_path_factory):
    """A run that was told the truth, and the number of answers that it asked for."""
    folder, before = tmp_path_factory.mktemp("honest") / "run", len(standin.asked)
    train(request(home, standin.url), folder)
    return folder, [path for path, _ in standin.asked[before:]].count(COMPLETIONS)


def check_same_bits(*runs: Path) -> None:
    logs = [
        [line | {"seconds": 0, "elapsed": 0, "memory": 0} for line in read_jsonl(r / "metrics.jsonl")] for r in runs
    ]
    assert logs[0] == logs[1]
    assert same_tensors(*(result(run) for run in runs))


def test_a_run_on_an_honest_server_ends_where_one_in_torch_does(home, honest, tmp_path):
    train(request(home, "torch"), tmp_path / "torch")
    check_ends_alike(honest[0], tmp_path / "torch")


def test_a_run_that_keeps_outputs_ends_there_too(home, standin, tmp_path):
    for folder, engine in {"server": standin.url, "torch": "torch"}.items():
        train(request(home, engine, name="gauss-newton", num_directions=4, lr=None), tmp_path / folder)
    check_ends_alike(tmp_path / "server", tmp_path / "torch")


@pytest.mark.parametrize("name", ["log-probability -inf", *more("log-probability True", "answers to other prompts")])
def test_a_run_that_is_lied_to_once_has_the_bits_of_an_honest_one(home, standin, honest, tmp_path, name):
    standin.lying(OF_PROMPTS[name], 1, honest=honest[1] // 2)
    summary = train(request(home, standin.url), tmp_path / "run")
    assert not standin.lies
    check_same_bits(tmp_path / "run", honest[0])
    said = [text for text in summary["notices"] if "asked once more" in text]
    assert len(said) == 1 and standin.url in said[0]
    assert "once more" not in (honest[0] / "summary.json").read_text()


@pytest.mark.parametrize("name", ["log-probability 0.5", *more("tokens shifted by a place", "HTML", "status 500")])
def test_a_run_that_is_lied_to_ends_in_a_sentence_and_goes_on_with_an_honest_server(
    home, standin, honest, tmp_path, name
):
    config, run = request(home, standin.url), tmp_path / "run"
    standin.lying(OF_PROMPTS[name], honest=honest[1] // 2)
    (tmp_path / "run.json").write_text(json.dumps(to_tree(config), default=str))
    done = tezo("train", tmp_path / "run.json", "--output", run)
    refused(done, standin.url)
    assert not standin.adapters and not list(run.glob("adapter*")) and not (run / "summary.json").exists()
    standin.lie = None
    train(config, run, resume=True)
    check_same_bits(run, honest[0])


def test_a_server_that_ignores_adapters_is_refused_before_anything_is_written(home, standin, tmp_path, monkeypatch):
    monkeypatch.setattr(standin, "ignores_adapters", True)
    done = tezo(
        "train", "--model", home / "tiny", "--data", home / "labels.jsonl", "--engine", standin.url, "--output",
        tmp_path / "run",
    )  # fmt: skip
    refused(done, standin.url, "ignores adapters")
    assert not (tmp_path / "run").exists()


class Ignoring(Listener):
    """Has a server ignore adapters after a step."""

    def __init__(self, standin: Any, step: int) -> None:
        self.standin, self.step = standin, step

    def stepped(self, progress: Any) -> None:
        self.standin.ignores_adapters = progress.record.step >= self.step


def test_a_server_that_begins_to_ignore_adapters_ends_the_run(home, standin, tmp_path, monkeypatch):
    monkeypatch.setattr(standin, "ignores_adapters", False)
    with pytest.raises(RequestError, match="ignores adapters"):
        train(request(home, standin.url), tmp_path / "run", [Ignoring(standin, 1)])
    assert len(read_log(tmp_path / "run" / "steps.log").steps) == 2


def test_a_server_that_begins_to_ignore_adapters_ends_a_run_of_scores(home, standin, tmp_path, monkeypatch):
    monkeypatch.setattr(standin, "ignores_adapters", False)
    config = {
        "model": {"name": str(home / "tiny"), "engine": standin.url},
        "data": {"train": str(write_rows(tmp_path / "prompts.jsonl", [{"prompt": "the film was"}] * 4))},
        "method": {"name": "es", "rank": 4, "num_directions": 2, "rho": 0.05},
        "train": {"objective": "reward", "reward": "in memory", "steps": 3, "batch_size": 2, "max_new_tokens": 3},
    }
    with pytest.raises(RequestError, match="ignores adapters"):
        train(parse_config(config), tmp_path / "run", [Ignoring(standin, 0)], score=lengths)
    assert len(read_log(tmp_path / "run" / "steps.log").steps) == 1


def lengths(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_one_of_two_servers_that_begins_to_ignore_adapters_is_named(home, standin, tmp_path):
    with vllm_server(home / "tiny") as other:
        config = request(home, f"{other.url},{standin.url}")
        with pytest.raises(RequestError, match=f"{other.url} ignores adapters"):
            train(config, tmp_path / "run", [Ignoring(other, 0)])


def test_changes_that_are_rounded_away_are_said_and_not_taken_for_ignored(home, standin, tmp_path, caplog):
    summary = train(request(home, standin.url, rho=1e-12), tmp_path / "run")
    for texts in (caplog.messages, summary["notices"]):
        assert sum("method.rho is too small" in text for text in texts) == 1


def test_a_server_that_is_not_there_is_named_before_the_model_is_read(home, standin):
    with pytest.raises(RequestError, match=r"127\.0\.0\.1:1 does not answer"):
        load(ModelConfig(name=str(home / "nowhere"), engine=f"{standin.url},http://127.0.0.1:1"))
