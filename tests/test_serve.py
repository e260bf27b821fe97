"""Programs as scorers: each member of a population has a name on an OpenAI-compatible server while it is scored."""

import json
import os
import random
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
from folders import bpe_tokenizer, completion_rows, message_rows, model_folder, read_jsonl, refused, tezo, write_rows
from gguf_files import tiny_llama, write_gguf
from kills import contents
from short_runs import entries, killed_after, result, same, stopped
from vllm_server import ASK, COMPLETIONS, a_change, failure, vllm_home, vllm_server

import tezo as library
from tezo.engines import load
from tezo.forward.engine import Continuing
from tezo.models.kinds import ModelConfig
from tezo.newton.policy import ANSWERS
from tezo.runs.step_log import read_log
from tezo.system.errors import RequestError
from tezo.tasks import own_server
from tezo.tasks.objectives import objective_for
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.openai_form import AT_REST, INERT, Refused, request_of
from tezo.tasks.own_server import OwnServer
from tezo.tasks.rewards import RewardRows
from tezo.tasks.scoring import Sample
from tezo.tasks.scoring_processes import Processes
from tezo.training.job import prepare
from tezo.training.loop import train
from tezo.training.settings import MethodConfig, parse_config

pytestmark = pytest.mark.skipif(
    find_spec("starlette") is None or find_spec("uvicorn") is None,
    reason="the server is not installed: pip install 'tezo[serve]'",
)
MOST = 8


def post(url, body, path="completions"):
    """The status and the JSON of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def text_of(url, model, prompt, **more):
    status, found = post(url, {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": MOST} | more)
    assert status == 200, found
    return found["choices"][0]["text"]


PROGRAM = (
    ASK
    + """
def program(row):
    return happy(row["prompt"], ask(row), row)

def half(row):
    return program(row) if row["number"] % 2 else None

def reports(row):
    with open(os.path.join(os.path.dirname(__file__), "addresses"), "a") as file:
        print(os.environ["OPENAI_BASE_URL"], file=file)
    return program(row)

def fails(row):
    raise KeyError("no such thing")

def happy(prompt, completion, row):
    return sum(ord(sign) % 7 for sign in completion.strip()) / 10
"""
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, prompts, and a file with a scorer of texts and a program that asks for the same texts itself."""
    home = tmp_path_factory.mktemp("serve")
    model_folder(home, "llama", chat=True)
    tokenizer = bpe_tokenizer(chat=True)
    write_gguf(home / "tiny.gguf", tiny_llama(len(tokenizer), max_position_embeddings=256), tokenizer)
    for seed, name in enumerate(("train", "dev")):
        rows = [{"prompt": row["prompt"], "number": i} for i, row in enumerate(completion_rows(12, seed))]
        write_rows(home / f"{name}.jsonl", rows)
    (home / "score.py").write_text(PROGRAM)
    return home


MODEL_OF = {"torch": "llama-chat", "llama.cpp": "tiny.gguf"}
ENGINES = ["torch", pytest.param("llama.cpp", marks=pytest.mark.engine)]
TORCH_FAST = ["torch", pytest.param("llama.cpp", marks=(pytest.mark.engine, pytest.mark.slow))]


def config(home, scorer="program", engine="torch", model=None, **more):
    named = {"reward": f"{home / 'score.py'}:{scorer}", "serve": scorer != "happy", "reward_workers": 4,
             "steps": 3, "batch_size": 4, "max_new_tokens": MOST, "eval_every": 1, "checkpoint_every": 1,
             "log_every": 1} | more  # fmt: skip
    return parse_config(
        {
            "model": {"name": str(home / (model or MODEL_OF[engine])), "engine": engine},
            "data": {"train": str(home / "train.jsonl"), "dev": str(home / "dev.jsonl")},
            "method": {"name": "es", "rank": 4, "num_directions": 3, "rho": 0.1},
            "train": named,
        }
    )


