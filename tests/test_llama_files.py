"""Files of any architecture that llama.cpp runs: layers, tokenizer and changes by the names of the file."""

import json
import math

import gguf
import pytest
import torch
from architectures import ARCHITECTURES, MIXTURE, TYPES, finish, makes_models, shapes, write_model
from folders import completion_rows, label_rows, refused, settings, tezo, train, write_rows

from tezo.engines.llama_cpp.loading import ROUTER, load_by_file, load_llama_cpp
from tezo.forward.engine import HEAD, Asked, Watch
from tezo.models.kinds import ModelConfig
from tezo.models.loading import load_model
from tezo.system.errors import RequestError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not makes_models(), reason="this llama.cpp does not make the tensors of a model"),
]
TEXTS = [(*range(5, 25),), (*range(5, 15), 40, 41, 42), (*range(60, 70),)]
PLACES = [(0, 4), (0, 19), (1, 12), (2, 9)]
DIAGONAL = {
    ("qwen3", "F32"), ("mamba2", "F16"), ("gpt2", "BF16"), ("qwen3moe", "Q8_0"), ("gemma3", "Q5_0"),
    ("phi3", "Q4_K_M"), ("falcon-h1", "Q6_K"), ("gpt-oss", "IQ4_NL"), ("deepseek2", "F32"), ("lfm2", "Q8_0"),
}  # fmt: skip
"""What the fast tests have of architecture x type: each type once."""
QUICK = {"qwen3", "mamba2", "gpt2", "gemma3", "falcon-h1", "deepseek2"}


def asked():
    text_P, position_P = (torch.tensor(own) for own in zip(*PLACES, strict=True))
    return Asked(TEXTS, text_P, position_P, torch.tensor([[5, 70 + i] for i in range(len(PLACES))]), 2)


def log_probs(engine, change=None):
    (told,) = engine.log_probs([change or {}], asked())
    assert torch.isfinite(told.log_probs_PC).all()
    return told.log_probs_PC


def random_change(loaded, rank=2, size=0.2):
    """Layer -> (A, B) of all that can be tuned."""
    draw, found = torch.Generator().manual_seed(0), {}
    for name, layer in loaded.engine.layers.items():
        module = name.removesuffix(".weight")
        if loaded.engine.changes(module):
            a_RI = torch.randn(rank, layer.inputs, generator=draw) * size
            found[module] = a_RI, torch.randn(layer.outputs, rank, generator=draw) * size
    return found


def cases(chosen, *more):
    return [pytest.param(*own, marks=() if own in chosen else pytest.mark.slow) for own in more]


@pytest.mark.parametrize(
    ("architecture", "kind"), cases(DIAGONAL, *[(own, kind) for own in ARCHITECTURES for kind in TYPES])
)
def test_a_file_of_each_architecture_and_type_is_loaded_and_takes_a_change(architecture, kind, tmp_path):
    path = write_model(tmp_path / "model.gguf", architecture, kind)
    loaded = load_by_file(str(path))
    engine, plain = loaded.engine, log_probs(loaded.engine)
    stored = shapes(architecture)
    for name, layer in engine.layers.items():
        shape = stored.get(name, stored["token_embd.weight"])
        assert (*shape, 1)[:2] == (layer.inputs, layer.outputs)
    linear = {name for name, module in loaded.model.named_modules() if isinstance(module, torch.nn.Linear)}
    modules = linear - {"output"}
    inside = {name.removesuffix(".weight") for name in engine.adapted if ROUTER not in name}
    assert modules == inside and len(modules) >= 4
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    moved = log_probs(engine, random_change(loaded))
    assert (moved - plain).abs().max() > 1e-3
    watched = engine.watch({}, asked(), Watch([HEAD, *sorted(modules)[-2:]], means=True))
    told, found = watched.told, watched.inputs
    # packed products round their inputs, in groups of tokens
    assert (told.log_probs_PC - plain).norm() <= (1e-4 if kind == "F32" else 1e-2) * plain.norm()
    assert all(torch.isfinite(own.mean_PI).all() and own.at_PI.abs().max() > 0 for own in found.values())


