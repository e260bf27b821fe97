"""What the usual calls save is the tuned model, what they load replaces it, and copies of hooks are refused."""

import copy
import io
import pickle

import peft
import pytest
import torch
from folders import tiny_model, tokenizer_for
from safetensors.torch import load_file, save_model
from test_adapter import outputs, tuned
from torch import nn
from transformers import AutoModelForCausalLM

from tezo.methods import METHODS
from tezo.models.lora import attach_adapter, make_adapter
from tezo.system.errors import RequestError

FAMILIES = ("opt", "llama", "gpt2", "gemma2")
TUNED = [
    ("tezo-cadam", {"rank": 4}),
    ("head-feedback", {"rank": 4}),
    ("lozo", {"rank": 4, "lazy_update_interval": 2}),
    ("head-feedback", {"rank": 4, "lazy_update_interval": 2, "frozen_rank": 6}),
    ("tezo-cadam", {"rank": 4, "targets": ["all"]}),
    ("tezo-cadam", {"rank": 4, "in_forward": False}),
    ("mezo", {"lr": 1e-3}),
]
every_tuning = pytest.mark.parametrize(("name", "options"), TUNED, ids=lambda value: str(value).replace("'", ""))


def model_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model(family, len(tokenizer_for(family))).to(dtype)


def through_bytes(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.thinned
@every_tuning
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_by_the_usual_calls_is_the_tuned_model(name, options, family, tmp_path):
    model = model_of(family)
    optimizer = tuned(model, name, **options)
    expected = outputs(model)
    assert (expected - outputs(model_of(family))).abs().max() > 1e-3
    weights = {key: value.clone() for key, value in model.named_parameters()}

    model.save_pretrained(tmp_path / "pretrained")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    torch.testing.assert_close(outputs(saved), expected, rtol=0, atol=1e-5)

    fresh = model_of(family)
    fresh.load_state_dict(through_bytes(model.state_dict()))
    torch.testing.assert_close(outputs(fresh), expected, rtol=0, atol=1e-5)

    save_model(model, tmp_path / "file.safetensors")
    inner = {f"model.{key}" for key in model.base_model.state_dict()}
    assert load_file(tmp_path / "file.safetensors").keys() <= model.state_dict().keys() | inner
    assert all(torch.equal(value, weights[key]) for key, value in model.named_parameters())  # only the copies differ
    torch.testing.assert_close(outputs(model), expected, rtol=0, atol=0)

    state = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.merge()
    assert all(torch.equal(value, state[key]) for key, value in model.named_parameters())


def test_a_part_of_a_model_carries_its_part_of_the_change():
    model = model_of("llama")
    optimizer = tuned(model, "tezo-cadam", rank=4)
    whole, part = model.state_dict(), model.model.layers[1].state_dict()
    assert all(torch.equal(value, whole[f"model.layers.1.{key}"]) for key, value in part.items())
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert not torch.equal(layer.state_dict()["weight"], layer.weight)
    optimizer.close()
    assert torch.equal(layer.state_dict()["weight"], layer.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_has_the_bits_that_merge_writes(dtype):
    model = model_of("llama", dtype)
    optimizer = METHODS["tezo-cadam"].build(model, lr=0.03, rho=1e-2, rank=4)
    for _ in range(3):
        optimizer.step(lambda: outputs(model).float().square().mean())
    state = [{key: value.clone() for key, value in model.state_dict().items()} for _ in range(2)]
    optimizer.merge()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[0][key]) and torch.equal(value, state[1][key])


def test_tied_weights_are_one_tensor_in_the_state_dict_too(tmp_path):
    model = tiny_model("llama", len(tokenizer_for("llama")), tie_word_embeddings=True)
    tuned(model, "tezo-cadam", rank=4, targets=["all"], lr=0.01)
    for _ in range(2):
        state = model.state_dict()
        assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
        assert not torch.equal(state["lm_head.weight"], model.lm_head.weight)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model), rtol=0, atol=1e-5
    )


def test_a_state_dict_within_a_step_has_no_perturbation():
    model = model_of("llama")
    optimizer = tuned(model, "tezo-cadam", rank=4)
    before, seen = {key: value.clone() for key, value in model.state_dict().items()}, []

    def closure():
        seen.append({key: value.clone() for key, value in model.state_dict().items()})
        return outputs(model).square().mean()

    optimizer.step(closure)
    assert len(seen) == 2
    assert all(torch.equal(state[key], before[key]) for state in seen for key in before)
    assert not all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("targets", [["all-linear"], ["all"]])
@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_weights_that_are_perturbed_in_place_are_neither_saved_nor_loaded_meanwhile(call, targets):
    model = model_of("llama")
    optimizer = METHODS["mezo"].build(model, lr=1e-3, in_forward=False, targets=targets)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    made = {"state_dict": model.state_dict, "load_state_dict": lambda: model.load_state_dict(state)}[call]
    with pytest.raises(RequestError, match=f"^{call} was called by the closure of a step.*between steps"):
        optimizer.step(lambda: made() and 0.0)