class Models:
    """The models of an engine or of torch under some changes, on a server of this process."""

    def __init__(self, loaded):
        self.model, self.engine, self.objective = loaded.model, loaded.engine, objective_for(loaded, ())
        self.server = OwnServer(0, MOST, 0.0, 0)

    def serve(self, writers, ask, step=0):
        return self.server.serve(self.model, self.objective, writers, step, ask)

    def written(self, writer, prompts, most=MOST, chat=False):
        """What a model writes by itself: a literal reference."""
        objective = self.objective
        tokens = [objective.prompt_tokens(prompt, chat=chat) for prompt in prompts]
        ends = sorted(objective.ends.marks)
        texts = []
        for prompt in tokens:
            ((*found,),) = writer([prompt], Continuing(most, ends, False))
            cut = next((i for i, token in enumerate(found) if token in ends), len(found))
            texts.append(text_after(objective.tokenizer, prompt, found[:cut], special=False))
        return texts


@pytest.fixture(params=ENGINES)
def models(request, home):
    found = Models(load(ModelConfig(name=str(home / MODEL_OF[request.param]), engine=request.param)))
    yield found
    found.server.close()


def prompts_of(count, seed=0):
    return [row["prompt"] for row in completion_rows(count, seed)]


def test_the_answer_over_the_wire_is_the_engines_own(models):
    (writer,) = models.objective.evaluator.writers(models.model, models.objective.tokenizer, 1)
    prompts = prompts_of(6)

    def ask(named):
        with ThreadPoolExecutor(6) as threads:
            alone = list(threads.map(partial(text_of, named.base_url, named.model), prompts))
        status, together = post(named.base_url, {"model": named.model, "prompt": prompts, "max_tokens": MOST})
        assert status == 200 and together["usage"]["completion_tokens"] > 0
        return alone, [choice["text"] for choice in together["choices"]]

    ((alone, together),) = models.serve([writer], ask)
    assert alone == together == models.written(writer, prompts)
    assert len({*alone}) > 1


def test_a_conversation_is_answered_behind_the_chat_template(models):
    (writer,) = models.objective.evaluator.writers(models.model, models.objective.tokenizer, 1)
    rows = [row["messages"][:1] for row in message_rows(3)]

    def ask(named):
        body = {"model": named.model, "max_completion_tokens": MOST}
        return [post(named.base_url, body | {"messages": row}, "chat/completions")[1] for row in rows]

    (found,) = models.serve([writer], ask)
    template = models.objective.tokenizer.apply_chat_template
    texts = [template(row, tokenize=False, add_generation_prompt=True) for row in rows]
    assert [each["choices"][0]["message"]["content"] for each in found] == models.written(writer, texts, chat=True)
    assert all(each["object"] == "chat.completion" for each in found)


@pytest.mark.parametrize("models", ENGINES[1:], indirect=True)  # torch has the weights of one member at a time
def test_each_member_answers_by_its_own_name_whatever_the_order_of_calls(models):
    changes = [a_change(models.model, seed=seed) for seed in range(3)]
    writers = [partial(write, models.engine, change) for change in changes]
    prompts, seen = prompts_of(4), []

    def ask(named):
        order = random.Random(named.model).sample(range(4), 4)
        with ThreadPoolExecutor(4) as threads:
            texts = list(threads.map(lambda i: text_of(named.base_url, named.model, prompts[i]), order))
        seen.append(named.model)
        return [texts[order.index(i)] for i in range(4)]

    found = models.serve(writers, ask)
    assert found == [models.written(writer, prompts) for writer in writers]
    assert len({*map(tuple, found)}) == len({*seen}) == 3
    models.serve(writers, ask)
    assert len({*seen}) == 6  # a name is never that of another member


def write(engine, change, prompts, wanted):
    return engine.generate([change], prompts, wanted)[0]


def test_two_members_ask_by_turns_and_each_is_answered_by_its_own_weights(models):
    """Each waits for the other's answer before it asks again, so that neither is answered in one go."""
    calls = []

    def writer(name, prompts, wanted):
        calls.append(name)
        return [models.objective.tokenizer(name, add_special_tokens=False)["input_ids"][: wanted.most] for _ in prompts]

    turn = threading.Barrier(2)

    def ask(named):
        texts = []
        for _ in range(3):
            texts.append(text_of(named.base_url, named.model, "the film"))
            turn.wait(30)
        return texts

    first, second = models.serve([partial(writer, "good"), partial(writer, "bad")], ask)
    assert [text.strip() for text in first] == ["good"] * 3 and [text.strip() for text in second] == ["bad"] * 3
    assert calls.count("good") == calls.count("bad") == 3


