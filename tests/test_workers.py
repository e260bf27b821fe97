"""Engines that share the changes of a call: whoever computes them, and whoever dies, the numbers are the same."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from folders import bpe_tokenizer, completion_rows, label_rows, write_rows
from gguf_files import tiny_llama, write_gguf
from safetensors.torch import load_file

from tezo.engines import load, workers
from tezo.engines.workers import InRay, Workers, check_cluster
from tezo.forward.engine import Asked, Continuing, Engine, EngineLostError, Told
from tezo.models.kinds import ModelConfig
from tezo.system.errors import RequestError
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import parse_config

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (pip install 'tezo[ray]')")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root, tokenizer = tmp_path_factory.mktemp("home"), bpe_tokenizer(chat=True)
    write_gguf(root / "tiny.gguf", tiny_llama(len(tokenizer)), tokenizer)
    write_rows(root / "rows.jsonl", label_rows(16))
    return root


SCORER = """
def words(prompts, completions, **columns):
    return [len(text.split()) + 0.1 * len(text) for text in completions]
"""


def rewarded(home, workers=0):
    (home / "score.py").write_text(SCORER)
    write_rows(home / "prompts.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(8)])
    return parse_config(
        {
            "model": {"name": str(home / "tiny.gguf"), "engine": "llama.cpp", "workers": workers},
            "data": {"train": str(home / "prompts.jsonl")},
            "method": {"name": "es", "rank": 4, "num_directions": 4, "rho": 0.05},
            "train": {"reward": f"{home / 'score.py'}:words", "steps": 6, "batch_size": 3, "max_new_tokens": 5,
                      "temperature": 1.0, "eval_every": 3, "keep_best": False},
        }
    )  # fmt: skip


def config(home, workers=0):
    rows = {part: str(home / "rows.jsonl") for part in ("train", "dev", "test")}
    return parse_config(
        {
            "model": {"name": str(home / "tiny.gguf"), "engine": "llama.cpp", "workers": workers},
            "data": rows,
            "method": {"name": "tezo-cadam", "lr": 0.05, "rank": 4, "num_directions": 4},
            "train": {"steps": 6, "batch_size": 8, "eval_every": 3, "keep_best": False},
        }
    )


class Counting(Engine):
    """Tells the number in a change, slowly, and is lost now and then."""

    name = "counting"

    def __init__(self, losses: int = 0, error: Exception | None = None) -> None:
        self.losses, self.error, self.calls = losses, error, 0

    def changes(self, module):
        del module
        return True

    def generate(self, changes, prompts, wanted):
        del wanted
        return [[[int(change["x"][0])]] * len(prompts) for change in changes]

    def log_probs(self, changes, asked):
        del asked
        (change,) = changes
        self.calls += 1
        time.sleep(0.01)
        if self.error is not None:
            raise self.error
        if self.losses:
            self.losses -= 1
            raise EngineLostError("lost")
        value = change["x"][0]
        return [Told(value, value.long(), value)]


ASKED = Asked([], torch.tensor([]), torch.tensor([]), torch.tensor([]), 0)


def numbers(count):
    return [{"x": (torch.tensor([float(i)]), torch.zeros(1))} for i in range(count)]


def test_changes_are_shared_and_a_lost_one_is_computed_again_elsewhere(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_ASIDE", 0.05)
    engines = [Counting(), Counting(losses=2), Counting()]
    told = Workers(engines).log_probs(numbers(80), ASKED)
    assert [float(own.log_probs_PC) for own in told] == list(range(80))
    assert all(engine.calls > 2 for engine in engines)  # the lost one was used again
    assert threading.active_count() < 20


def test_what_is_written_under_a_change_is_of_that_change():
    engines = Workers([Counting(), Counting()])
    written = engines.generate(numbers(9), [[1], [2]], Continuing(1, [], False))
    assert written == [[[i], [i]] for i in range(9)]


def test_where_all_are_lost_or_one_refuses_the_caller_is_told(monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_ASIDE", 0.0)
    with pytest.raises(EngineLostError):
        Workers([Counting(losses=99), Counting(losses=99)]).log_probs(numbers(3), ASKED)
    with pytest.raises(RequestError, match="refused"):
        Workers([Counting(), Counting(error=RequestError("refused"))]).log_probs(numbers(9), ASKED)


class Answering(InRay):
    """An actor that answers, and whose answers are altered some times."""

    def __init__(self, lie, lies):
        super().__init__(None, Counting())
        self.lie, self.lies = lie, lies

    def _called(self, name, *arguments):
        del arguments
        told = Told(torch.tensor([[-1.0]]), torch.tensor([[3]]), torch.tensor([[-0.5]]))
        right = {"log_probs": [told], "generate": [[[4, 5], [6]]], "hidden": torch.ones(2, 3)}[name]
        self.lies -= 1
        return right if self.lies < 0 else self.lie(right)


ONE = Asked([[1, 2]], torch.tensor([0]), torch.tensor([1]), torch.tensor([[5]]), 1)
OF_ACTORS = {
    "log_probs": (
        ([{}], ONE),
        [
            lambda _: [],
            lambda told: told * 2,
            lambda told: [replace(told[0], log_probs_PC=torch.tensor([[0.5]]))],
            lambda told: [replace(told[0], log_probs_PC=torch.tensor([-1.0]))],
            lambda told: [replace(told[0], log_probs_PC=torch.tensor([[-1.0], [-1.0]]))],
            lambda told: [replace(told[0], likely_PL=torch.tensor([[-1]]))],
            lambda told: [replace(told[0], likely_log_probs_PL=torch.tensor([[torch.inf]]))],
        ],
    ),
    "generate": (
        ([{}], [[1], [2]], Continuing(2, [], False)),
        [
            lambda texts: [texts[0][:1]],
            lambda texts: texts * 2,
            lambda _: [[[-1], [6]]],
            lambda _: [[[4.0], [6]]],
            lambda _: [[[True], [6]]],
        ],
    ),
    "hidden": (({}, [[1], [2]]), [lambda hidden: hidden[:1]]),
}


@pytest.mark.parametrize(("name", "number"), [(n, i) for n, (_, lies) in OF_ACTORS.items() for i in range(len(lies))])
def test_a_wrong_answer_of_an_actor_is_asked_for_again_and_refused_then(name, number):
    arguments, lies = OF_ACTORS[name]
    with pytest.raises(RequestError, match="an actor of Ray returned"):
        getattr(Answering(lies[number], 2), name)(*arguments)
    found, right = (getattr(Answering(lies[number], times), name)(*arguments) for times in (1, 0))
    assert repr(found) == repr(right)


def test_a_model_that_has_diverged_in_an_actor_is_for_the_run_to_notice():
    nothing = Answering(lambda told: [replace(told[0], log_probs_PC=torch.tensor([[torch.nan]]))], 1)
    assert nothing.log_probs([{}], ONE)[0].log_probs_PC.isnan().all()


class Killer(Listener):
    """Kills the process of an actor of Ray after some steps."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def started(self, job):
        self.engine = job.loaded.engine

    def stepped(self, progress):
        if progress.record.step == 2:
            import ray

            number = ray.get(self.engine._engines[0]._actor.process.remote())
            os.kill(number, signal.SIGKILL)
            self.killed.append(number)