@pytest.mark.parametrize("architecture", cases({(own,) for own in QUICK}, *[(own,) for own in ARCHITECTURES]))
def test_a_lora_is_the_change_of_merged_weights(architecture, tmp_path):
    loaded = load_by_file(str(write_model(tmp_path / "model.gguf", architecture)))
    change = random_change(loaded)
    merged = {f"{module}.weight": (b_OR @ a_RI).numpy() for module, (a_RI, b_OR) in change.items()}
    theirs = log_probs(load_by_file(str(write_model(tmp_path / "merged.gguf", architecture, change=merged))).engine)
    mine, plain = log_probs(loaded.engine, change), log_probs(loaded.engine)
    assert (theirs - plain).norm() > 0.01 * plain.norm()
    # llama.cpp reads GELU from a table in half precision
    assert (mine - theirs).norm() <= 1e-2 * (theirs - plain).norm()
    for module, pair in change.items():  # each of them is felt
        assert (log_probs(loaded.engine, {module: pair}) - plain).abs().max() > 0, module


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "falcon-h1", "mamba2", "qwen35", "gpt2"])
def test_means_are_of_the_inputs_up_to_each_place(architecture, tmp_path):
    """Of texts that share their beginning, which models with a recurrent state compute one after another."""
    engine = load_by_file(str(write_model(tmp_path / "model.gguf", architecture))).engine
    texts = [(*range(5, 25), last, 7, 9) for last in (30, 31, 32)]
    apart = torch.arange(3)  # or else places of the common beginning would be asked for three times
    every = Asked(texts, apart.repeat_interleave(23), torch.arange(23).repeat(3), torch.zeros(69, 1).long(), 0, apart)
    last = Asked(texts, apart, torch.full((3,), 22), torch.zeros(3, 1).long(), 0)
    names = [name.removesuffix(".weight") for name in engine.layers if name.startswith("blk.")]
    whole = engine.watch({}, every, Watch(names)).inputs
    found = engine.watch({}, last, Watch(names, means=True)).inputs
    assert [*whole] == [*found]
    for name, own in found.items():
        at_TLI = whole[name].at_PI.unflatten(0, (3, 23))
        assert (own.at_PI - at_TLI[:, -1]).norm() <= 1e-4 * own.at_PI.norm()
        assert (own.mean_PI - at_TLI.mean(1)).norm() <= 1e-4 * own.mean_PI.norm()


@pytest.mark.parametrize(
    ("architecture", "kind", "rows"),
    [("gemma3", "Q5_0", "labels"), ("mamba2", "F32", "texts"), ("qwen3moe", "Q4_K_M", "labels")],
)
def test_a_file_that_no_trainer_reads_is_tuned_and_its_run_read_again(architecture, kind, rows, tmp_path):
    model = write_model(tmp_path / "model.gguf", architecture, kind)
    data = write_rows(tmp_path / "rows.jsonl", label_rows(16) if rows == "labels" else completion_rows(8))
    run, settings = tmp_path / "run", {"method__name": "tezo-cadam", "method__lr": 0.05, "train__keep_best": False}
    done = train(model, data, run, "--engine", "llama.cpp", steps=2, train__batch_size=4, **settings)
    assert done.code == 0, done.err
    saved = {name.removesuffix(".lora_a"): tensor for name, tensor in lora_of(run / "adapter/adapter.gguf").items()}
    stored = shapes(architecture)
    assert all(name in stored for name in saved if not name.endswith(".lora_b"))
    summary = json.loads((run / "summary.json").read_text())
    assert any("matrices of experts" in notice for notice in summary["notices"]) == (architecture == "qwen3moe")
    measured = json.loads(tezo("eval", run, "--data", data, "--json").out)["loss"]
    again = json.loads(tezo("eval", run, "--data", data, "--json", "--set", "train.eval_batch_size=3").out)["loss"]
    assert math.isfinite(measured) and abs(measured - again) < 1e-2
    assert tezo("replay", run, "--output", tmp_path / "again").code == 0
    kept = "adapter/adapter_model.safetensors"
    assert (tmp_path / "again" / kept).read_bytes() == (run / kept).read_bytes()
    assert tezo("train", "--output", run, "--resume").code == 0