def test_what_is_sampled_is_a_function_of_the_seed_and_the_same_for_all_members(models):
    (writer,) = models.objective.evaluator.writers(models.model, models.objective.tokenizer, 1)

    def ask(named):
        said = partial(text_of, named.base_url, named.model, "the film", temperature=2.0)
        return [said() for _ in range(3)], [said(seed=4) for _ in range(2)], said(seed=5)

    one, other = [models.serve([writer], ask)[0] for _ in range(2)]
    later = models.serve([writer], ask, 1)[0]
    assert one == other and one != later  # by the step
    free, seeded, another = one
    assert len({*free}) > 1 and seeded[0] == seeded[1] != another
    assert later[1] == seeded


def test_an_answer_ends_before_its_stop_and_at_its_most_tokens(models):
    (writer,) = models.objective.evaluator.writers(models.model, models.objective.tokenizer, 1)
    (whole,) = models.written(writer, ["the film"], 20)
    stop = whole[len(whole) // 2 :][:2]

    def ask(named):
        asks = [{"stop": stop, "max_tokens": 20}, {"max_tokens": 3}, {"max_tokens": 20}]
        body = {"model": named.model, "prompt": "the film"}
        with ThreadPoolExecutor(3) as threads:  # in one batch, where none ends another
            return [found for _, found in threads.map(lambda more: post(named.base_url, body | more), asks)]

    (found,) = models.serve([writer], ask)
    assert found[1]["usage"]["completion_tokens"] == 3
    stopped_, cut, all_ = (each["choices"][0] for each in found)
    assert stopped_["text"] == whole[: whole.index(stop)] and stopped_["finish_reason"] == "stop"
    assert cut["text"] == models.written(writer, ["the film"], 3)[0] and cut["finish_reason"] == "length"
    assert all_["text"] == whole


def test_a_name_that_does_not_exist_is_told_in_openais_form(models):
    (writer,) = models.objective.evaluator.writers(models.model, models.objective.tokenizer, 1)
    asked = {}

    def ask(named):
        asked["url"], asked["name"] = named.base_url, named.model
        with urllib.request.urlopen(f"{named.base_url}/models") as answer:
            assert [each["id"] for each in json.load(answer)["data"]] == [named.model]
        return post(named.base_url, {"model": "gpt-9", "prompt": "a"})

    ((status, found),) = models.serve([writer], ask)
    assert status == 404
    assert found["error"]["code"] == "model_not_found" and "`gpt-9` does not exist" in found["error"]["message"]
    # and so is the name of a member that is no more
    assert post(asked["url"], {"model": asked["name"], "prompt": "a"})[0] == 404


WRONG = {
    "no JSON": (b"{", "not JSON"),
    "a list": (b"[]", "not a JSON object"),
    "no model": ({"prompt": "a"}, "no model"),
    "no prompt": ({"model": "m"}, "prompt must be"),
    "a token too high": ({"model": "m", "prompt": [1, 10**6]}, "a token that the model does not have"),
    "a long answer": ({"model": "m", "prompt": "a", "max_tokens": 10**6}, "maximum context length"),
    "streams": ({"model": "m", "prompt": "a", "stream": True}, "stream is True"),
    "log-probabilities": ({"model": "m", "prompt": "a", "logprobs": 1}, "logprobs is 1"),
    "nobody knows": ({"model": "m", "prompt": "a", "wanted": 1}, "wanted is 1"),
}


def test_what_is_not_done_is_refused_in_a_sentence_and_does_no_harm(models):
    (writer,) = models.objective.evaluator.writers(models.model, models.objective.tokenizer, 1)

    def ask(named):
        for body, said in WRONG.values():
            sent = body | ({"model": named.model} if "model" in body else {}) if isinstance(body, dict) else body
            status, found = post(named.base_url, sent)
            assert status == 400 and said in found["error"]["message"], found
        assert post(named.base_url, {}, "embeddings")[0] == 404
        request = urllib.request.Request(f"{named.base_url}/models", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError):  # a page in a browser, by a name that leads here
            urllib.request.urlopen(request)
        return text_of(named.base_url, named.model, "the film")

    assert models.serve([writer], ask) == models.written(writer, ["the film"])


@pytest.mark.parametrize("chat", [True, False])
def test_parameters_at_rest_are_taken_and_others_are_not(chat):
    body = {"model": "m"} | ({"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"})
    plain = request_of(body, chat=chat)
    for name, values in AT_REST.items():
        for value in (None, *values):
            assert request_of(body | {name: value}, chat=chat) == plain
        with pytest.raises(Refused, match=name):
            request_of(body | {name: "another"}, chat=chat)
    assert request_of(body | dict.fromkeys(INERT, "x"), chat=chat) == plain


@pytest.mark.parametrize("name", ["n", "max_tokens", "temperature", "seed", "stop", "model", "messages"])
def test_parameters_of_other_types_are_refused_by_their_names(name):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    for value in (True, -1.5, [], {}, [1], "", float("nan"), 10**30):
        if (name, value) not in (("stop", []), ("model", ""), ("max_tokens", 10**30)):
            with pytest.raises(Refused) as error:
                request_of(body | {name: value}, chat=True)
            assert error.value.body["error"]["param"] == name


# Runs


@pytest.mark.parametrize("engine", TORCH_FAST)
def test_a_program_that_asks_for_the_rows_text_is_the_scorer_of_it(home, tmp_path, engine):
    """To the bit: the log, the metrics and the result are those of the run that is given the texts."""
    train(config(home, "happy", engine), tmp_path / "texts")
    train(config(home, "program", engine), tmp_path / "program")
    logs = [read_log(tmp_path / name / "steps.log").steps for name in ("texts", "program")]
    assert logs[0] == logs[1] and same(*(result(tmp_path / name) for name in ("texts", "program")))
    scores = [
        [(line["member"], line["row"], line["score"]) for line in read_jsonl(tmp_path / name / "scored.jsonl")]
        for name in ("texts", "program")
    ]
    assert scores[0] == scores[1] and len({score for *_, score in scores[0]}) > 3


def asks(row, base_url, model):
    assert os.environ["OPENAI_BASE_URL"] == base_url and os.environ["TEZO_MODEL"] == model
    assert os.environ["OPENAI_API_KEY"]
    return len(text_of(base_url, model, row["prompt"])) / 10


async def asks_async(row):
    return len(text_of(os.environ["OPENAI_BASE_URL"], os.environ["TEZO_MODEL"], row["prompt"])) / 10


def test_a_program_may_be_an_object_and_its_environment_is_left_as_it_was(home, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "https://elsewhere")
    monkeypatch.delenv("TEZO_MODEL", raising=False)
    rows = read_jsonl(home / "train.jsonl")
    common = {"serve": True, "method": "es", "steps": 1, "num_directions": 3, "batch_size": 4, "max_new_tokens": MOST}
    runs = [
        library.train(home / "llama-chat", rows, dev=rows, reward=reward, progress=False, **common)
        for reward in (asks, asks_async)
    ]
    assert runs[0].summary["after"] == runs[1].summary["after"]
    assert runs[0].evaluate(rows, reward=asks)["reward"] == runs[0].summary["after"]["reward"]
    assert os.environ["OPENAI_BASE_URL"] == "https://elsewhere" and "TEZO_MODEL" not in os.environ
    for run in runs:
        run.close()


@pytest.mark.slow
def test_a_run_of_a_program_that_was_killed_after_any_entry_leaves_the_same_files(home, tmp_path):
    made = config(home, steps=2, batch_size=2, eval_every=2, reward_workers=1)
    train(made, tmp_path / "whole")
    count = len(entries((tmp_path / "whole/steps.log").read_bytes())) - 1
    for killed in range(count):
        killed_after(tmp_path / "whole", tmp_path / f"{killed}", killed)
        train(made, tmp_path / f"{killed}", resume=True)
        assert contents(tmp_path / f"{killed}") == contents(tmp_path / "whole"), killed


def test_a_score_that_is_missing_is_missing(home, tmp_path):
    summary = train(config(home, "half"), tmp_path / "run")
    assert summary["before"]["missing_scores"] == 0.5
    lines = read_jsonl(tmp_path / "run/scored.jsonl")
    assert {line["score"] is None for line in lines} == {True, False}


def test_a_program_that_fails_ends_the_run_and_another_is_taken_by_a_word(home, tmp_path):
    done = tezo("train", *flags(home, tmp_path, "fails"))
    refused(done, "score.py:fails", "KeyError", "--accept-scorer")
    stopped(config(home), tmp_path / "run", 2)
    other = config(home, "half")
    with pytest.raises(RequestError, match=r"differs\); put it back, or accept it with --accept-scorer"):
        train(other, tmp_path / "run", resume=True)
    assert train(other, tmp_path / "run", resume=True, accept_scorer=True)["scorers"][0]["answers"] is None


def flags(home, folder, scorer, *more):
    return (
        "--model", home / "llama-chat", "--data", home / "train.jsonl", "--reward", f"{home / 'score.py'}:{scorer}",
        "--serve", "--steps", 1, "--set", "train.max_new_tokens=4", "--output", folder / "run", *more,
    )  # fmt: skip


def test_tezo_eval_calls_the_program_too(home, tmp_path):
    train(config(home), tmp_path / "run")
    common = ("--data", home / "dev.jsonl", "--reward", f"{home / 'score.py'}:program", "--json")
    done = tezo("eval", tmp_path / "run", *common)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert json.loads(done.out)["reward"] == summary["after"]["reward"]
    base = tezo("eval", home / "llama-chat", *common, "--serve", "--set", f"train.max_new_tokens={MOST}")
    assert json.loads(base.out)["reward"] == summary["before"]["reward"]


def test_what_cannot_be_served_is_one_sentence_before_anything_is_written(home, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(tezo("train", *flags(home, tmp_path, "program", "--set", f"train.serve_port={port}")), port, "in use")
    cases = {
        (): ("happy", ["f(row, base_url, model)"]),
        ("--set", "train.serve_port=70000"): ("program", ["70000"]),
        ("--set", "model.workers=2", "--engine", "llama.cpp"): ("program", ["model.workers is 2"]),
    }
    for more, (scorer, said) in cases.items():
        refused(tezo("train", *flags(home, tmp_path, scorer, *more)), *said)
    without = ("--model", home / "llama-chat", "--data", home / "train.jsonl", "--output", tmp_path / "run")
    refused(tezo("train", *without, "--serve"), "train.serve", "train.reward")
    reward = ("--reward", f"{home / 'score.py'}:happy", "--set", "train.serve_port=8000")
    refused(tezo("train", *without, *reward), "train.serve_port is 8000")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused(tezo("train", *flags(home, tmp_path, "program")), "pip install 'tezo[serve]'")
    assert not (tmp_path / "run").exists()


WAITS = """
import time
from pathlib import Path

def waits(row):
    Path(row["mark"]).touch()
    time.sleep(3600)
"""


def test_calls_that_are_under_way_end_with_what_asked_for_them(tmp_path):
    (tmp_path / "score.py").write_text(WAITS)
    rows = [{"mark": str(tmp_path / f"{i}")} for i in range(3)]
    samples = [
        Sample("", "", row, f"row {i}", base_url="http://127.0.0.1:1/v1", model="m") for i, row in enumerate(rows)
    ]
    processes = Processes(f"{tmp_path / 'score.py'}:waits", 2, 600, tmp_path)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(processes.scored, samples, batch=False)
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            time.sleep(0.01)
        processes.close()
        with pytest.raises(CancelledError):
            found.result()
    assert not (tmp_path / "2").exists()


# A server of vLLM


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory):
    home = vllm_home(tmp_path_factory.mktemp("home"))
    for seed, name in enumerate(("train", "dev")):
        rows = [{"prompt": row["prompt"], "number": i} for i, row in enumerate(completion_rows(12, seed))]
        write_rows(home / f"{name}.jsonl", rows)
    (home / "score.py").write_text(PROGRAM)
    with vllm_server(home / "tiny") as standin:
        yield home, standin


def of_vllm(on_vllm, scorer="program"):
    home, standin = on_vllm
    return config(home, scorer, standin.url, "tiny", steps=3, eval_every=3)


def test_members_are_adapters_of_the_vllm_server_which_the_program_asks_itself(on_vllm, tmp_path):
    _, standin = on_vllm
    train(of_vllm(on_vllm, "happy"), tmp_path / "texts")
    before = len(standin.asked)
    train(of_vllm(on_vllm), tmp_path / "program")
    asked = [body for path, body in standin.asked[before:] if path == COMPLETIONS]
    own = [body["model"] for body in asked if isinstance(body["prompt"], str)]
    assert len({*own}) >= 6 and all(name.startswith("tezo-") for name in own)
    assert same(*(result(tmp_path / name) for name in ("texts", "program")))
    assert not standin.adapters


def test_a_run_learns_from_what_a_program_is_answered_by_the_vllm_server(on_vllm, tmp_path):
    """The program asks this process while answers are learnt from, which asks the server; else the server itself."""
    home, standin = on_vllm
    before = len(standin.asked)
    made = replace(learning(home, standin.url, steps=1, batch_size=12), method=MethodConfig())
    summary = train(made, tmp_path / "run")
    assert summary["method"] == "policy-gradient" and summary["idle_steps"] == 0
    bodies = [body for path, body in standin.asked[before:] if path == COMPLETIONS]
    own = [body for body in bodies if isinstance(body["prompt"], str)]
    assert {row["prompt"] for row in read_jsonl(home / "dev.jsonl")} <= {body["prompt"] for body in own}
    assert {body["temperature"] for body in own} == {0}  # as the program asks for, which is sampled to be learnt from
    assert not standin.adapters
    scores = [line["score"] for line in read_jsonl(tmp_path / "run/scored.jsonl")]
    assert len(scores) == 12 * ANSWERS and len({*scores}) > 6
    train(made, tmp_path / "again")  # calls come in another order
    assert [line["score"] for line in read_jsonl(tmp_path / "again/scored.jsonl")] == scores


def test_each_call_is_passed_on_by_itself_and_refused_by_itself(on_vllm, monkeypatch):
    home, standin = on_vllm
    job = prepare(learning(home, standin.url), measuring=False)
    right, told = standin.completions, {}

    def limited(asked):
        return failure(400, "It is too long") if asked["max_tokens"] == 4 else right(asked)

    def asks(row, base_url, model):
        body = {"model": model, "prompt": row["prompt"], "max_tokens": 2 + row["number"], "n": 1 + row["number"] % 2}
        told[model] = post(base_url, body)
        return float(len(told))

    monkeypatch.setattr(standin, "completions", limited)
    reward = replace(job.reward, score=asks, processes=None)
    written = []
    for _ in range(2):
        before = len(standin.asked)
        found = RewardRows(reward, job.model, job.objective, job.train[:4], 0).write(range(4), 3)
        texts = [[own["text"] for own in answer["choices"]] for status, answer in told.values() if status == 200]
        written.append(texts)
        refused_calls = [answer["error"]["message"] for status, answer in told.values() if status == 400]
        assert len(refused_calls) == 3 and all("It is too long" in said for said in refused_calls)
        assert [len(of_call) for of_call in texts] == [1] * 3 + [2] * 3 + [2] * 3  # of rows 0, 1 and 3
        assert found.answer_X.tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 5, 9, 9, 10, 10, 11, 11]
        asked = standin.asked[before:]
        bodies = [body for path, body in asked if path == COMPLETIONS]
        assert all(len(body["prompt"]) == 1 and body["temperature"] == 1.0 for body in bodies)
        assert [body["max_tokens"] for body in bodies] == [2] * 3 + [3] * 6 + [4] * 3 + [5] * 6
        assert len({body["seed"] for body in bodies}) == len(bodies)
        assert sum("load_lora" in path and "unload" not in path for path, _ in asked) == 1
        told.clear()
    assert written[0] == written[1]
    reward.close()
    job.optimizer.close()


