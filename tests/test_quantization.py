"""Packed bases, by the real libraries: tuned beside them, read and never written, saved as adapters."""

import json

import pytest
import torch
from folders import (
    label_rows,
    model_folder,
    read_jsonl,
    refused,
    saved,
    tezo,
    tiny_model,
    tokenizer_for,
    train,
    write_rows,
)  # fmt: skip
from torch import nn

from tezo.directions.random import DrawKey
from tezo.directions.ranks import significant_rank
from tezo.directions.targets import is_packed, matrix_of, select_targets
from tezo.forward.layers import layer_in_torch
from tezo.forward.perturbed_parameter import Shift
from tezo.methods import METHODS
from tezo.methods.mezo import mezo
from tezo.methods.tezo import tezo_cadam
from tezo.models.kinds import ModelConfig
from tezo.models.loading import load_model
from tezo.models.peft import add_adapter, random_tokens
from tezo.models.quantization import QUANTIZERS, stored_bytes
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.digests import digest
from tezo.system.errors import RequestError
from tezo.training.job import load, make_optimizer
from tezo.training.settings import parse_config

BESIDE = ("tezo", "tezo-m", "tezo-cadam", "head-feedback", "gauss-newton", "es", "probe")
FOLDED = ("lozo", "lozo-m", "subzo")
FORMS = list(QUANTIZERS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    tokenizer = tokenizer_for("opt")
    saved(
        tiny_model("opt", len(tokenizer), hidden_size=64, word_embed_proj_dim=64, ffn_dim=128), tokenizer, root / "opt"
    )
    model_folder(root, "bert")
    write_rows(root / "rows.jsonl", label_rows(24))
    return root


@pytest.mark.parametrize("form", FORMS)
def test_linear_layers_are_packed_and_found_with_the_shapes_of_their_values(home, form):
    plain, packed = load_model(str(home / "opt")).model, load_model(str(home / "opt"), quantization=form).model
    expected, found = select_targets(plain), select_targets(packed)
    assert [(t.name, t.shape, t.kind) for t in found] == [(t.name, t.shape, t.kind) for t in expected]
    assert all(is_packed(target.parameter) and not target.is_writable for target in found)
    for target, original in zip(found, expected, strict=True):
        error = (matrix_of(target) - original.parameter).abs().max() / original.parameter.abs().max()
        assert 0 < error < (0.153 if form == "nf4" else 0.02), "rounded to its grid, and to no other values"


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_direction_adds_x_times_its_transpose_to_a_packed_layer(home, form):
    model = load_model(str(home / "opt"), quantization=form).model
    optimizer = tezo_cadam(model, rank=4, seed=3)
    for name, moving in optimizer.parameters.items():
        direction = optimizer.perturbation.direction(moving.target, DrawKey(3, 0), {})
        left_MR, right_NR = direction.factors()
        module: nn.Module = moving.target.sites[0].module
        x = torch.randn(5, moving.target.shape[1])
        before = module(x)
        moving.refresh(DrawKey(3, 0), optimizer.perturbation.refresh(moving.target, DrawKey(3, 0)))
        moving.set_perturbations([Shift(direction, 0.1)])
        added = module(x) - before
        moving.set_perturbations([])
        assert torch.allclose(added, 0.1 * x @ right_NR @ left_MR.T, atol=1e-5), name
        assert torch.equal(module(x), before)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_outside_of_a_pass_is_of_the_packed_values(home, form):
    """And so is its derivative, which free text takes."""
    for target in select_targets(load_model(str(home / "opt"), quantization=form).model):
        matrix_OI, module = matrix_of(target).float(), target.sites[0].module
        outputs, inputs = matrix_OI.shape
        x_PI, g_PO = torch.randn(5, inputs, requires_grad=True), torch.randn(5, outputs)
        found = layer_in_torch(module, inputs, x_PI[:0].detach())(x_PI)
        assert torch.equal(found, module(x_PI.detach()))
        (found_PI,) = torch.autograd.grad(found, x_PI, g_PO)
        assert torch.allclose(found_PI, g_PO @ matrix_OI, rtol=1e-3, atol=1e-4), target.name


@pytest.mark.thinned
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", BESIDE)
def test_a_run_ends_as_an_adapter_that_gives_its_figures_again(home, tmp_path, form, method):
    run, rows = tmp_path / "run", home / "rows.jsonl"
    flags = ("--test", rows, "--quantization", form, "--method", method, "--json")
    done = train(home / "opt", rows, run, *flags, steps=4, train__keep_best=False,
                 **({"method__scale": "unit"} if "scale" in METHODS[method].options() else {}))  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["result"]["kind"] == "adapter"
    assert summary["before"]["loss"] != summary["after"]["loss"]
    found = tezo("eval", run, "--data", rows, "--json")
    assert found.code == 0, found.err
    # int8 rounds the inputs of a layer, so a last bit there may move a whole step of its grid
    again = json.loads(found.out)["loss"]
    assert again == pytest.approx(summary["after"]["loss"], rel=1e-2 if form == "int8" else 1e-5)
    plan = json.loads((run / "plan.json").read_text())
    shapes = {tuple(row["shape"]) for row in plan if row["trained"]}
    every = {(64, 64), (128, 64), (64, 128)}  # a plan speaks of values, not of how they are packed
    assert shapes == (every - {(128, 64)} if method == "probe" else every)  # which tunes what writes to the stream


@pytest.mark.parametrize("form", FORMS)
def test_the_fingerprint_of_a_run_is_of_what_is_packed(home, form):
    loaded = load_model(str(home / "opt"), quantization=form)
    assert load_model(str(home / "opt"), quantization=form).fingerprint == loaded.fingerprint
    packed = select_targets(loaded.model)[0].parameter.data
    getattr(packed, "qdata", packed).view(-1)[0] += 1
    assert digest(dict(loaded.model.named_parameters())) != loaded.fingerprint


@pytest.mark.parametrize("form", FORMS)
def test_the_base_keeps_its_bits(home, form):
    model = load_model(str(home / "opt"), quantization=form).model
    before = digest(dict(model.named_parameters()))
    optimizer = tezo_cadam(model, rank=4, lr=0.1)
    ids = torch.arange(5, 15).unsqueeze(0)
    losses = [optimizer.step(lambda: model(input_ids=ids, labels=ids).loss) for _ in range(5)]
    assert digest(dict(model.named_parameters())) == before
    assert len(set(losses)) == 5
    assert any(moving.change.coefficient.abs().max() > 0 for moving in optimizer.parameters.values())


@pytest.mark.parametrize("method", [*sorted(set(METHODS) - set(BESIDE) - set(FOLDED) - {"policy-gradient"}), "adam"])
def test_methods_that_write_weights_refuse_in_a_sentence(home, tmp_path, method):
    more = {"method__rank": 4 if method.startswith("tezo") else None, "method__lr": None}
    done = train(
        home / "opt", home / "rows.jsonl", tmp_path / "run", "--quantization", "nf4", "--method", method, **more
    )
    refused(done, "cannot be written in place", "use head-feedback")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", FOLDED)
def test_lazy_methods_keep_what_they_fold_beside_the_base(home, tmp_path, method):
    run, rows = tmp_path / "run", home / "rows.jsonl"
    flags = ("--quantization", "int8wo", "--method", method, "--json")
    done = train(home / "opt", rows, run, *flags, steps=9, train__keep_best=False,
                 method__lazy_update_interval=4, method__rank=4)  # fmt: skip
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["result"] == {"kind": "adapter", "folder": "adapter", "rank": 12, "in_vllm": True}, (
        "two intervals, and one begun"
    )
    assert summary["compression_error"] == 0.0
    found = tezo("eval", run, "--data", rows, "--json")
    assert found.code == 0, found.err


def test_ranks_are_counted_on_the_values_of_packed_layers(home):
    model = load_model(str(home / "opt"), quantization="nf4").model
    optimizer = METHODS["tezo"].build(model, rank=None, rank_threshold=0.3, max_rank=12)
    for name, moving in optimizer.parameters.items():
        linear = moving.target.sites[0].module
        eye = torch.eye(linear.in_features)
        values = (linear(eye) - linear.bias).T if linear.bias is not None else linear(eye).T
        assert optimizer.perturbation.rank_of(name) <= significant_rank(values, 0.3)


def test_replay_and_resume_on_a_packed_base(home, tmp_path):
    rows = home / "rows.jsonl"
    assert train(home / "opt", rows, tmp_path / "run", "--quantization", "nf4", steps=4).code == 0
    again = tezo("replay", tmp_path / "run", "--output", tmp_path / "again")
    assert again.code == 0, again.err
    adapters = [tmp_path / name / "adapter/adapter_model.safetensors" for name in ("run", "again")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    (tmp_path / "run/manifest.json").unlink()
    resumed = tezo("train", "--output", tmp_path / "run", "--resume", "--set", "model.quantization=int8")
    refused(resumed, "model.quantization is 'int8'", "began with 'nf4'")
    assert tezo("train", "--output", tmp_path / "run", "--resume").code == 0


def test_lora_over_a_packed_base_trains_the_adapter_alone(home):
    tree = {"name": str(home / "opt"), "quantization": "nf4", "peft": "lora", "lora_rank": 2}
    config = parse_config({"model": tree, "data": "-", "method": {"name": "mezo"}})
    from tezo.training.job import load_for_tuning

    loaded = load_for_tuning(config)
    optimizer = make_optimizer(config, loaded, ())
    assert isinstance(optimizer, ZerothOrderOptimizer)
    assert optimizer.targets and all("lora_" in target.name for target in optimizer.targets)


@pytest.mark.parametrize("form", ["nf4", "int8wo"])
@pytest.mark.parametrize("adapter", ["prefix", "prompt"])
def test_virtual_tokens_over_a_packed_base_are_real_tokens_in_front(home, form, adapter):
    base = load_model(str(home / "opt"), quantization=form)
    front, ids = random_tokens(base, 4, 3), torch.arange(5, 15).view(2, 5)
    with torch.no_grad():
        expected = base.model(input_ids=torch.cat([front.expand(2, -1), ids], 1)).logits[:, 4:]
        plain = base.model(input_ids=ids).logits
    tuned = add_adapter(base, ModelConfig(name="opt", peft=adapter, prefix_length=4), 3).model
    with torch.no_grad():
        found = tuned(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -5:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3


def test_norms_and_biases_of_a_packed_model_can_be_trained_with_it(home):
    model = load_model(str(home / "opt"), quantization="nf4").model
    optimizer = tezo_cadam(model, rank=4, targets=("all",), lr=0.1)
    kinds = {moving.target.kind for moving in optimizer.parameters.values()}
    assert kinds == {"linear", "embedding", "vector"}
    ids = torch.arange(5, 15).unsqueeze(0)
    before = model.model.decoder.layers[0].fc1.bias.clone()
    optimizer.step(lambda: model(input_ids=ids, labels=ids).loss)
    assert not torch.equal(model.model.decoder.layers[0].fc1.bias, before)


def test_an_encoder_can_be_packed(home, tmp_path):
    done = train(home / "bert", home / "rows.jsonl", tmp_path / "run", "--quantization", "int8wo")
    assert done.code == 0, done.err
    answered = tezo("predict", tmp_path / "run", "--input", home / "rows.jsonl", "--output", tmp_path / "answers.jsonl")
    assert answered.code == 0, answered.err
    assert len(read_jsonl(tmp_path / "answers.jsonl")) == 24


def test_a_packed_base_takes_less_memory():
    plain = load_model("embedded:all-minilm-l6-v2").model
    packed = {form: load_model("embedded:all-minilm-l6-v2", quantization=form).model for form in FORMS}
    linear = sum(target.shape.numel() for target in select_targets(plain))
    rest = stored_bytes(plain) - 4 * linear
    for form, model in packed.items():
        # bits of the weights, and the scales: one float32 for 64 weights of nf4, one a row of the others
        share = (stored_bytes(model) - rest) / linear
        bytes_each = 0.5 if form == "nf4" else 1
        assert bytes_each <= share <= bytes_each + 4 / 64 + 0.02, form


def test_what_cannot_be_is_refused(home, tmp_path):
    rows = home / "rows.jsonl"
    refused(train(home / "opt", rows, tmp_path / "run", "--quantization", "nf5"), "model.quantization", "nf5")
    refused(train(home / "opt", rows, tmp_path / "run", "--quantization", "nf4", model__placement="disk"),
            "model.placement is disk", "nf4")  # fmt: skip
    assert train(home / "opt", rows, tmp_path / "run", "--quantization", "nf4").code == 0
    refused(tezo("export", tmp_path / "run", "--format", "merged", "--output", tmp_path / "merged"), "nf4")


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_layers_that_a_cpu_unpacks_wrongly_are_left_unpacked_with_a_notice(home, tmp_path, family):
    """Of 64 and 96 inputs: the second feed-forward layer of each block is left."""
    sizes = {
        "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96},
        "gpt2": {"n_embd": 64, "n_inner": 96},
    }
    tokenizer = tokenizer_for(family)
    base = saved(tiny_model(family, len(tokenizer), **sizes[family]), tokenizer, tmp_path / "base")
    plain, loaded = load_model(str(base)).model, load_model(str(base), quantization="nf4", device="cpu")
    names = {name for name, module in plain.named_modules() if name.endswith(("fc2", "mlp.c_proj"))}
    targets = {target.name.removesuffix(".weight"): target for target in select_targets(loaded.model)}
    assert {name for name, target in targets.items() if not is_packed(target.parameter)} == names
    for name in names:
        assert torch.equal(targets[name].parameter, plain.get_parameter(f"{name}.weight"))
    assert loaded.model.get_output_embeddings().weight.is_floating_point()
    (notice,) = loaded.notices
    assert notice.startswith(f"2 layers are not packed, such as {min(names)}: on a CPU nf4 needs")
    run, rows = tmp_path / "run", home / "rows.jsonl"
    done = train(base, rows, run, "--test", rows, "--quantization", "nf4", "--json", model__device="cpu")
    assert done.code == 0, done.err
    assert notice in json.loads(done.out)["notices"]
    found = tezo("eval", run, "--json")
    assert json.loads(found.out)["loss"] == pytest.approx(json.loads(done.out)["after"]["loss"], rel=1e-5)


def test_why_there_are_layers_that_a_cpu_does_not_unpack():
    import bitsandbytes

    values = torch.randn(64, 48)
    given = bitsandbytes.functional.dequantize_4bit(*bitsandbytes.functional.quantize_4bit(values, quant_type="nf4"))
    # other CPUs unpack by another kernel, which is right
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert (given - values).abs().max() > 0.16 * values.abs().max(), "mended: take inputs_on_cpu away"


def test_a_quantiser_that_is_not_installed_is_named(home, monkeypatch):
    monkeypatch.setattr("tezo.models.quantization.find_spec", lambda _: None)
    with pytest.raises(RequestError, match="needs bitsandbytes; pip install bitsandbytes"):
        load(parse_config({"model": {"name": str(home / "opt"), "quantization": "nf4"}, "data": "-"}))


def test_dense_methods_refuse_before_a_hook_is_left(home):
    model = load_model(str(home / "opt"), quantization="nf4").model
    with pytest.raises(RequestError, match="cannot be written in place"):
        mezo(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
