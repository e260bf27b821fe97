"""Forward passes in vLLM: prompts that tell what is asked for, and a real server where there is one.

The server is started by the python that the variable TEZO_VLLM names, of an environment with vLLM.
"""

import itertools
import json
import os
import random
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
import transformers
from folders import completion_rows, read_jsonl, refused, tezo, train, write_rows
from real_vllm import ALL, ATTENTION, PYTHON, real_server, with_adapters
from safetensors.torch import load_file
from vllm_server import ASK, a_change, another_of_its_base, check_ends_alike, some_asked, vllm_home, vllm_server

from tezo.engines import load
from tezo.engines.client import Client
from tezo.engines.prompts import Answer, Prompt, prompts_of, told_of
from tezo.engines.server import OWN, Server, is_left, uniform
from tezo.forward.engine import NOTHING, EngineLostError
from tezo.models.kinds import ModelConfig
from tezo.models.lora import Adapter, attach_adapter, save_adapter
from tezo.system.errors import RequestError
from tezo.tasks.rewards import RewardRows
from tezo.training.job import prepare
from tezo.training.listeners import Listener
from tezo.training.loop import train as run_config
from tezo.training.resume import check_unchanged
from tezo.training.settings import parse_config, to_tree, untrusted_tree

real = pytest.mark.skipif(PYTHON is None, reason="no vLLM here: TEZO_VLLM names the python of an environment with it")
PORT = 8411


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return vllm_home(tmp_path_factory.mktemp("home"))


def table_of(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


def answered(model, prompt: Prompt, likely: int) -> Answer:
    """What vLLM says of a prompt, by its documentation: the tokens that are asked for, and the likeliest, ranked."""
    table = table_of(model, prompt.tokens)

    def entry(row, tokens, count):
        best = row.topk(count).indices.tolist()
        return {t: (float(row[t]), 1 + int((row > row[t]).sum())) for t in {*best, *tokens}}

    if prompt.wanted:
        return Answer({len(prompt.tokens): entry(table[-1], prompt.wanted, 1)})
    return Answer({i: entry(table[i - 1], [prompt.tokens[i]], likely) for i in range(1, len(prompt.tokens))})


@pytest.mark.parametrize("likely", [0, 1, 4])
def test_prompts_tell_what_is_asked_for(home, likely):
    model, draw = transformers.AutoModelForCausalLM.from_pretrained(home / "tiny"), random.Random(likely)
    asked = some_asked(draw, several=likely < 2, likely=likely)
    prompts = prompts_of(asked)
    told = told_of(asked, prompts, [answered(model, prompt, likely) for prompt in prompts])
    check(asked, told, [table_of(model, text) for text in asked.texts])


def check(asked, told, tables) -> None:
    for place, (text, position) in enumerate(zip(asked.text_P.tolist(), asked.position_P.tolist(), strict=True)):
        row = tables[text][position]
        for token, own in zip(asked.tokens_PC[place].tolist(), told.log_probs_PC[place].tolist(), strict=True):
            assert abs(own - (0.0 if token == NOTHING else float(row[token]))) < 1e-3
        assert torch.allclose(row.topk(asked.likely).values, told.likely_log_probs_PL[place], atol=1e-3)
        assert torch.allclose(row[told.likely_PL[place]], told.likely_log_probs_PL[place], atol=1e-3)


def test_layers_of_other_ranks_are_one_adapter(home):
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "tiny")
    change = a_change(model, ranks=(3, 5))
    adapter = uniform(change)
    assert adapter.rank == 5
    for name, (a_RI, b_OR) in change.items():
        a, b = adapter.pairs[name]
        assert a.shape[0] == b.shape[1] == 5 and torch.allclose(b @ a, b_OR @ a_RI)


def server(home, port=PORT, modules=ALL):
    log = home / f"server-{port}.log"
    return real_server(home / "tiny", port, ["--dtype", "float32", *with_adapters(modules)], log)


@pytest.fixture(scope="module")
def address(home):
    with server(home):
        yield f"http://127.0.0.1:{PORT}"


def config(home, rows="labels", engine="torch", name="tezo-cadam"):
    return parse_config(
        {
            "model": {"name": str(home / "tiny"), "engine": engine},
            "data": {part: str(home / f"{rows}.jsonl") for part in ("train", "dev", "test")},
            # log-probabilities differ by 1e-5, which the differences of a smaller rho would enlarge
            "method": {"name": name, "rank": 4, "num_directions": 20, "rho": 0.03}
            | ({} if name == "gauss-newton" else {"lr": 0.05}),
            "train": {"steps": 3, "batch_size": 12, "eval_every": 2, "keep_best": False},
        }
    )