def test_answers_of_a_server_that_was_started_anew_are_those_of_one_that_was_not(on_vllm, tmp_path, monkeypatch):
    home, standin = on_vllm
    made = learning(home, standin.url, steps=1, batch_size=12)
    train(made, tmp_path / "whole")
    right, learnt = standin.completions, []

    def forgetting(asked):
        if asked["temperature"] == 1.0:
            learnt.append(asked["model"])
            if len(learnt) == 20:
                standin.adapters.clear()
        return right(asked)

    monkeypatch.setattr(standin, "completions", forgetting)
    train(made, tmp_path / "run")
    assert 12 * ANSWERS < len(learnt) <= 12 * ANSWERS + 8  # those alone are asked again that had no answer yet
    scores = [[line["score"] for line in read_jsonl(tmp_path / name / "scored.jsonl")] for name in ("whole", "run")]
    assert scores[0] == scores[1] and None not in scores[0]


def test_a_port_is_of_the_server_of_this_process_where_programs_ask_it(on_vllm, tmp_path):
    home, standin = on_vllm
    made = of_vllm(on_vllm)
    with pytest.raises(RequestError, match=r"serve_port is .* under es programs ask .* itself; leave it out"):
        train(replace(made, train=replace(made.train, serve_port=free_port())), tmp_path / "run")
    port = free_port()
    train(learning(home, standin.url, "reports", steps=1, serve_port=port), tmp_path / "run")
    asked = {line.rpartition(":")[2] for line in (home / "addresses").read_text().splitlines()}
    assert f"{port}/v1" in asked
    with socket.create_server(("127.0.0.1", port)):  # which an evaluation does not need
        reward = ("--reward", f"{home / 'score.py'}:program", "--serve", "--set", f"model.engine={standin.url}")
        done = tezo("eval", tmp_path / "run", "--data", home / "dev.jsonl", *reward)
        assert done.code == 0, done.err
        with pytest.raises(RequestError, match=rf"serve_port is {port}.* in use.*, or use --method es, whose programs"):
            train(learning(home, standin.url, steps=1, serve_port=port), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_members_that_a_restart_has_taken_are_scored_again(on_vllm, tmp_path, monkeypatch):
    _, standin = on_vllm
    train(of_vllm(on_vllm), tmp_path / "whole")
    right, lost = standin.completions, []

    def forgetting(asked):
        if asked.get("max_tokens") == 8 and isinstance(asked["prompt"], str) and len(lost) < 30:
            lost.append(asked["model"])
            if len(lost) == 30:
                standin.adapters.clear()  # as a server that was started anew
        return right(asked)

    monkeypatch.setattr(standin, "completions", forgetting)
    train(of_vllm(on_vllm), tmp_path / "run")
    assert len(lost) == 30
    assert same(*(result(tmp_path / name) for name in ("whole", "run")))
    scores = [[line["score"] for line in read_jsonl(tmp_path / name / "scored.jsonl")] for name in ("whole", "run")]
    assert scores[0] == scores[1] and None not in scores[0]


def test_a_server_that_ignores_adapters_is_told_from_members_that_are_alike(on_vllm, tmp_path, monkeypatch):
    _, standin = on_vllm
    made = of_vllm(on_vllm)
    stopped(made, tmp_path / "run", 1)
    train_again = partial(train, made, tmp_path / "run", resume=True)
    start = standin.right

    def right(path, asked):
        if path == COMPLETIONS and isinstance(asked["prompt"], str):
            standin.ignores_adapters = True
        return start(path, asked)

    monkeypatch.setattr(standin, "right", right)
    try:
        with pytest.raises(RequestError, match="ignores adapters"):
            train_again()
    finally:
        standin.ignores_adapters = False


def learning(home, engine="torch", scorer="program", **more):
    made = config(home, scorer, engine, "tiny" if "://" in engine else None, **more)
    return replace(made, method=MethodConfig(name="policy-gradient", options={"rank": 4}))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_program_is_answered_is_learnt_from_under_its_own_name(home, engine):
    """Each answer of a row has a name, so that its turns are the row's, and their texts what the program was given."""
    job = prepare(learning(home, engine), measuring=False)
    told = {}

    def noted(row, base_url, model):
        text = text_of(base_url, model, row["prompt"], max_tokens=5, seed=1)
        told[model] = row["prompt"], text
        return float(len(text))

    reward = replace(job.reward, score=noted, processes=None)
    closure = RewardRows(reward, job.model, job.objective, job.train[:4], 0)
    found = closure.write(range(4), 3)
    outputs, prompts = found.rows.outputs(), [row.prompt for row in job.train[:4]]
    assert found.prompt_E.tolist() == [i for i in range(4) for _ in range(3)]
    assert found.answer_X.tolist() == [*range(12)] and len(told) == 12
    texts = []
    for x in range(12):
        tokens = outputs.tokens_TC[outputs.example_T == x, 0].tolist()
        ended = tokens[-1] in job.objective.ends.marks
        text = text_after(job.objective.tokenizer, prompts[x // 3], tokens[: len(tokens) - ended], special=False)
        texts.append((job.train[x // 3].example.prompt, text))
    assert texts == [*told.values()]  # one after another, since they are called in this process
    assert found.score_E.tolist() == [float(len(text)) for _, text in texts]
    assert len(set(texts)) > 8  # sampled, though the program asks for greedy answers, and gives a seed
    told.clear()
    RewardRows(reward, job.model, job.objective, job.train[:4], 0).write(range(4), 3)
    assert [*told.values()] == texts
    reward.close()
    job.optimizer.close()


def test_a_call_that_has_hung_up_is_neither_answered_nor_learnt_from(home, monkeypatch):
    """A client that has waited too long asks again, and sees one answer."""
    job = prepare(learning(home), measuring=False)
    monkeypatch.setattr(own_server, "SECONDS_TO_GATHER", 0.5)
    queued, looked_at, put = threading.Semaphore(0), [], OwnServer._called

    def called(server, data, *, chat):
        call = put(server, data, chat=chat)
        queued.release()
        return call

    def tasks(desk, request, own=own_server._Desk._tasks):
        looked_at.append(request.model)
        return own(desk, request)

    monkeypatch.setattr(OwnServer, "_called", called)
    monkeypatch.setattr(own_server._Desk, "_tasks", tasks)
    told = []

    def twice(row, base_url, model):
        body = json.dumps({"model": model, "prompt": row["prompt"], "max_tokens": 5}).encode()
        where = urlsplit(base_url)
        head = [f"POST {where.path}/completions HTTP/1.1", f"Host: {where.netloc}", f"Content-Length: {len(body)}"]
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            assert queued.acquire(timeout=20)
        told.append(text_of(base_url, model, row["prompt"], max_tokens=5))
        assert queued.acquire(timeout=20)  # that one too, so that the next name waits for its own
        return 1.0

    reward = replace(job.reward, score=twice, processes=None)
    found = RewardRows(reward, job.model, job.objective, job.train[:1], 0).write(range(1), 2)
    assert len(told) == len(looked_at) == len({*looked_at}) == 2
    assert found.answer_X.tolist() == [0, 1]
    reward.close()
    job.optimizer.close()


@pytest.mark.parametrize("engine", TORCH_FAST)
def test_a_run_learns_from_a_program_and_goes_on_to_the_bit(home, tmp_path, engine):
    made = learning(home, engine, steps=2, batch_size=12)
    summary = train(made, tmp_path / "run")
    lines = read_jsonl(tmp_path / "run/scored.jsonl")
    assert len(lines) == 2 * 12 * ANSWERS and len({line["score"] for line in lines}) > 12
    assert summary["idle_steps"] == 0
    killed_after(tmp_path / "run", tmp_path / "killed", 4)
    train(made, tmp_path / "killed", resume=True)
    assert same(result(tmp_path / "killed"), result(tmp_path / "run"))


def test_a_program_with_calls_that_fail_or_say_nothing_teaches_what_it_can(home, tmp_path):
    made = learning(home, scorer="half", steps=1, batch_size=12)
    train(made, tmp_path / "run")
    lines = read_jsonl(tmp_path / "run/scored.jsonl")
    assert sum(line["score"] is None for line in lines) == len(lines) // 2
