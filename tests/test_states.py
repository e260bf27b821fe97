"""Looks at layers through the states that a server of vLLM shows: inputs are read, vectors are added, by adapters."""

import logging
import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from folders import refused, tezo
from real_vllm import PYTHON, real_server, states_behind
from safetensors.torch import load_file
from vllm_server import NAME, a_change, some_asked, vllm_home, vllm_server

from tezo.engines import load
from tezo.engines.looks import MOST_MISSED
from tezo.engines.prompts import Prompt
from tezo.engines.states import LEAST_IN_SPAN, READ, placed, tried_layer
from tezo.engines.workers import Workers
from tezo.forward.engine import HEAD, Watch
from tezo.models.kinds import ModelConfig
from tezo.models.lora import Adapter, attach_adapter
from tezo.system.errors import RequestError

DOWN = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
PORT = 8441
OTHERS = ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.o_proj"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = vllm_home(tmp_path_factory.mktemp("home"))
    (root / "card").mkdir()
    for path in (root / NAME).iterdir():
        if path.suffix != ".safetensors":
            (root / "card" / path.name).write_bytes(path.read_bytes())
    return root


@pytest.fixture
def standin(home, tmp_path):
    with vllm_server(home / NAME) as server:
        server.states = tmp_path / "states"
        server.states.mkdir()
        yield server


@pytest.fixture
def engine(home, standin):
    return load(ModelConfig(name=str(home / "card"), engine=standin.url)).engine


@pytest.fixture(scope="module")
def model(home):
    return transformers.AutoModelForCausalLM.from_pretrained(home / NAME).eval()


@pytest.fixture(scope="module")
def address(home):
    arguments = ["--dtype", "float32", "--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"]
    arguments += ["--lora-target-modules", "down_proj", *states_behind((0, 1), home / "shown")]
    benchmarks = str(Path(__file__).resolve().parents[1] / "benchmarks")
    with real_server(home / NAME, PORT, arguments, home / "server.log", PYTHONPATH=benchmarks):
        yield f"http://127.0.0.1:{PORT}"


@contextmanager
def changed(model, change):
    handles = attach_adapter(model, Adapter(next(iter(change.values()))[0].shape[0], change)) if change else []
    yield
    for handle in handles:
        handle.remove()


def in_torch(model, change, text, added=None):
    """Returns (inputs of the layers, log-probabilities); `added`: layer -> vectors for its outputs."""
    found, hooks = {}, []

    def hook(name):
        def seen(module, args, output):
            found[name] = args[0][0]
            return output + added[name] if added and name in added else None

        return seen

    with changed(model, change), torch.no_grad():
        hooks = [model.get_submodule(name).register_forward_hook(hook(name)) for name in DOWN]
        logits = model(input_ids=torch.tensor([list(text)])).logits[0]
        for each in hooks:
            each.remove()
    return found, logits.log_softmax(-1)


@pytest.mark.parametrize("rank", [0, 3])
def test_inputs_are_those_that_torch_sees_on_the_rows_that_are_read(engine, model, rank):
    check_inputs(engine, model, a_change(model, ranks=(rank,)) if rank else {})


def check_inputs(engine, model, change) -> None:
    asked = some_asked(random.Random(0), several=True, likely=1)
    places = torch.arange(len(asked.text_P))[1:]
    watched = engine.watch(change, asked, Watch([*OTHERS, *DOWN], means=True, places=places))
    told, found = watched.told, watched.inputs
    assert [*found] == DOWN, "layers that do not end a block are left out"
    assert torch.equal(told.log_probs_PC, engine.log_probs([change], asked)[0].log_probs_PC)
    for name, inputs in found.items():
        a_KI = engine._looks.layers[name].a_KI
        assert len(a_KI) == min(READ, a_KI.shape[1])
        for row, place in enumerate(places.tolist()):
            text, position = asked.texts[asked.text_P[place]], int(asked.position_P[place])
            x_TI = in_torch(model, change, text)[0][name]
            for seen, own in ((inputs.at_PI, x_TI[position]), (inputs.mean_PI, x_TI[: position + 1].mean(0))):
                torch.testing.assert_close(seen[row], a_KI.T @ (a_KI @ own), rtol=0.02, atol=0.02 * float(own.norm()))