@real
@pytest.mark.slow
def test_a_server_tells_what_torch_computes_under_no_one_and_several_changes(home, address):
    loaded, model = (
        load(ModelConfig(name=str(home / "tiny"), engine=address)),
        load(ModelConfig(name=str(home / "tiny"))).model,
    )
    changes = [{}, a_change(model), a_change(model, seed=1), {}, a_change(model, seed=2, ranks=(2, 9))]
    for several, likely in ((True, 1), (False, 5)):
        asked = some_asked(random.Random(0), several=several, likely=likely)
        for _ in range(2):  # what was cached under earlier adapters is of no later one
            for change, told in zip(changes, loaded.engine.log_probs(changes, asked), strict=True):
                handles = attach_adapter(model, Adapter(uniform(change).rank, change)) if change else []
                check(asked, told, [table_of(model, text) for text in asked.texts])
                for handle in handles:
                    handle.remove()
    names = [own["id"] for own in requests.get(f"{address}/v1/models", timeout=5).json()["data"]]
    assert names == ["tiny"]


def log_probs(answers) -> list[float]:
    """All log-probabilities in answers."""
    return [
        table[token][0] for answer in answers for _, table in sorted(answer.next.items()) for token in sorted(table)
    ]


def cached_tokens(address) -> float:
    """Tokens of prompts that the server has taken from its cache instead of computing them."""
    lines = requests.get(f"{address}/metrics", timeout=5).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


@real
@pytest.mark.slow
@pytest.mark.parametrize("wanted", [(), (7, 9)])
def test_rows_in_any_order_have_the_same_log_probabilities_where_beginnings_are_cached(home, address, tmp_path, wanted):
    """As vllm#42019 says, they had others."""
    model, draw, client = (
        transformers.AutoModelForCausalLM.from_pretrained(home / "tiny"),
        random.Random(0),
        Client(address),
    )
    vocabulary, beginning = model.config.vocab_size, draw.choices(range(4, 250), k=140)  # a block has 128 tokens
    texts = [[*beginning, *draw.choices(range(4, 250), k=count)] for count in (1, 60, 7, 33, 18, 47)]
    prompts = [Prompt(text, {i: i for i in range(len(text) - 1)}, wanted) for text in texts]
    save_adapter(uniform(a_change(model)), tmp_path, model=model, base="")
    before = cached_tokens(address)
    told = []
    for order in (range(6), range(5, -1, -1), (3, 0, 5, 2, 4, 1)):
        name = f"order-{'-'.join(map(str, order))}"
        client.load(name, tmp_path)
        for _ in range(2):  # none is cached under this name, and then all are
            answers = client.answers(name, [prompts[i] for i in order], 1, vocabulary)
            told.append(torch.tensor(log_probs([answers[order.index(i)] for i in range(6)])))
        client.unload(name)
    for other in told[1:]:
        torch.testing.assert_close(other, told[0], atol=1e-5, rtol=0)
    assert (cached_tokens(address) > before) == bool(wanted), "vLLM computes all of a prompt that it has to tell"


@real
@pytest.mark.slow
def test_a_server_is_taken_for_the_model_that_it_has_alone(home, address, tmp_path):
    loaded = load(ModelConfig(name=str(home / "tiny"), engine=address))
    tuned = [name for name, _ in loaded.model.named_modules() if name.rpartition(".")[2] in ALL]
    assert loaded.engine.reserve(12, tuned) == []
    another = load(ModelConfig(name=str(another_of_its_base(home / "tiny", tmp_path / "tuned")), engine=address))
    with pytest.raises(RequestError, match="has other weights than the folder"):
        another.engine.reserve(12, tuned)


@real
@pytest.mark.slow
def test_a_server_that_leaves_layers_out_of_adapters_is_named_with_them(home):
    with server(home, port=PORT + 2, modules=ATTENTION):
        loaded = load(ModelConfig(name=str(home / "tiny"), engine=f"http://127.0.0.1:{PORT + 2}"))
        names = [name for name, _ in loaded.model.named_modules()]
        assert loaded.engine.reserve(12, [name for name in names if name.endswith(ATTENTION)]) == []
        with pytest.raises(RequestError, match=r"leaves gate_proj, up_proj, down_proj out.*--lora-target-modules"):
            loaded.engine.reserve(12, [name for name in names if name.endswith(ALL)])


@real
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "name"), [("labels", "tezo-cadam"), ("texts", "gauss-newton")])
def test_a_run_on_a_server_ends_where_one_in_torch_does(home, address, tmp_path, rows, name):
    runs = [run_config(config(home, rows, engine, name), tmp_path / engine[:5]) for engine in (address, "torch")]
    check_ends_alike(tmp_path / "http:", tmp_path / "torch")
    assert abs(runs[0]["after"]["loss"] - runs[1]["after"]["loss"]) < 1e-3
    assert runs[0]["num_forward_passes"] == runs[1]["num_forward_passes"]