@pytest.mark.parametrize(("name", "options"), TUNED[:4], ids=lambda value: str(value))
def test_what_is_loaded_replaces_the_change(name, options):
    model, other = model_of("llama"), model_of("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    optimizer = tuned(model, name, **options)
    model.load_state_dict(other.state_dict())
    assert torch.equal(outputs(model), outputs(other))
    optimizer.step(lambda: outputs(model).square().mean())
    assert not torch.equal(outputs(model), outputs(other))


def test_loading_other_layers_leaves_the_change():
    model = model_of("llama")
    tuned(model, "tezo-cadam", rank=4)
    expected = outputs(model)
    model.load_state_dict({"model.norm.weight": model.model.norm.weight.detach()}, strict=False)
    assert torch.equal(outputs(model), expected)


def test_weights_are_not_replaced_within_a_step():
    model = model_of("llama")
    optimizer = tuned(model, "tezo-cadam", rank=4)
    state = model.state_dict()
    with pytest.raises(RequestError, match=r"^load_state_dict was called by the closure of a step"):
        optimizer.step(lambda: model.load_state_dict(state) and 0.0)


@pytest.mark.parametrize("kind", ["optimizer", "adapter"])
def test_a_state_dict_of_a_packed_base_is_refused(kind):
    pytest.importorskip("torchao", reason="the base is packed by torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = model_of("llama")
    quantize_(model, Int8WeightOnlyConfig())
    optimizer = METHODS["tezo-cadam"].build(model, lr=0.03, rho=1e-2, rank=4)
    model.state_dict()  # no change yet
    optimizer.step(lambda: outputs(model).square().mean())
    if kind == "adapter":
        adapter = make_adapter(optimizer)
        optimizer.close()
        attach_adapter(model, adapter)
    with pytest.raises(RequestError, match=r"state_dict: the change of model\.layers\.0.* is beside a weight"):
        model.state_dict()


@pytest.mark.parametrize("name", ["tezo-cadam", "mezo"])
def test_copies_of_a_model_in_tuning_are_refused_in_a_sentence(name):
    model = model_of("llama")
    options = {"rank": 4} if name == "tezo-cadam" else {"lr": 1e-3}
    optimizer = tuned(model, name, **options)
    layer = model.get_submodule("model.layers.0.mlp")
    for copying in (
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(layer),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
    ):
        with pytest.raises(RequestError, match=r"copy or pickle: .*merge\(\) or close\(\).*model\.state_dict\(\)"):
            copying()
    expected = outputs(model)
    optimizer.merge()
    torch.testing.assert_close(outputs(copy.deepcopy(model)), expected, rtol=0, atol=1e-5)
    pickle.loads(pickle.dumps(model))


def test_the_adapter_that_is_attached_is_in_the_state_dict_and_bars_loading(tmp_path):
    optimizer = tuned(model_of("gpt2"), "tezo-cadam", rank=4)
    model = model_of("gpt2")
    handles = attach_adapter(model, make_adapter(optimizer))
    expected = outputs(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), expected, rtol=0, atol=1e-5)
    state = model.state_dict()
    with pytest.raises(RequestError, match=r"load_state_dict: .*adapter attached.*remove\(\)"):
        model.load_state_dict(state)
    with pytest.raises(RequestError, match="copy or pickle"):
        copy.deepcopy(model)
    for handle in handles:
        handle.remove()
    model.load_state_dict(state)
    torch.testing.assert_close(outputs(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_pefts_own_adapter_is_saved_as_it_is_tuned(kind, tmp_path):
    config = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }[kind]()
    model = peft.get_peft_model(model_of("llama"), config).eval()
    before = outputs(model)
    optimizer = tuned(model, "tezo-cadam", rank=2, targets=["all"], lr=0.01)
    expected = outputs(model)
    assert (expected - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model_of("llama"), tmp_path).eval()
    torch.testing.assert_close(outputs(loaded), expected, rtol=0, atol=1e-5)
    optimizer.close()


def test_a_state_of_an_optimizer_restores_its_rates_and_is_refused_by_one_of_other_options():
    def stepped(**options):
        model = model_of("opt")
        optimizer = METHODS["lozo"].build(model, rank=4, **options)
        optimizer.step(lambda: outputs(model).square().mean())
        return optimizer

    state = stepped(lr=1e-3, rho=1e-2, weight_decay=0.1, seed=5).state_dict()
    other = stepped()
    other.load_state_dict(through_bytes(state))
    assert {name: other.settings[name].value for name in ("lr", "rho", "weight_decay", "seed")} == {
        "lr": 1e-3, "rho": 1e-2, "weight_decay": 0.1, "seed": 5,
    }  # fmt: skip
    assert other.rho == 1e-2 and other.seed == 5
    for options in ({"rank": 8}, {"num_directions": 2}, {"lazy_update_interval": 7}):
        with pytest.raises(RequestError, match=f"method.{next(iter(options))} is .* make the optimizer with"):
            METHODS["lozo"].build(model_of("opt"), **{"rank": 4, **options}).load_state_dict(state)