def test_an_input_is_read_in_parts_where_adapters_have_no_room(home, standin, engine, model):
    looks, asked = engine._looks, some_asked(random.Random(1), several=True, likely=1)
    whole = engine.watch({}, asked, Watch(DOWN)).inputs
    looks._known.clear()
    looks._room = 32
    parts = engine.watch({}, asked, Watch(DOWN))
    for name in DOWN:
        torch.testing.assert_close(parts.inputs[name].at_PI, whole[name].at_PI, rtol=0.02, atol=0.02)
    assert parts.times == 2 + 2 * len(DOWN), "the pass, the states, and two parts of each layer"
    assert [part.stop - part.start for part in looks._parts(looks.layers[DOWN[0]])] == [32, 32]
    ranks = []
    standin.alters = lambda adapter: ranks.append(adapter.rank) or adapter
    check_inputs(engine, model, a_change(model, ranks=(5,)))
    assert max(ranks) == 32, "beside the change there is room for 27"


@pytest.mark.parametrize("name", DOWN)
def test_a_vector_is_added_to_the_outputs_of_its_tokens_alone(engine, model, name):
    check_added(engine, model, name)


def check_added(engine, model, name) -> None:
    asked = some_asked(random.Random(2), several=True, likely=1)
    n_M = torch.randn(64, generator=torch.Generator().manual_seed(0))
    added = []
    for number, text in enumerate(asked.texts):
        vectors = torch.zeros(len(text), 64)
        vectors[len(text) - 1 if number % 2 else 1] = n_M
        added.append(vectors if number else torch.zeros(1, 64))
    told = engine.watch({}, asked, Watch(added={name: added})).told
    plain = engine.log_probs([{}], asked)[0]
    moved = off = 0.0
    for place, (number, position) in enumerate(zip(asked.text_P.tolist(), asked.position_P.tolist(), strict=True)):
        row = in_torch(model, {}, asked.texts[number], {name: added[number]})[1][position]
        for token, own, before in zip(*(x[place].tolist() for x in (asked.tokens_PC, told.log_probs_PC,
                                                                     plain.log_probs_PC)), strict=True):  # fmt: skip
            if token >= 0:
                moved += abs(before - float(row[token]))
                off += abs(own - float(row[token]))
    assert moved > 1.0 and off < 0.1 * moved