SCORER = """
def words(prompts, completions, **columns):
    return [len(text.split()) + 0.1 * len(text) for text in completions]
"""


def scored_on(engine, home, tmp_path, run, **more):
    (tmp_path / "score.py").write_text(SCORER)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(6)])
    train = {"reward": f"{tmp_path / 'score.py'}:words", "steps": 2, "batch_size": 3, "max_new_tokens": 5} | more
    method = {"name": "es", "rank": 4, "num_directions": 6, "rho": 0.05}
    request = {"model": {"name": str(home / "tiny"), "engine": engine}, "data": {"train": str(prompts)}}
    run_config(parse_config(request | {"method": method, "train": train}), tmp_path / run)
    return [json.loads(line) for line in (tmp_path / run / "scored.jsonl").read_text().splitlines()]


@real
@pytest.mark.slow
def test_a_population_on_a_server_writes_what_torch_writes_and_samples_alike_for_a_seed(home, address, tmp_path):
    greedy = [scored_on(engine, home, tmp_path, f"{i}") for i, engine in enumerate((address, "torch"))]
    assert len(greedy[0]) == 2 * 6 * 3 and greedy[0] == greedy[1]
    sampled = [scored_on(address, home, tmp_path, f"sampled-{i}", temperature=1.0) for i in range(2)]
    assert sampled[0] == sampled[1] != greedy[0]


def check_learnt(home, tmp_path, engine):
    """Answers to a prompt are drawn apart, again the same by the same step, and a run learns from them by default."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(12)])
    (tmp_path / "score.py").write_text(SCORER)
    train = {"reward": f"{tmp_path / 'score.py'}:words", "steps": 1, "batch_size": 8, "max_new_tokens": 5}
    request = {"model": {"name": str(home / "tiny"), "engine": engine}, "data": {"train": str(prompts), "num_dev": 4}}
    made = parse_config(request | {"train": train})
    job, texts = prepare(made, measuring=False), []
    for _ in range(2):
        closure = RewardRows(job.reward, job.model, job.objective, job.train[:4], 0)
        closure.write(range(4), 4)
        texts.append([own for own, _ in closure.written])
    assert texts[0] == texts[1]
    assert all(len({of_turn[i] for of_turn in texts[0]}) > 1 for i in range(4)), texts[0]
    job.optimizer.close()
    summary = run_config(made, tmp_path / "run")
    assert summary["method"] == "policy-gradient" and summary["idle_steps"] == 0


def test_answers_to_a_prompt_are_drawn_apart_where_a_seed_is_of_a_request(home, tmp_path):
    with vllm_server(home / "tiny") as standin:
        check_learnt(home, tmp_path, standin.url)


@real
@pytest.mark.slow
def test_a_policy_gradient_learns_from_what_a_real_server_writes(home, address, tmp_path):
    check_learnt(home, tmp_path, address)


ASKING = (
    ASK
    + """
def words(row):
    return float(len(ask(row).split()))
"""
)


@real
@pytest.mark.slow
def test_a_policy_gradient_learns_from_a_program_whose_answers_a_real_server_writes(home, address, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(12)])
    (tmp_path / "score.py").write_text(ASKING)
    train = {"reward": f"{tmp_path / 'score.py'}:words", "serve": True, "reward_workers": 4, "steps": 1,
             "batch_size": 8, "max_new_tokens": 5}  # fmt: skip
    request = {"model": {"name": str(home / "tiny"), "engine": address}, "data": {"train": str(prompts), "num_dev": 4}}
    summary = run_config(parse_config(request | {"train": train}), tmp_path / "run")
    assert summary["method"] == "policy-gradient" and summary["idle_steps"] == 0
    scores = {line["score"] for line in read_jsonl(tmp_path / "run/scored.jsonl")}
    assert len(scores) > 1 and None not in scores


class Restart(Listener):
    """Ends a server after a step; another is started by the test."""

    def __init__(self, process) -> None:
        self.process = process

    def stepped(self, progress):
        if progress.record.step == 0:
            os.killpg(self.process.pid, 9)


@real
@pytest.mark.slow
def test_a_server_that_is_ended_and_started_again_loses_nothing(home, tmp_path):
    import threading

    run_config(config(home), tmp_path / "torch")
    with server(home, port=PORT + 1) as process:
        restarted = threading.Event()

        def again():
            process.wait()
            with server(home, port=PORT + 1):
                restarted.set()
                done.wait()

        done = threading.Event()
        thread = threading.Thread(target=again)
        thread.start()
        try:
            run_config(config(home, engine=f"http://127.0.0.1:{PORT + 1}"), tmp_path / "run", [Restart(process)])
        finally:
            done.set()
            thread.join()
    assert restarted.is_set()
    states = [load_file(tmp_path / own / "adapter/adapter_model.safetensors") for own in ("run", "torch")]
    assert all(torch.allclose(states[0][n], states[1][n], atol=1e-3) for n in states[0])


@real
@pytest.mark.slow
def test_what_a_server_cannot_do_is_one_sentence(home, address, tmp_path):
    rows = home / "labels.jsonl"
    refused(train(home / "tiny", rows, tmp_path / "run", "--engine", "http://127.0.0.1:1"), "does not answer")
    more = {"method__rank": 32, "method__name": "tezo-cadam"}
    refused(train(home / "tiny", rows, tmp_path / "run", "--engine", address, **more), "rank 32")
    flags = ("--engine", address, "--steps", "3", "--output", tmp_path / "run")  # few rows have one step
    done = tezo("train", "--model", home / "tiny", "--data", rows, *flags)
    refused(done, "--max-lora-rank", "method.frozen_rank")
    assert not (tmp_path / "run").exists(), "said before the first of the rounds that would get there"
    with pytest.raises(RequestError, match="password"):
        load(ModelConfig(name=str(home / "tiny"), engine="http://me:secret@127.0.0.1:1"))


SCRIPT = """
import json, sys
from tezo.training.settings import parse_config
from tezo.training.loop import train
from pathlib import Path
if __name__ == "__main__":
    made = json.loads(Path(sys.argv[1]).read_text())
    train(parse_config(made), Path(sys.argv[2]))