ATTENTION, MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")


def computed(model):
    """Log-probabilities as `log_probs` has them, by torch."""
    found, (text_P, position_P) = asked(), zip(*PLACES, strict=True)
    with torch.no_grad():
        tables = [model(input_ids=torch.tensor([text])).logits[0].log_softmax(-1) for text in TEXTS]
    rows_PV = torch.stack([tables[text][place] for text, place in zip(text_P, position_P, strict=True)])
    return rows_PV.gather(1, found.tokens_PC)


@pytest.mark.parametrize("more", [(), ("rope_freqs",), ATTENTION, MLP, ("rope_freqs", *ATTENTION, *MLP)], ids=str)
def test_torch_reads_the_biases_and_the_rotations_of_a_llama_and_saves_them(more, tmp_path):
    def written(name, biased):
        slower = {"rope_freqs.weight": 3.0}
        return str(write_model(tmp_path / name, "llama", biased=biased, change=slower))

    path = written("model.gguf", more)
    loaded, theirs = load_model(path), log_probs(load_by_file(path).engine)
    torch.testing.assert_close(computed(loaded.model), theirs, atol=1e-4, rtol=0)
    assert loaded.notices == ()
    without = log_probs(load_by_file(written("without.gguf", ())).engine)
    assert bool(more) == bool((theirs - without).abs().max() > 0.01), "else nothing is told by these texts"
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(computed(load_model(str(tmp_path / "saved")).model), theirs, atol=1e-4, rtol=0)
    names = load_llama_cpp(ModelConfig(name=path, engine="llama.cpp"))
    torch.testing.assert_close(computed(names.model), theirs, atol=1e-4, rtol=0)  # as a look computes it


@pytest.mark.parametrize(
    ("architecture", "biased", "named"),
    [
        ("llama", ATTENTION[:3], r"\(blk\.0\.attn_q\.bias and 5 more\)"),
        ("llama", (*ATTENTION, "ffn_up"), r"\(blk\.0\.ffn_up\.bias and 1 more\)"),
        ("gemma2", None, r"\(blk\.0\.attn_q\.bias and 5 more\)"),
        ("stablelm", None, r"norm\.weight and 3 more"),
        ("qwen35", ("attn_k", "ssm_dt"), r"k_proj\.bias"),
    ],
)
def test_a_tensor_that_torch_would_leave_out_is_named(architecture, biased, named, tmp_path):
    path = write_model(tmp_path / "model.gguf", architecture, biased=biased)
    with pytest.raises(RequestError, match=named) as error:
        load_model(str(path))
    assert str(path) in str(error.value) and "model.engine=llama.cpp" in str(error.value)
    assert log_probs(load_llama_cpp(ModelConfig(name=str(path), engine="llama.cpp")).engine).shape == (4, 2)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_torch_reads_a_file_without_the_optional_tensors(architecture, tmp_path):
    assert load_model(str(write_model(tmp_path / "model.gguf", architecture, biased=()))).kind == "causal"


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_the_default_of_a_file_looks_only_where_torch_or_llama_cpp_shows_its_layers(architecture, tmp_path):
    model = write_model(tmp_path / "model.gguf", architecture, "Q5_0")
    data = write_rows(tmp_path / "rows.jsonl", completion_rows(6))
    (tmp_path / "score.py").write_text("def f(prompts, completions, **_):\n    return [len(c) for c in completions]\n")
    asked = ("train", "--model", model, "--data", data, "--engine", "llama.cpp", "--steps", 1)
    few = settings(train__max_new_tokens=4)
    done = tezo(*asked, "--output", tmp_path / "run", "--reward", f"{tmp_path / 'score.py'}:f", *few)
    assert done.code == 0, done.err
    method = json.loads((tmp_path / "run/summary.json").read_text())["method"]
    is_random = done.says("method.basis is gaussian, because es looks at inputs", "llama.cpp alone reads those of")
    assert (method, is_random) == (("es", True) if architecture == "gemma3" else ("policy-gradient", False))
    done = tezo(*asked, "--output", tmp_path / "texts")
    assert done.code == 0 and "method.basis" not in done.err, done.err  # gauss-newton looks by llama.cpp


