"""The saved adapter is the tuned model: loaded by peft, merged by peft, and attached by this library."""

import dataclasses
import json
import typing
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from folders import label_rows, model_folder, settings, tezo, tiny_model, tokenizer_for, train, write_rows
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tezo.methods import METHODS
from tezo.models.lora import Adapter, attach_adapter, load_adapter, merge_adapter, next_allowed, target_modules
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
    with pytest.raises(RequestError, match="in the PEFT adapter"):
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


PLAIN = {"target_modules": ["q_proj", "k_proj"], "r": 8, "lora_alpha": 8}
INITIAL = [
    False, True, "pissa_niter_4",
    *(value for part in typing.get_args(typing.get_type_hints(peft.LoraConfig)["init_lora_weights"])
      for value in typing.get_args(part) if "[" not in value),
]  # fmt: skip
OTHERWISE: dict[str, list[Any]] = {
    "r": [16], "lora_alpha": [16], "target_modules": ["all-linear", r".*\.q_proj", ["q_proj", "embed_tokens"]],
    "exclude_modules": [["k_proj"]], "lora_dropout": [0.3], "fan_in_fan_out": [True], "bias": ["all", "lora_only"],
    "use_rslora": [True], "modules_to_save": [["lm_head"]], "init_lora_weights": INITIAL, "layers_to_transform": [[1]],
    "layers_pattern": ["layers"], "rank_pattern": [{"q_proj": 4}], "alpha_pattern": [{"q_proj": 32}],
    "megatron_core": ["other"], "trainable_token_indices": [[3, 4]], "use_dora": [True], "lora_bias": [True],
    "alora_invocation_tokens": [[7, 8]], "use_qalora": [True], "qalora_group_size": [8],
    "layer_replication": [[[0, 2], [1, 2]]], "target_parameters": [["self_attn.q_proj.weight"]],
    "ensure_weight_tying": [True], "task_type": ["CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS"],
    "peft_type": ["LOHA"], "auto_mapping": [{}], "base_model_name_or_path": ["x"], "revision": ["x"],
    "inference_mode": [True], "peft_version": ["9"], "runtime_config": [{}],
    "eva_config": [peft.EvaConfig()],
}  # fmt: skip
"""Field of PEFT's configuration of LoRA -> values other than its default, that a model is given here."""
UNUSABLE = ("corda", "loftq", "peft_type", "auto_mapping", "peft_version", "runtime_config")
"""Of these PEFT makes no adapter without more than a model; they are written into the file of a plain one."""
BESIDE = {"layers_pattern": {"layers_to_transform": [1]}, "target_parameters": {"target_modules": []}}
TAKEN = {
    "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core",
    "qalora_group_size", "eva_config", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "all-linear", r".*\.q_proj", "CAUSAL_LM", True, False, "gaussian", "orthogonal", "eva", "mica",
}  # fmt: skip
"""Fields and values that PEFT computes with as this library does."""


def settings_of_peft() -> list[tuple[str, Any]]:
    """Every field of the configuration that the installed PEFT has, with values; those not known here with a word."""
    names = [field.name for field in dataclasses.fields(peft.LoraConfig)]
    return [(name, value) for name in names for value in OTHERWISE.get(name, ["something"])]


@pytest.mark.parametrize(("name", "value"), settings_of_peft())
def test_an_adapter_of_peft_computes_as_in_peft_or_is_refused(name, value, tmp_path):
    known = name in OTHERWISE and name not in UNUSABLE and value not in UNUSABLE
    with warnings.catch_warnings(action="ignore"):  # of what such an adapter cannot do
        settings = PLAIN | BESIDE.get(name, {}) | ({name: value} if known else {})
        made = peft.get_peft_model(base_model("llama"), peft.LoraConfig(**settings))
        for untrained in (True, False):
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                for weight in made.parameters():
                    weight.add_(0.0 if untrained or not weight.requires_grad else torch.randn_like(weight) * 0.1)
            made.save_pretrained(tmp_path)
            if not known:
                path = tmp_path / "adapter_config.json"
                path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
            model = base_model("llama")
            try:
                attach_adapter(model, load_adapter(tmp_path))
            except RequestError:
                chooses = name in ("init_lora_weights", "target_modules", "task_type")
                assert name not in TAKEN and not (chooses and value in list(TAKEN))
                continue
            if known:
                close(outputs(model), outputs(peft.PeftModel.from_pretrained(base_model("llama"), tmp_path).eval()))
            else:
                assert name in ("auto_mapping", "peft_version", "runtime_config"), "PEFT was not asked"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens is "),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is "),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is "),
        ({"lora_alpha": 16}, "lora_alpha is 16 and r 8"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "it has .*embed_tokens"),
        ({"a_setting_of_next_year": 3}, "a_setting_of_next_year is 3"),
    ],
)
def test_an_adapter_that_computes_otherwise_is_for_peft(extra, named, tmp_path):
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    with warnings.catch_warnings(action="ignore"):
        settings = PLAIN | {key: value for key, value in extra.items() if key in known}
        peft.get_peft_model(base_model("llama"), peft.LoraConfig(**settings)).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(extra | json.loads(path.read_text())))
    with pytest.raises(RequestError, match=rf"is not an adapter of this library.*{named}.*Use peft"):
        load_adapter(tmp_path)


def test_an_adapter_without_a_half_or_of_what_is_not_linear_is_refused(tmp_path):
    peft.get_peft_model(base_model("llama"), peft.LoraConfig(**PLAIN)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for half in "AB":
        left = {key: tensor for key, tensor in tensors.items() if f"layers.0.self_attn.q_proj.lora_{half}" not in key}
        save_file(left, tmp_path / "adapter_model.safetensors")
        with pytest.raises(RequestError, match="is not an adapter that can be read"):
            load_adapter(tmp_path)
    for name in ("model.embed_tokens", "model.norm", "model.layers.0.self_attn", "model.layers"):
        pair = torch.zeros(8, 16), torch.zeros(182, 8)
        with pytest.raises(RequestError, match=f"a layer {name}, which"):
            attach_adapter(base_model("llama"), Adapter(8, {name: pair}))