"""


def test_what_a_killed_process_left_is_removed(home, tmp_path, monkeypatch):
    monkeypatch.setenv("TEZO_ADAPTERS", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"{OWN}{number}-abc" for number in (gone.pid, os.getpid())] + [f"tezo-elsewhere-{gone.pid}-abc", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "tiny")
    with vllm_server(home / "tiny") as standin:
        engine = Unanswered(
            Client(standin.url), transformers.AutoModelForCausalLM.from_pretrained(home / "tiny"), tokenizer
        )
        assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
        assert [is_left(name) for name in names] == [True, False, False, False]
        engine.fails = True
        with pytest.raises(ZeroDivisionError):
            engine.log_probs([{}], some_asked(random.Random(0), several=True, likely=1))
    assert len(engine.folders) == 1 and len(list(tmp_path.iterdir())) == 3


class Unanswered(Server):
    """Fails when it is asked, and remembers the folders that it was given."""

    fails = False

    def _answers(self, prompts, folders, likely):
        if not self.fails:
            return super()._answers(prompts, folders, likely)
        self.folders = [path for path in folders if (path / "adapter_config.json").is_file()]
        raise ZeroDivisionError


def test_a_run_folder_does_not_say_which_server_is_asked_and_a_server_may_move(home):
    tree = to_tree(config(home, engine="http://127.0.0.1:1"))
    assert untrusted_tree(tree)["model"]["engine"] == "http"
    with pytest.raises(RequestError, match="give it again"):
        load(ModelConfig(name=str(home / "tiny"), engine="http"))
    check_unchanged(parse_config(tree), config(home, engine="https://127.0.0.1:2"))
    with pytest.raises(RequestError, match=r"model\.engine"):
        check_unchanged(parse_config(tree), config(home))


def test_vllm_without_a_server_is_refused_with_the_way_out(home):
    with pytest.raises(RequestError, match=r"runs on a server alone: .*--engine http://HOST:8000"):
        load(ModelConfig(name=str(home / "tiny"), engine="vllm"))


def test_a_server_that_does_not_answer_is_said_once_and_asked_again(monkeypatch, caplog):
    answers = iter([EngineLostError("The server does not answer."), EngineLostError("Nor now."), "here"])

    def ask():
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("tezo.engines.server.FIRST_WAIT", 0.01)
    server, said = object.__new__(Server), "The server does not answer. It is asked again for 300 s."
    assert server._again(ask) == "here"
    assert caplog.messages == [said]
    gone, calls = threading.Barrier(4), itertools.count()

    def ask_beside_others():
        if next(calls) < 4:
            gone.wait()
            raise EngineLostError("The server does not answer.")
        return "here"

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: server._again(ask_beside_others), range(4))) == ["here"] * 4
    assert caplog.messages == [said] * 2, "once for each time that it was lost"


@pytest.mark.parametrize("said", ["<html>hello</html>", '{"data": []}', '{"models": 1}', "[]"])
def test_what_is_no_server_of_vllm_is_one_sentence(said):
    class Says(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RequestError, match="does not answer /v1/models as vLLM does"):
            Client(f"http://127.0.0.1:{server.server_port}").models()
        server.shutdown()
