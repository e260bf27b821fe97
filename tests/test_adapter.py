"""The saved adapter is the tuned model: loaded by peft, merged by peft, and attached by this library."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from folders import label_rows, model_folder, settings, tezo, tiny_model, tokenizer_for, train, write_rows
from safetensors.torch import load_file
from torch import Tensor, nn

from tezo.methods import METHODS
from tezo.models.lora import attach_adapter, load_adapter, merge_adapter, next_allowed, target_modules
from tezo.models.saving import export_adapter
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError

ADAPTED = ("opt", "llama", "qwen2", "gpt2", "gemma2", "roberta", "bert")
# Learning rates under which five steps move the outputs visibly.
RATES = {"tezo": 0.1, "tezo-m": 0.2, "tezo-cadam": 0.03, "head-feedback": 0.003}
every_family = pytest.mark.parametrize("family", ADAPTED)
KEPT = {"rank": 4, "lazy_update_interval": None}
MADE = [
    *((name, {"rank": rank}) for name in RATES for rank in (4, None) if rank or name != "head-feedback"),
    *((name, KEPT | {"basis": basis}) for name, basis in (("lozo", "gaussian"), ("lozo-m", "activation"))),
]


def base_model(family: str) -> nn.Module:
    return tiny_model(family, len(tokenizer_for(family)))


def outputs(model: nn.Module) -> Tensor:
    """Logits, or hidden states, on padded rows."""
    ids = torch.randint(5, 150, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask)
    return (output.logits if "logits" in output else output.last_hidden_state)[mask.bool()]


def tuned(model: nn.Module, name: str, **options) -> ZerothOrderOptimizer:
    """An optimizer after five steps that pull the outputs to zero."""
    unit = {"scale": "unit"} if "scale" in METHODS[name].options() else {}
    optimizer = METHODS[name].build(model, **({"lr": RATES.get(name, 0.05), "rho": 1e-2} | unit | options))
    for _ in range(5):
        optimizer.step(lambda: outputs(model).square().mean())
    return optimizer


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.thinned
@every_family
@pytest.mark.parametrize(("name", "options"), MADE, ids=[f"{name}-rank {o['rank'] or 'by layer'}" for name, o in MADE])
def test_every_way_of_loading_gives_the_tuned_outputs(name, options, family, tmp_path):
    model = base_model(family)
    optimizer = tuned(model, name, **options)
    expected, before = outputs(model), outputs(base_model(family))
    assert (expected - before).abs().max() > 1e-3
    export_adapter(optimizer, tmp_path)

    loaded = peft.PeftModel.from_pretrained(base_model(family), tmp_path).eval()
    close(outputs(loaded), expected)
    close(outputs(loaded.merge_and_unload()), expected)

    attached = base_model(family)
    handles = attach_adapter(attached, load_adapter(tmp_path))
    close(outputs(attached), expected)
    for handle in handles:
        handle.remove()
    assert torch.equal(outputs(attached), before)

    merged = base_model(family)
    merge_adapter(merged, load_adapter(tmp_path))
    close(outputs(merged), expected)
    close(outputs(optimizer.merge()), expected)


@every_family
def test_layers_of_unlike_rank_are_padded_to_one(family, tmp_path):
    model = base_model(family)
    with torch.no_grad():  # block 1 is left with two large singular values
        for target_name, parameter in model.named_parameters():
            if ".1." in target_name and parameter.ndim == 2:
                left, _, right = torch.linalg.svd(parameter, full_matrices=False)
                parameter.copy_(left[:, :2] @ right[:2] * 0.5)
    optimizer = tuned(model, "tezo", rank=None)
    ranks = {n: optimizer.perturbation.rank_of(n) for n in optimizer.parameters}
    assert len(set(ranks.values())) > 1
    adapter = export_adapter(optimizer, tmp_path)
    assert adapter.rank == max(ranks.values())
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {min(tensor.shape) for tensor in saved.values()} == {next_allowed(adapter.rank)}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for name, rank in ranks.items():
        down = saved[f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"]
        assert int((down.abs().sum(1) > 0).sum()) == rank


@every_family
def test_the_target_modules_mean_the_trained_layers_and_no_others(family, tmp_path):
    model = base_model(family)
    for target in METHODS["tezo"].build(base_model(family), rank=2, targets=["all-linear"]).targets[::2]:
        model.get_parameter(target.name).requires_grad_(False)
    optimizer = tuned(model, "tezo-cadam", rank=2)
    trained = {name.removesuffix(".weight") for name in optimizer.parameters}
    export_adapter(optimizer, tmp_path)
    loaded = peft.PeftModel.from_pretrained(base_model(family), tmp_path)
    adapted = {n for n, m in loaded.base_model.model.named_modules() if hasattr(m, "lora_A")}
    assert adapted == trained
    close(outputs(loaded.eval()), outputs(model))


def test_last_parts_of_names_are_enough_where_they_mean_the_same_layers():
    model = base_model("opt")
    every = {n for n, _ in model.named_modules() if n.rpartition(".")[2] in ("q_proj", "fc1")}
    assert target_modules(model, every) == ["fc1", "q_proj"]
    assert target_modules(model, set(sorted(every)[1:])) == sorted(every)[1:]


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        ("tezo-adam", {}, "was written to"),
        ("lozo", {}, "was written to"),
        ("mezo", {}, "was written to"),
        ("tezo", {"targets": ["all-linear", "fc1.bias"]}, "fc1.bias was written to"),
        ("tezo", {"targets": ["embed_tokens"]}, "embed_tokens.weight is not the weight of one linear layer"),
        ("tezo-cadam", {"in_forward": False}, "was written to"),
    ],
)
def test_what_is_no_exact_adapter_is_refused_with_the_reason(name, options, fault, tmp_path):
    rank = {} if name == "mezo" else {"rank": 4}
    optimizer = tuned(base_model("opt"), name, lr=1e-4, **rank, **options)
    assert fault in optimizer.why_no_adapter()
    with pytest.raises(RequestError, match=f"{fault}.*merged"):
        export_adapter(optimizer, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_what_merge_has_put_into_the_weights_is_no_adapter_any_more(tmp_path):
    optimizer = tuned(base_model("opt"), "tezo-cadam", rank=4)
    optimizer.merge()
    with pytest.raises(RequestError, match="in the weights since merge"):
        export_adapter(optimizer, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_change_to_pefts_own_adapter_is_for_peft_to_save(tmp_path):
    model = peft.get_peft_model(base_model("opt"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = tuned(model, "tezo-cadam", rank=2, targets=["*lora_*"])
    with pytest.raises(RequestError, match="PEFT's own adapter"):
        export_adapter(optimizer, tmp_path / "adapter")
    expected = outputs(model)
    optimizer.merge().save_pretrained(tmp_path / "adapter")
    close(outputs(peft.PeftModel.from_pretrained(base_model("opt"), tmp_path / "adapter")), expected)


@pytest.mark.parametrize("name", RATES)
def test_methods_that_promise_an_adapter_are_the_ones_that_have_one(name):
    assert METHODS[name].exports_adapter
    assert tuned(base_model("opt"), name, rank=4).why_no_adapter() is None


@pytest.mark.thinned
@pytest.mark.parametrize("method", ["mezo", "lozo-m", "tezo-adam", "zo-adamu"])
@pytest.mark.parametrize("family", ["opt", "gpt2", "roberta", "bert"])
def test_a_run_that_writes_weights_saves_the_model_and_reads_it_back(method, family, tmp_path):
    base = model_folder(tmp_path, family)
    data = write_rows(tmp_path / "rows.jsonl", label_rows(8))
    rank = 4 if method in ("lozo-m", "tezo-adam") else None
    flags = ("--test", data, "--json", "--method", method)
    done = train(base, data, tmp_path / "run", *flags, method__rank=rank, method__lr=1e-2, train__keep_best=False)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["result"]["kind"] == "model"
    assert not (tmp_path / "run" / "adapter").exists()
    stored, written = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "run" / "model"))
    assert max(float((written[name] - stored[name]).abs().max()) for name in stored) > 1e-3
    exported = tmp_path / "exported"
    assert tezo("export", tmp_path / "run", "--format", "merged", "--output", exported).code == 0
    for place, flag in (
        (tmp_path / "run", []),
        (tmp_path / "run" / "model", ["--data", data]),
        (exported, ["--data", data]),
    ):
        done = tezo("eval", place, "--json", *flag)
        assert done.code == 0, done.err
        after = {key: value for key, value in json.loads(done.out).items() if key in summary["after"]}
        assert after == pytest.approx(summary["after"], abs=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_adapter_of_a_half_precision_base_is_float32_and_gives_the_runs_figures(dtype, tmp_path):
    base = model_folder(tmp_path, "llama", dtype=getattr(torch, dtype))
    data = write_rows(tmp_path / "rows.jsonl", label_rows(8))
    done = train(base, data, tmp_path / "run", "--test", data, "--json")
    assert done.code == 0, done.err
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    measured = json.loads(tezo("eval", tmp_path / "run", "--json").out)
    assert measured["loss"] == pytest.approx(json.loads(done.out)["after"]["loss"], rel=2e-2)


def test_an_adapter_for_another_model_is_refused(tmp_path):
    optimizer = tuned(base_model("opt"), "tezo", rank=2)
    export_adapter(optimizer, tmp_path)
    with pytest.raises(RequestError, match=r"a layer model\.decoder\.layers\.0.*lacks"):
        attach_adapter(base_model("llama"), load_adapter(tmp_path))


def test_a_run_of_a_base_elsewhere_keeps_its_name_for_peft(tmp_path: Path):
    base, data = model_folder(tmp_path, "llama"), write_rows(tmp_path / "rows.jsonl", label_rows(8))
    assert train(base, data, tmp_path / "run", "--test", data, *settings(data__max_length=40)).code == 0
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "adapter")
    assert isinstance(loaded, peft.PeftModel)


@pytest.mark.parametrize(
    "extra",
    [
        {"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"q_proj": 32}}, {"modules_to_save": ["lm_head"]},
        {"lora_bias": True}, {"target_modules": ["q_proj", "embed_tokens"]}, {"rank_pattern": {"q_proj": 4}},
    ],
)  # fmt: skip
def test_an_adapter_that_computes_otherwise_is_for_peft(extra, tmp_path):
    settings_of = {"target_modules": ["q_proj"], "r": 8, "lora_alpha": 8} | extra
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what such an adapter cannot do
        peft.get_peft_model(base_model("llama"), peft.LoraConfig(**settings_of)).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"is not an adapter of this library.*use peft"):
        load_adapter(tmp_path)
