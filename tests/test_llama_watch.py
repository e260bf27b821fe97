"""llama.cpp shows inputs of layers at places, and takes vectors into their outputs, as torch's hooks do."""

import random

import pytest
import torch
from architectures import makes_models, values, write_model
from folders import bpe_tokenizer
from gguf_files import tiny_llama, write_gguf

from tezo.engines.llama_cpp import engine as llama_engine
from tezo.engines.llama_cpp import load_llama_cpp
from tezo.engines.llama_cpp.loading import load_by_file
from tezo.forward.engine import HEAD, Asked, Watch
from tezo.forward.watching import head_rows
from tezo.models.kinds import ModelConfig
from tezo.system.errors import RequestError

pytestmark = pytest.mark.engine

PARTS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
PARTS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
LAYERS = [f"model.layers.{block}.{part}" for block in range(2) for part in PARTS]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny Llama in llama.cpp, whose modules torch can run as well."""
    tokenizer = bpe_tokenizer(chat=True)
    path = tmp_path_factory.mktemp("home") / "tiny.gguf"
    write_gguf(path, tiny_llama(len(tokenizer), max_position_embeddings=2048), tokenizer)
    return load_llama_cpp(ModelConfig(name=str(path), engine="llama.cpp"))


def texts_with_a_common_beginning(count, *, long=0):
    draw = random.Random(0)
    beginning = tuple(draw.choices(range(4, 300), k=20))
    texts = {(*beginning, *draw.choices(range(4, 300), k=draw.randint(1, 30))) for _ in range(count)}
    return sorted(texts | ({(*beginning, *draw.choices(range(4, 300), k=long))} if long else set()))


def asked_of(texts, places, groups=None):
    pairs = [(i, place) for i, own in enumerate(places) for place in own]
    tokens_PC = torch.tensor([[5, 6 + i % 7] for i in range(len(pairs))])
    text_P, position_P = (torch.tensor(own) for own in zip(*pairs, strict=True))
    return Asked(texts, text_P, position_P, tokens_PC, 2, None if groups is None else torch.tensor(groups))


@torch.no_grad()
def in_torch(model, text, vectors=None, change=None):
    """(logits, input of each layer, output of each layer) of a text; layers have a change, and vectors added."""
    inputs, outputs, handles = {}, {}, []
    vectors, change = vectors or {}, change or {}

    def hook(name, args, output):
        inputs[name] = args[0][0]
        if name in change:
            a_RI, b_OR = change[name]
            output = output + args[0] @ a_RI.T @ b_OR.T
        outputs[name] = output[0]
        return output + vectors.get(name, 0.0)

    for name in (*LAYERS, "lm_head"):
        module = model.get_submodule(name)
        handles.append(module.register_forward_hook(lambda _, args, output, name=name: hook(name, args, output)))
    logits = model(input_ids=torch.tensor([text])).logits[0]
    for handle in handles:
        handle.remove()
    return logits, inputs, outputs


def close(mine, theirs, tolerance=1e-4):
    assert mine.shape == theirs.shape
    assert (mine - theirs).norm() <= tolerance * theirs.norm()


def some_change(loaded, names):
    torch.manual_seed(0)
    found = {}
    for name in names:
        out, inside = loaded.model.get_submodule(name).weight.shape
        found[name] = torch.randn(3, inside) * 0.2, torch.randn(out, 3) * 0.2
    return found


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("long", [0, 1100])
def test_inputs_at_places_and_their_means_are_torchs(loaded, changed, long):
    texts = texts_with_a_common_beginning(40, long=long)
    places = [sorted({len(text) - 1, 19 + (len(text) - 19) // 2}) for text in texts]
    asked, change = asked_of(texts, places), some_change(loaded, LAYERS[:9:2]) if changed else {}
    watched = loaded.engine.watch(change, asked, Watch([*LAYERS, HEAD], means=True))
    told, found = watched.told, watched.inputs
    expected = [in_torch(loaded.model, text, change=change) for text in texts]
    pairs = list(zip(asked.text_P.tolist(), asked.position_P.tolist(), strict=True))
    assert {*found} == {*LAYERS, HEAD} and [*found][-3:] == [LAYERS[-2], LAYERS[-1], HEAD]  # in their order
    for name, own in found.items():
        inputs, outputs = ([seen[side]["lm_head" if name == HEAD else name] for seen in expected] for side in (1, 2))
        close(own.at_PI, torch.stack([inputs[text][place] for text, place in pairs]))
        close(own.mean_PI, torch.stack([inputs[text][: place + 1].mean(0) for text, place in pairs]))
        square = torch.stack([outputs[text][place] for text, place in pairs]).square().mean()
        assert own.output_square == pytest.approx(float(square), rel=1e-4)
    assert found[LAYERS[0]].at_PI is found[LAYERS[2]].at_PI and found[LAYERS[0]].mean_PI is found[LAYERS[1]].mean_PI
    close(told.log_probs_PC[:, 0], torch.stack([expected[t][0][p].log_softmax(-1)[5] for t, p in pairs]))


def test_some_places_are_kept_and_means_only_where_asked_for(loaded):
    texts = texts_with_a_common_beginning(30)
    asked = asked_of(texts, [[20 + (len(text) - 21) // 2, len(text) - 1][-1:] for text in texts])
    name = LAYERS[-1]
    every = loaded.engine.watch({}, asked, Watch([name])).inputs
    kept = torch.arange(1, len(asked.text_P), 3)
    some = loaded.engine.watch({}, asked, Watch([name], places=kept)).inputs
    assert torch.equal(some[name].at_PI, every[name].at_PI[kept]) and some[name].mean_PI is None


@pytest.mark.parametrize("changed", [False, True])
def test_vectors_added_to_outputs_move_log_probabilities_as_in_torch(loaded, changed):
    texts = [
        text for text in texts_with_a_common_beginning(24) for _ in range(2)
    ]  # each twice, with vectors of its own
    asked = asked_of(texts, [[len(text) - 2, len(text) - 1] for text in texts], groups=range(len(texts)))
    change = some_change(loaded, LAYERS[:9:2]) if changed else {}
    draw = torch.Generator().manual_seed(1)
    added = {}
    for i, name in enumerate([LAYERS[3], LAYERS[0], LAYERS[-1]]):
        size = loaded.model.get_submodule(name).weight.shape[0]
        rows = [1 if i == 0 else len(text) for text in texts]
        added[name] = [torch.randn(count, size, generator=draw) for count in rows]
    told = loaded.engine.watch(change, asked, Watch(added=added)).told
    each = [{name: vectors[i] for name, vectors in added.items()} for i in range(len(texts))]
    expected = [in_torch(loaded.model, *own, change) for own in zip(texts, each, strict=True)]
    plain = [in_torch(loaded.model, text, None, change) for text in texts]
    pairs = list(zip(asked.text_P.tolist(), asked.position_P.tolist(), strict=True))
    theirs, before = (
        torch.stack([own[t][0][p].log_softmax(-1)[asked.tokens_PC[i]] for i, (t, p) in enumerate(pairs)])
        for own in (expected, plain)
    )
    close(told.log_probs_PC, theirs)
    assert (theirs - before).norm() > 0.05 * before.norm()


def test_inputs_of_the_head_are_seen_behind_what_was_added(loaded):
    texts = texts_with_a_common_beginning(12)
    asked = asked_of(texts, [[len(text) - 1] for text in texts], groups=range(len(texts)))
    size = loaded.model.config.hidden_size
    added = {LAYERS[-1]: [torch.full((1, size), 0.1 * i) for i in range(len(texts))]}
    found = loaded.engine.watch({}, asked, Watch([HEAD], added=added)).inputs
    expected = [
        in_torch(loaded.model, text, {LAYERS[-1]: own}) for text, own in zip(texts, added[LAYERS[-1]], strict=True)
    ]
    close(found[HEAD].at_PI, torch.stack([own["lm_head"][-1] for _, own, _ in expected]))


def test_with_nothing_written_numbers_are_equal_to_the_bit(loaded):
    texts = texts_with_a_common_beginning(30, long=600)
    asked = asked_of(texts, [[len(text) - 1] for text in texts])
    (plain,) = loaded.engine.log_probs([{}], asked)
    for watch in (Watch(LAYERS), Watch(), Watch([LAYERS[3], HEAD], means=False)):
        told = loaded.engine.watch({}, asked, watch).told
        assert torch.equal(told.log_probs_PC, plain.log_probs_PC)
        assert torch.equal(told.likely_log_probs_PL, plain.likely_log_probs_PL)
    (again,) = loaded.engine.log_probs([{}], asked)
    assert torch.equal(again.log_probs_PC, plain.log_probs_PC)


def test_layers_that_the_file_does_not_have_are_one_sentence(loaded):
    asked = asked_of([(5, 6)], [[1]])
    for watch in (Watch(["model.norm"]), Watch(added={"model.layers.7.mlp.up_proj": [torch.zeros(1, 64)]})):
        with pytest.raises(RequestError, match=r"cannot be read from llama\.cpp"):
            loaded.engine.watch({}, asked, watch)
    assert not loaded.engine.watches("model.norm") and loaded.engine.watches(HEAD)


@torch.no_grad()
@pytest.mark.parametrize("at_once", [1 << 22, 200])
def test_products_by_weights_of_layers_are_torchs_in_the_order_of_its_rows(loaded, monkeypatch, at_once):
    monkeypatch.setattr(llama_engine, "UNPACKED_AT_ONCE", at_once)
    for name in LAYERS:
        module = loaded.model.get_submodule(name)
        x_PI, g_PO = torch.randn(5, module.in_features), torch.randn(5, module.out_features)
        close(loaded.engine.product(name, x_PI, False), module(x_PI))
        with torch.enable_grad():
            x_PI.requires_grad_()
            (expected,) = torch.autograd.grad(module(x_PI), x_PI, g_PO)
        close(loaded.engine.product(name, g_PO, True), expected)


@pytest.mark.skipif(not makes_models(), reason="this llama.cpp does not make the tensors of a model")
def test_a_product_has_the_bias_and_nothing_follows_it(tmp_path):
    """An x that requires a gradient would keep all of the weight, in an actor of Ray too."""
    engine = load_by_file(str(write_model(tmp_path / "model.gguf", "gpt2"))).engine
    bias_O = torch.from_numpy(values("gpt2", "blk.1.ffn_down.bias", (256,)))
    assert bias_O.any()
    found = engine.product("blk.1.ffn_down", torch.zeros(2, 512, requires_grad=True), False)
    assert torch.equal(found, bias_O.expand(2, -1)) and not found.requires_grad
    back = engine.product("blk.1.ffn_down", torch.zeros(2, 256, requires_grad=True), True)
    assert not back.any() and not back.requires_grad


@torch.no_grad()
def test_rows_of_the_head_are_torchs(loaded):
    some = torch.tensor([3, 0, 7])
    weight_XD, bias_X = loaded.engine.head_rows(some)
    close(weight_XD, head_rows(loaded.model, some, torch.zeros(0, weight_XD.shape[1]))[0])
    assert not bias_X.any()
