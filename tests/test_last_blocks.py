"""The last blocks of a decoder, rebuilt from the inputs of their layers: what the model computes, attention held."""

import copy
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

from tezo.directions.bases.basis import input_size
from tezo.directions.outputs import Places
from tezo.directions.targets import ALL_LINEAR, select_targets
from tezo.forward.layers import layer_in_torch
from tezo.forward.watching import hooked
from tezo.newton import last_blocks as rebuilding
from tezo.newton.last_blocks import LastBlocks, NotRebuiltError, ends_of_stream, last_blocks, missed, name_of
from tezo.newton.text import TextRecord

COMMON = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 1}  # fmt: skip
KINDS = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {"head_dim": 8}, "Mistral": {"hidden_act": "gelu"}, "Phi3": {},
    "Granite": {"residual_multiplier": 0.22, "hidden_act": "relu2"}, "StableLm": {}, "Gemma2": {"head_dim": 8},
}  # fmt: skip


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model_of(kind: str):
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**COMMON, **KINDS[kind])
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at 0 and norms at 1: give them a part to play
            if parameter.ndim == 1:
                parameter.add_(noise(*parameter.shape, seed=len(parameter)) * 0.2)
    return model


def watched(model, blocks, seed=1):
    """(inputs of the layers of these blocks, inputs of the head, the places, the tokens)."""
    tokens_RL = torch.randint(2, 90, (40, 12), generator=torch.Generator().manual_seed(seed))
    row_P, position_P = torch.arange(40).repeat_interleave(8), torch.arange(4, 12).repeat(40)
    places = Places(row_P, position_P, torch.zeros_like(row_P), torch.arange(len(row_P)), torch.arange(40))
    seen = TextRecord(LastBlocks.watched(blocks))
    with torch.no_grad(), hooked(model, seen, [places]):
        model(tokens_RL)
    return {name: torch.cat(x) for name, x in seen.x.items()}, torch.cat(seen.h), places, tokens_RL


def rebuilt(model, blocks):
    inputs, n_PD, *_ = watched(model, blocks)

    def layer_of(target):
        module = copy.deepcopy(target.sites[0].module)  # the model changes in place
        return layer_in_torch(module, input_size(target), n_PD)

    with torch.no_grad():
        return LastBlocks(blocks, inputs, n_PD, layer_of)


def factors_of(blocks, size, seed):
    """U and V of every layer that writes to the stream."""
    writers = [target for block in blocks for target in (block.attention, block.mlp)]
    return {
        target.name: (size * noise(32, 2, seed=seed + i), noise(input_size(target), 2, seed=seed + 10 + i))
        for i, target in enumerate(writers)
    }


@torch.no_grad()
def add(blocks, factors):
    """Adds factors to the weights of the model."""
    for target in (target for block in blocks for target in (block.attention, block.mlp)):
        if target.name in factors:
            target.parameter.add_(factors[target.name][0] @ factors[target.name][1].T)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Granite"])
def test_the_heads_inputs_with_factors_are_the_models_where_attention_is_held(kind):
    """Of a second pass over other tokens, with a change beside the layers, and with more beside them than that."""
    model = model_of(kind)
    blocks = last_blocks(select_targets(model, (ALL_LINEAR,)), 32)
    assert len(blocks) == 4 and [name_of(block.attention) for block in blocks] == [
        f"model.layers.{i}.self_attn.o_proj" for i in range(4)
    ]
    blocks = blocks[1:]
    structure, changed, more = rebuilt(model, blocks), factors_of(blocks, 0.1, 30), factors_of(blocks, 0.2, 50)
    add(blocks, changed)
    inputs, n_PD, places, tokens_RL = watched(model, blocks, seed=2)
    with torch.no_grad():
        found = structure.seen(inputs, n_PD, changed)
    assert missed(found.of(changed), n_PD) < 1e-4
    assert missed(found.of({}), n_PD) > 0.05
    after, held = TextRecord([name_of(blocks[-1].mlp)]), dict[str, Tensor]()

    def hold(name: str):
        u_DR, v_IR = more[name]
        return lambda _, args, out: held.__setitem__(name, out + (args[0] @ v_IR) @ u_DR.T)

    with torch.no_grad(), ExitStack() as hooks:
        attention = [(block.attention.name, block.attention.sites[0].module) for block in blocks]
        with ExitStack() as holding:
            for name, module in attention:
                holding.enter_context(module.register_forward_hook(hold(name)))
            model(tokens_RL)
        for name, module in attention:
            hooks.enter_context(module.register_forward_hook(lambda *_, name=name: held[name]))
        add(blocks, {block.mlp.name: more[block.mlp.name] for block in blocks})
        hooks.enter_context(hooked(model, after, [places]))
        model(tokens_RL)
    both = {name: tuple(torch.cat(pair, 1) for pair in zip(changed[name], more[name], strict=True)) for name in more}
    real = torch.cat(after.h)
    assert missed(real, n_PD) > 0.1
    assert missed(found.of(both), real) < 1e-3