@needs_ray
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own, and of sockets that it leaves to the system
@pytest.mark.parametrize(("count", "request_of"), [(2, config), (4, config), (2, rewarded)])
def test_actors_of_ray_one_of_which_is_killed_give_the_same_bits(home, tmp_path, count, request_of):
    import ray

    train(request_of(home), tmp_path / "alone")
    ray.init(num_cpus=count, log_to_driver=False, include_dashboard=False)
    try:
        killer = Killer()
        train(request_of(home, count), tmp_path / "actors", [killer])
        assert len(killer.killed) == 1
    finally:
        ray.shutdown()
    states = [load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("alone", "actors")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:70000", "nowhere.invalid:6379"])
def test_a_cluster_that_is_not_there_is_named_before_the_model_is_read(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RequestError, match=f"RAY_ADDRESS is {address}, where nothing answers"):
        check_cluster()


@pytest.mark.parametrize("address", [None, "auto", "local"])
def test_a_cluster_without_an_address_is_left_to_ray(monkeypatch, address):
    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    check_cluster()


def test_workers_are_refused_where_they_mean_nothing(home, monkeypatch):
    with pytest.raises(RequestError, match=r"model\.workers is 2"):
        load(ModelConfig(name=str(home), workers=2))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"tezo\[ray\]"):
        load(ModelConfig(name=str(home / "tiny.gguf"), engine="llama.cpp", workers=2))