def lora_of(path):
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


def test_damaged_files_and_those_of_other_things_are_one_sentence(tmp_path):
    model, rows = write_model(tmp_path / "model.gguf", "gemma3"), write_rows(tmp_path / "rows.jsonl", label_rows(16))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:-4000])
    refused(train(broken, rows, tmp_path / "run", "--engine", "llama.cpp"), "broken.gguf", "ends after", "download it")
    broken.write_bytes(b"PK" + model.read_bytes()[2:])
    refused(train(broken, rows, tmp_path / "run", "--engine", "llama.cpp"), "broken.gguf", "not a GGUF file")
    adapter = tmp_path / "adapter.gguf"
    writer = gguf.GGUFWriter(adapter, "gemma3")
    writer.add_type(gguf.GGUFType.ADAPTER)
    finish(writer)
    refused(train(adapter, rows, tmp_path / "run", "--engine", "llama.cpp"), "of the type 'adapter'")


def test_a_run_by_the_names_of_its_file_says_how_it_is_used_and_what_it_is_not_for(tmp_path):
    model, rows = write_model(tmp_path / "model.gguf", "gemma3"), write_rows(tmp_path / "rows.jsonl", label_rows(16))
    run = tmp_path / "run"
    done = train(model, rows, run, "--engine", "llama.cpp", steps=1, method__name="tezo")
    assert done.code == 0, done.err
    adapter = run / "adapter/adapter.gguf"
    for line in (f"llama.cpp:  llama-server -m {model} --lora {adapter}", "ollama create NAME", "not for PEFT: "):
        assert line in done.out
    assert "PeftModel" not in done.out
    card = (run / "adapter/README.md").read_text()
    assert "llama-server -m model.gguf --lora" in card and "PeftModel" not in card and str(tmp_path) not in card
    assert tezo("export", run, "--output", tmp_path / "out", "--format", "gguf-lora").code == 0
    assert (tmp_path / "out/adapter.gguf").read_bytes() == adapter.read_bytes()
    for form in ("lora", "merged"):
        refused(tezo("export", run, "--output", tmp_path / form, "--format", form), "model.engine", "llama.cpp", "gguf")
    refused(tezo("eval", run, "--data", rows, "--set", "model.engine=torch"), "set model.engine=llama.cpp")


@pytest.mark.parametrize(("architecture", "more"), [("qwen3", {}), ("llama", MIXTURE)])
def test_a_file_that_transformers_takes_for_another_is_loaded_by_its_names(architecture, more, tmp_path, monkeypatch):
    """transformers has heads of 128 in each Qwen3, and another class for a Llama with experts, which is Mixtral."""
    monkeypatch.setitem(ARCHITECTURES, architecture, ARCHITECTURES[architecture] | more)
    shapes.cache_clear()
    try:
        loaded = load_llama_cpp(
            ModelConfig(name=str(write_model(tmp_path / "model.gguf", architecture)), engine="llama.cpp")
        )
    finally:
        shapes.cache_clear()
    assert "blk.0.attn_q" in dict(loaded.model.named_modules())
    assert (log_probs(loaded.engine, random_change(loaded)) - log_probs(loaded.engine)).abs().max() > 1e-3