def test_which_layer_of_an_mlp_is_activated_is_found_out():
    model = model_of("Llama")
    blocks = last_blocks(select_targets(model, (ALL_LINEAR,)), 32)[1:]
    changed = factors_of(blocks, 0.1, 30)
    other = [replace(block, readers=block.readers[::-1]) for block in blocks]
    structures = [rebuilt(model, each) for each in (blocks, other)]
    add(blocks, changed)
    inputs, n_PD, *_ = watched(model, blocks, seed=2)
    with torch.no_grad():
        one, swapped = (structure.seen(inputs, n_PD, changed).of(changed) for structure in structures)
    assert torch.allclose(one, swapped, atol=1e-4)


def test_places_that_do_not_follow_from_the_blocks_are_noticed():
    model = model_of("Llama")
    blocks = last_blocks(select_targets(model, (ALL_LINEAR,)), 32)[1:]
    structure, changed = rebuilt(model, blocks), factors_of(blocks, 0.1, 30)
    add(blocks, changed)
    inputs, n_PD, *_ = watched(model, blocks, seed=2)
    with torch.no_grad():
        stream = structure.seen(inputs, n_PD, changed)
        stream.check(stream.of(changed))
        more = {name: (2 * u_DR, v_IR) for name, (u_DR, v_IR) in changed.items()}
        with pytest.raises(NotRebuiltError, match="differs"):
            stream.check(stream.of(more))
        with pytest.raises(NotRebuiltError, match="sum"):
            structure.seen(inputs, n_PD, {})


@pytest.mark.parametrize("kind", ["Gemma2", "StableLm"])
def test_blocks_that_are_built_otherwise_are_not_rebuilt(kind):
    # norms behind layers in Gemma 2, norms with means in StableLM
    model = model_of(kind)
    blocks = last_blocks(select_targets(model, (ALL_LINEAR,)), 32)[1:]
    assert len(blocks) == 3
    with pytest.raises(NotRebuiltError):
        rebuilt(model, blocks)


def test_a_layer_that_is_not_what_its_size_suggests_is_noticed():
    model = model_of("Llama")
    blocks = last_blocks(select_targets(model, (ALL_LINEAR,)), 32)[1:]
    model.model.layers[2].mlp.act_fn = torch.nn.Tanh()
    with pytest.raises(NotRebuiltError, match="activation"):
        rebuilt(model, blocks)


@pytest.mark.parametrize("changed", [False, True])
def test_layers_without_a_derivative_are_noticed(changed):
    """Packed ones that round their inputs have none, or the one of a change beside them alone."""
    quantization = pytest.importorskip("torchao.quantization", reason="the layers are packed by torchao")
    model = model_of("Llama")
    blocks = last_blocks(select_targets(model, (ALL_LINEAR,)), 32)[1:]
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    with ExitStack() as hooks:
        if changed:
            for target in (target for block in blocks for target in (*block.readers, block.mlp)):
                beside = 0.01 * noise(*target.shape, seed=7)
                hooks.enter_context(target.sites[0].module.register_forward_hook(
                    lambda _, args, out, beside=beside: out + args[0] @ beside.T
                ))  # fmt: skip
        inputs, n_PD, *_ = watched(model, blocks)

        def function_of(target):
            return layer_in_torch(target.sites[0].module, input_size(target), n_PD)

        with torch.no_grad(), pytest.raises(NotRebuiltError, match="no derivative"):
            LastBlocks(blocks, inputs, n_PD, function_of)


def test_blocks_are_those_at_the_end_whose_sizes_fit():
    model = model_of("Llama")
    targets = select_targets(model, (ALL_LINEAR,))
    assert [name_of(block.mlp) for block in last_blocks(targets, 32)] == [
        f"model.layers.{i}.mlp.down_proj" for i in range(4)
    ]
    without = [target for target in targets if target.name != "model.layers.2.mlp.down_proj.weight"]
    blocks = last_blocks(without, 32)[1:]
    with pytest.raises(NotRebuiltError, match="sum"):
        rebuilt(model, blocks)
    assert last_blocks([target for target in targets if "mlp" in target.name], 32) == []
    assert last_blocks(targets, 48) == [] == last_blocks([], 32)


def test_both_ends_of_a_stream_follow_from_their_norms_and_the_sum_between():
    h_0_PD, sum_PD = noise(300, 40, seed=0).double(), noise(300, 40, seed=1).double()
    h_1_PD = h_0_PD + sum_PD
    norms = [rebuilding.normalised(h) * noise(40, seed=2 + i).double() for i, h in enumerate((h_0_PD, h_1_PD))]
    found, by_2D = ends_of_stream(norms[1][:200], norms[0][:200], sum_PD[:200])
    assert missed(found, h_1_PD[:200]) < 1e-5
    others, _ = ends_of_stream(norms[1][200:], norms[0][200:], sum_PD[200:], by_2D)
    assert missed(others, h_1_PD[200:]) < 1e-5
    with pytest.raises(NotRebuiltError):
        ends_of_stream(norms[1], noise(300, 40, seed=9), sum_PD)