@pytest.mark.parametrize(("numbers", "said"), [(3, 1), (READ, 0)])
def test_texts_whose_tokens_are_not_told_apart_are_said_once(home, standin, monkeypatch, caplog, numbers, said):
    monkeypatch.setattr("tezo.engines.states.READ", numbers)
    engine = load(ModelConfig(name=str(home / "card"), engine=standin.url)).engine
    asked = some_asked(random.Random(2), several=True, likely=1)
    added = [torch.zeros(len(text), 64) for text in asked.texts]
    for vectors in added:
        vectors[len(vectors) // 2] = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        engine.watch({}, asked, Watch(added={DOWN[0]: added}))
    assert sum("reach other tokens" in record.message for record in caplog.records) == said


def test_how_far_a_vector_misses_its_tokens_is_known_without_the_whole_inputs():
    layer = tried_layer("down_proj", torch.nn.Linear(96, 80, bias=False), 0, 1.0)
    for count in (8, 300):
        x_TI = torch.randn(count, 96, generator=torch.Generator().manual_seed(count))
        wanted_T = torch.zeros(count)
        wanted_T[2:4] = 2.0
        v_I, missed = layer.for_tokens(x_TI @ layer.a_KI.T, wanted_T)
        reached_T = x_TI @ v_I
        assert float(reached_T[2:4].mean()) == pytest.approx(2.0, abs=2e-3)
        assert missed == pytest.approx(float((reached_T - wanted_T).square().sum()) / 8, rel=2e-2, abs=1e-3)
    assert missed > MOST_MISSED
    x_TK = x_TI @ layer.a_KI.T
    x_TK[2:4] = 0.0  # of states that overflow
    v_I, missed = layer.for_tokens(x_TK, wanted_T)
    assert not v_I.any() and missed == float("inf")


def test_files_of_states_are_removed_whoever_asked(standin, engine, monkeypatch):
    monkeypatch.setattr("tezo.engines.states.MOST_LEFT", 10**6)
    asked = some_asked(random.Random(0), several=True, likely=1)
    engine.log_probs([{}, {}], asked)
    engine.watch({}, asked, Watch(DOWN))
    assert any(standin.states.iterdir())
    engine._client._leftovers.remove()
    assert not any(standin.states.iterdir())


def test_files_that_programs_leave_are_said_once(standin, engine, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert engine.serve([{}], lambda named: named.base_url) == [f"{standin.url}/v1"]
    assert caplog.text.count(f"writes a file into {standin.states}") == 1


def test_a_layer_is_seen_only_where_a_state_stands_behind_it(home, standin):
    standin.blocks = (0,)
    alone = load(ModelConfig(name=str(home / "card"), engine=standin.url)).engine
    assert alone.watches_some and alone.watches(DOWN[0]) and not any(map(alone.watches, (DOWN[1], *OTHERS, HEAD)))


def test_a_change_across_the_span_is_of_an_earlier_layer():
    layer, draw = torch.nn.Linear(64, 64), torch.Generator().manual_seed(0)
    tried = tried_layer("down", layer, 0, 1.0)
    before = torch.randn(9, 2, 64, generator=draw)
    along = torch.randn(9, 8, generator=draw) @ tried.b_DK[:, :8].T
    across = torch.randn(9, 64, generator=draw)
    for share, is_seen in ((0.0, True), (0.1, True), (0.5, False)):
        after = before.clone()
        after[:, 1] += along + share * across * float(along.norm() / across.norm())
        assert (placed(tried, slice(8), before, after) is not None) == is_seen, LEAST_IN_SPAN


def test_a_server_that_shows_no_states_is_no_other_than_before(home):
    with vllm_server(home / NAME) as server:
        engine = load(ModelConfig(name=str(home / NAME), engine=server.url)).engine
        assert not engine.watches_some and not engine.shows_states
        with pytest.raises(RequestError, match="cannot be read from a vLLM server"):
            engine.watch({}, some_asked(random.Random(0), several=True, likely=1), Watch(DOWN))


def test_states_in_a_folder_that_is_not_seen_here_are_said(home, standin, caplog):
    standin.named = lambda path: path.parent / "elsewhere" / path.name
    with caplog.at_level(logging.WARNING):
        engine = load(ModelConfig(name=str(home / NAME), engine=standin.url)).engine
        assert not engine.watches_some
    assert "are not seen here" in caplog.text


def test_states_that_never_come_are_said_and_the_run_goes_on_without(home, standin, caplog, monkeypatch):
    """The folder has the name of one here, and is on another machine."""
    monkeypatch.setattr("tezo.engines.server.SECONDS_OF_THE_FIRST", 0.1)
    standin.named = lambda path: path.rename(path.with_suffix(".gone")) and path
    with caplog.at_level(logging.WARNING):
        engine = load(ModelConfig(name=str(home / NAME), engine=standin.url)).engine
        assert not engine.watches(HEAD) and not engine.watches_some
    assert "are not seen here" in caplog.text


def test_states_that_reveal_no_layer_are_said(home, standin, caplog, monkeypatch):
    monkeypatch.setattr("tezo.engines.states.LEAST_IN_SPAN", 2.0)
    with caplog.at_level(logging.WARNING):
        assert not load(ModelConfig(name=str(home / NAME), engine=standin.url)).engine.watches_some
    assert "stands behind the last layer of a block alone" in caplog.text


def test_layers_that_are_not_shown_are_refused_before_the_run(home, standin, tmp_path):
    found = tezo(
        "train", "--model", home / "card", "--engine", standin.url, "--data", home / "labels.jsonl", "--test",
        home / "labels.jsonl", "--output", tmp_path / "run", "--set", "method.targets=[o_proj]",
    )  # fmt: skip
    refused(found, "method.targets", "such as down_proj")
    assert not (tmp_path / "run").exists()


def test_a_request_has_few_prompts_where_each_leaves_a_file(engine, standin):
    prompts = [Prompt([4] * 200, {0: 0}) for _ in range(100)]
    assert [len(part) for part in engine._parts(range(100), prompts)] == [40, 40, 20]
    standin.states = None
    plain = load(ModelConfig(name=engine._model.name_or_path, engine=standin.url)).engine
    assert [len(part) for part in plain._parts(range(100), prompts)] == [100]


@pytest.mark.parametrize("name", ["notes.txt", "cmpl-of-another.safetensors"])
def test_a_file_that_is_not_of_the_answer_is_neither_read_nor_removed(home, standin, tmp_path, name):
    (tmp_path / name).write_text("mine")
    standin.named = lambda _: tmp_path / name
    with pytest.raises(RequestError, match="not an absolute path of a file for"):
        load(ModelConfig(name=str(home / NAME), engine=standin.url))
    assert (tmp_path / name).read_text() == "mine"


def test_states_of_another_prompt_are_asked_for_again_and_refused(home, standin):
    write, times = standin.write_states, []

    def of_another(name, prompt):
        times.append(prompt)
        return write(name, [*prompt[:-1], prompt[-1] - 1])

    engine = load(ModelConfig(name=str(home / "card"), engine=standin.url)).engine
    standin.write_states = of_another
    with pytest.raises(RequestError, match=r"states of another prompt in cmpl-.*; give the address"):
        assert engine.watches_some
    assert len(times) == 2


@pytest.mark.parametrize("blocks", [(1, 1), (0, 0)])
def test_states_of_other_blocks_than_at_the_start_are_refused(home, standin, monkeypatch, blocks):
    """A server that was started anew shows as many states: of a later block, or of an earlier one."""
    monkeypatch.setattr("tezo.engines.states.READ", 4)
    engine = load(ModelConfig(name=str(home / "card"), engine=standin.url)).engine
    asked = some_asked(random.Random(0), several=True, likely=1)
    assert engine.watch({}, asked, Watch(DOWN)).inputs.keys() == {*DOWN}
    standin.blocks = blocks
    other = some_asked(random.Random(1), several=True, likely=1)
    with pytest.raises(RequestError, match=r"the state that stood behind .*start it as it was"):
        engine.watch({}, other, Watch(DOWN))


def test_looks_are_of_the_server_that_shows_states_and_passes_of_the_others(home, standin):
    with vllm_server(home / NAME) as plain:
        engine = load(ModelConfig(name=str(home / "card"), engine=f"{standin.url},{plain.url}")).engine
        assert isinstance(engine, Workers) and engine.watches_some
        asked = some_asked(random.Random(0), several=True, likely=1)
        before = len(standin.asked), len(plain.asked)
        engine.log_probs([{}, {}], asked)
        assert len(standin.asked) == before[0] and len(plain.asked) > before[1]
        assert [*engine.watch({}, asked, Watch(DOWN)).inputs] == DOWN


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--method", "probe")], ids=str)
def test_the_default_and_a_probe_look_without_a_weight(home, standin, tmp_path, more):
    run = tmp_path / "run"
    found = tezo(
        "train", "--model", str(home / "card"), "--engine", standin.url, "--data", str(home / "labels.jsonl"),
        "--test", str(home / "labels.jsonl"), "--output", str(run), *(more or ("--steps", "2")),
    )  # fmt: skip
    assert found.code == 0, found.err
    assert f"{more[-1] if more else 'gauss-newton'} on" in found.out + found.err
    tensors = load_file(run / "adapter/adapter_model.safetensors")
    changed = {n for n, b_OR in tensors.items() if ".lora_B." in n and (b_OR @ tensors[n.replace("_B", "_A")]).any()}
    assert changed and all(any(down in name for down in DOWN) for name in changed)


def test_where_nothing_is_seen_and_no_weight_is_there_directions_are_random(home, tmp_path):
    with vllm_server(home / NAME) as server:
        found = tezo(
            "train", "--model", str(home / "card"), "--engine", server.url, "--data", str(home / "labels.jsonl"),
            "--test", str(home / "labels.jsonl"), "--output", str(tmp_path / "run"), "--steps", "1",
        )  # fmt: skip
        assert found.code == 0, found.err
        assert "the folder has none" in found.out + found.err
        named = tezo(
            "train", "--model", home / "card", "--engine", server.url, "--data", home / "labels.jsonl",
            "--output", tmp_path / "other", "--method", "gauss-newton",
        )  # fmt: skip
        refused(named, "the folder has none")


@pytest.mark.skipif(PYTHON is None, reason="no vLLM here: TEZO_VLLM names the python of an environment with it")
@pytest.mark.slow
def test_a_real_server_shows_inputs_and_takes_vectors(home, model, address):
    engine = load(ModelConfig(name=str(home / "card"), engine=address)).engine
    check_inputs(engine, model, {name: pair for name, pair in a_change(model).items() if name in DOWN})
    for name in DOWN:
        check_added(engine, model, name)
    engine._client._leftovers.remove()
    assert not any((home / "shown").iterdir())


@pytest.mark.skipif(PYTHON is None, reason="no vLLM here: TEZO_VLLM names the python of an environment with it")
@pytest.mark.slow
def test_the_default_on_a_real_server_reads_no_weight(home, address, tmp_path):
    found = tezo(
        "train", "--model", home / "card", "--engine", address, "--data", home / "labels.jsonl", "--test",
        home / "labels.jsonl", "--output", tmp_path / "run", "--steps", "1", "--set", "method.targets=[down_proj]",
    )  # fmt: skip
    assert found.code == 0, found.err
    assert "gauss-newton on" in found.out + found.err
