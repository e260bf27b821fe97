"""Models in GGUF: tiny files of known weights, and SmolLM2-135M, which is such a file."""

import gc
import json
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from folders import bpe_tokenizer, completion_rows, label_rows, read_jsonl, refused, tezo, train, write_rows
from gguf_files import (
    GROUPS,
    HEADS,
    in_llama_cpp_order,
    split_by_llama_cpp,
    tensors_of,
    tiny_llama,
    values_of,
    write_gguf,
    write_sentence_pieces,
)
from safetensors.torch import load_file
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import kernels

import tezo as tezo_package
from tezo.engines.llama_cpp.library import find_library
from tezo.models.gguf import GgufWeights, gguf_tokenizer
from tezo.models.gguf_types import every_type, unpacked_types
from tezo.models.loading import embedded_source, load_model
from tezo.models.saving import HERE
from tezo.system.errors import RequestError

DECODER = Path(__file__).parents[2] / "shared/models/stories260K"
MAPS = Path("/proc/self/maps")
TEXT = "The plot  2024 falls apart,\n  3 times 1234 it's  over"


@pytest.fixture(scope="module")
def tiny():
    """(model, tokenizer)."""
    tokenizer = bpe_tokenizer(chat=True)
    return tiny_llama(len(tokenizer)), tokenizer


@pytest.fixture(scope="module")
def tiny_file(tiny, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", *tiny)


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_a_file_is_the_model_that_it_was_made_of(tiny, tiny_file):
    model, tokenizer = tiny
    loaded = load_model(str(tiny_file))
    assert (loaded.kind, loaded.model.dtype, loaded.notices) == ("causal", torch.float32, ())
    assert (loaded.max_length, loaded.model.name_or_path) == (64, str(tiny_file))
    ids = torch.tensor([tokenizer("the film was good", add_special_tokens=False)["input_ids"]])
    assert torch.equal(logits(loaded.model, ids), logits(model, ids))
    for mine, theirs in ((loaded.tokenizer, tokenizer), (loaded.model.config, model.config)):
        named = [getattr(mine, f"{name}_token_id") for name in ("bos", "eos", "pad")]
        assert named == [getattr(theirs, f"{name}_token_id") for name in ("bos", "eos", "pad")]
    messages = [{"role": "user", "content": "was it good ?"}]
    said, wanted = (each.apply_chat_template(messages, tokenize=False) for each in (loaded.tokenizer, tokenizer))
    assert said == wanted
    assert loaded.tokenizer.decode(loaded.tokenizer(TEXT)["input_ids"]) == TEXT


@pytest.mark.parametrize(
    ("packed", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)]
)
def test_plain_numbers_keep_their_type_and_packed_ones_are_unpacked_as_the_format_says(packed, dtype, tiny, tmp_path):
    kind = gguf.GGMLQuantizationType[packed]
    path = write_gguf(tmp_path / "model.gguf", *tiny, packed=kind)
    model = load_model(str(path)).model
    assert {weight.dtype for weight in model.parameters()} == {dtype} and model.config.dtype == dtype
    stored = {tensor.name: gguf.quants.dequantize(tensor.data, kind) for tensor in gguf.GGUFReader(path).tensors
              if tensor.tensor_type == kind}  # fmt: skip
    for name, weight in tensors_of(model).items():
        if name in stored:
            assert torch.equal(weight, torch.tensor(stored[name].reshape(weight.shape)).to(dtype)), name
    assert load_model(str(path), dtype="bfloat16").model.dtype == torch.bfloat16


UNPACKED = [gguf.GGMLQuantizationType(number).name for number in sorted(unpacked_types())]


@pytest.fixture(scope="module")
def wide():
    """A model whose rows have whole blocks of every type, and its tokenizer."""
    tokenizer = bpe_tokenizer()
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    return tiny_llama(len(tokenizer), **sizes), tokenizer


@pytest.mark.parametrize("packed", UNPACKED)
def test_every_type_that_gguf_unpacks_is_read_as_gguf_unpacks_it(packed, wide, tmp_path):
    kind = gguf.GGMLQuantizationType[packed]
    path = write_gguf(tmp_path / "model.gguf", *wide, packed=kind)
    model = load_model(str(path), dtype="float32").model
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {"token_embd.weight", "blk.0.attn_q.weight"} <= stored.keys()
    for name, weight in tensors_of(model).items():
        values = torch.tensor(values_of(stored[name].data, stored[name].tensor_type))
        assert torch.equal(weight, values.reshape(weight.shape)), name
    if packed not in ("F32", "F16", "BF16"):  # the other of transformers' two ways, for newer architectures
        blocks = stored["blk.0.attn_q.weight"].data
        with every_type():
            found = kernels.dequantize_blocks(torch.tensor(blocks), int(kind), len(blocks), 256, torch.float32)
        assert torch.equal(found, torch.tensor(values_of(blocks, kind)))


def test_a_file_of_several_types_is_tuned(wide, tmp_path):
    """As Q4_K_M has them, whose rows are of other types where their length is no multiple of 256."""
    path, data = tmp_path / "model.gguf", write_rows(tmp_path / "rows.jsonl", label_rows(16))
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q5_0", "Q6_K", "Q8_0", "Q5_1")]
    write_gguf(path, *wide, packed=kinds)
    assert {tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors} == {*kinds, 0}
    done = train(path, data, tmp_path / "run", "--method", "tezo", steps=1)
    assert done.code == 0, done.err
    assert tezo("eval", tmp_path / "run").code == 0


@pytest.mark.parametrize(("kind", "named"), [(np.float64, "as F64, which gguf"), (np.int8, "as I8, which gguf")])
def test_a_type_that_gguf_does_not_unpack_is_named(kind, named, tmp_path):
    path, data = tmp_path / "model.gguf", write_rows(tmp_path / "rows.jsonl", label_rows(16))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(train(path, data, tmp_path / "run"), f"blk.0.attn_q.weight {named}", "another quantization")


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell which files are mapped")
@pytest.mark.parametrize("packed", ["F32", "Q8_0"])
def test_weights_read_at_their_use_are_the_models_and_no_map_of_the_file_stays(packed, tiny, tmp_path):
    """An engine has mapped the file: a second map of all of it would double what a look takes."""
    path = write_gguf(tmp_path / "model.gguf", *tiny, packed=gguf.GGMLQuantizationType[packed])
    model = load_model(str(path)).model
    weights = GgufWeights(str(path), model)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.float()), name
    gc.collect()
    assert str(path) not in MAPS.read_text()


def test_nothing_is_read_but_the_file_itself(tiny, tiny_file, tmp_path, monkeypatch):
    """Neither a file of that name in the current folder nor what another model has left beside it."""
    home = tmp_path / "home"
    home.mkdir()
    path = home / "model.gguf"
    path.write_bytes(tiny_file.read_bytes())
    (home / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "nobody/nothing"}))
    (home / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (home / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF another")
    loaded = load_model("home/model.gguf")
    assert loaded.model.name_or_path == str(path) and loaded.model.config.num_hidden_layers == 2
    own = tiny[1]("the film", add_special_tokens=False)["input_ids"]
    assert loaded.tokenizer("the film")["input_ids"] == own


def pieces_of(tokenizer, text: str) -> list[str]:
    """The pieces of a text that no token goes beyond."""
    spelling = {letter: byte for byte, letter in bytes_to_unicode().items()}
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(spelling[letter] for letter in piece).decode() for piece, _ in pieces]


def test_digits_stand_alone_where_the_tokenizer_says_so(tiny, tiny_file, tmp_path):
    """The space before a digit is a piece of its own then, and two of them are one."""
    text, alone = "a  2024\n  3 ", ["a", "  ", "2", "0", "2", "4", "\n  ", "3", " "]
    assert pieces_of(load_model(str(tiny_file)).tokenizer, text) == alone
    plain = load_model(str(write_gguf(tmp_path / "plain.gguf", *tiny, pre="gpt-2"))).tokenizer
    assert pieces_of(plain, text) == ["a", " ", " 2024", "\n ", " 3", " "]


def test_a_word_of_the_vocabulary_is_whole_behind_bos_where_the_tokenizer_says_so(tiny, tmp_path):
    """As llama.cpp has it for Llama 3 and others, whose files need not say that they begin with BOS."""
    model, tokenizer = tiny
    own = json.loads(tokenizer.backend_tokenizer.to_str())
    word = max((token for token in own["model"]["vocab"] if token.startswith("Ġ")), key=len)
    del own["model"]["merges"][1:]  # so that a word is whole because it is in the vocabulary
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer.from_str(json.dumps(own)))
    for name in ("bos", "eos", "pad", "unk"):
        setattr(bare, f"{name}_token", getattr(tokenizer, f"{name}_token"))
    text, whole = word.replace("Ġ", " "), [own["model"]["vocab"][word]]
    path = write_gguf(tmp_path / "llama3.gguf", model, bare, pre="llama-bpe")
    assert load_model(str(path)).tokenizer(text)["input_ids"] == [0, *whole]
    more = {"tokenizer.ggml.add_bos_token": False}
    path = write_gguf(tmp_path / "said.gguf", model, bare, pre="llama-bpe", more=more)
    assert load_model(str(path)).tokenizer(text)["input_ids"] == whole


def test_what_transformers_does_not_read_is_said(tiny, tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", *tiny, pre="viking", more={"llama.rope.scaling.type": "yarn"})
    split, scaling = load_model(str(path)).notices
    assert "'viking'" in split and "RoPE" in scaling


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    assert smollm2.notices == () and model.dtype == torch.float32 and smollm2.max_length == 8192
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert prompt["input_ids"].tolist() == [[504, 3575, 282, 4649, 314]]  # no BOS, as the file says
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)[0, 5:]
    assert tokenizer.decode(answer) == " Paris."


@pytest.mark.slow
@pytest.mark.model
def test_the_tokenizer_of_smollm2_is_the_one_of_its_file(smollm2):
    tokenizer = smollm2.tokenizer
    named = {name: getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    assert named == {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>", "unk": "<|endoftext|>"}
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text)["input_ids"]
    assert ids.count(1) == 3 and ids.count(2) == 2 and tokenizer.decode(ids) == text
    tokens = tokenizer.tokenize("a  2024 x\n  3")  # GPT-2's pieces would be "a", " ", " 2024", " x", "\n ", " 3"
    assert tokens == ["a", "ĠĠ", "2", "0", "2", "4", "Ġx", "ĊĠĠ", "3"]


def refusals():
    """Name -> (what is wrong with a file, given its bytes; words of the sentence)."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, 1 << 40, 1 << 40)
    return {
        "cut in its weights": (lambda data: data[:-100], "ends after"),
        "cut in its header": (lambda data: data[:5000], "cannot be read"),
        "of four bytes": (lambda _: b"GGUF", "cannot be read"),
        "with an absurd header": (lambda data: header + data[24:], "cannot be read"),
        "of another format": (lambda data: b"PK\3\4" + data, "not a GGUF file"),
        "empty": (lambda _: b"", "not a GGUF file"),
    }


@pytest.mark.parametrize("fault", refusals())
def test_a_damaged_file_is_one_sentence(fault, tiny_file, tmp_path):
    damage, words = refusals()[fault]
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(tiny_file.read_bytes()))
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(8))
    refused(train(path, rows, tmp_path / "run"), "model.name", str(path), words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"general.type": "adapter"}, "adapter"),
        ({"general.type": "mmproj"}, "'mmproj'"),
        ({"split.count": 2}, "2 parts"),
        ({"general.architecture": "unheard-of"}, "unheard-of"),
    ],
)
def test_a_file_of_something_else_is_one_sentence(more, words, tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, more.get("general.architecture", "llama"))
    for key, value in more.items():
        if key != "general.architecture":
            {int: writer.add_uint16, str: writer.add_string}[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RequestError, match=words):
        load_model(str(path))


def test_parts_other_files_and_missing_ones_are_one_sentence(tiny_file, tmp_path):
    part = tmp_path / "tiny-00001-of-00003.gguf"
    part.write_bytes(tiny_file.read_bytes())
    for name, words in {
        str(part): "3 parts",
        str(tmp_path): f"by its path: {part}",
        str(tmp_path / "none.gguf"): "no file",
        "none.gguf": "no file",
        str(write_rows(tmp_path / "rows.jsonl", label_rows(4))): "GGUF file",
    }.items():
        with pytest.raises(RequestError, match=r"^model\.name") as error:
            load_model(name)
        assert words in str(error.value)
    refused(tezo("eval", tmp_path, "--data", tmp_path / "rows.jsonl"), f"by its path: {part}")
    whole = tmp_path / "tiny-00001-of-00001.gguf"
    whole.write_bytes(tiny_file.read_bytes())
    assert load_model(str(whole)).kind == "causal"
    with pytest.raises(RequestError, match=r"model.quantization is nf4.*GGUF"):
        load_model(str(whole), quantization="nf4")


def test_a_transformers_that_reads_few_quantizations_is_named(tiny_file, monkeypatch):
    monkeypatch.setattr("tezo.models.gguf.transformers.__version__", "5.17.0")
    with pytest.raises(RequestError, match=r"reads from 5.18 on, and 5.17.0 is installed; upgrade it"):
        load_model(str(tiny_file))


def test_the_extra_is_named_where_it_is_missing(tiny_file, monkeypatch):
    from tezo.models import gguf as gguf_files

    monkeypatch.setattr(gguf_files, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"needs the package gguf: pip install 'tezo\[gguf\]'"):
        load_model(str(tiny_file))


@pytest.fixture(scope="module")
def packed_file(tiny, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("packed") / "tiny.gguf", *tiny, packed=gguf.GGMLQuantizationType.Q4_1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", label_rows(24))


@pytest.fixture(scope="module")
def run(packed_file, rows, tmp_path_factory):
    """Of a base whose weights are packed as SmolLM2's are."""
    output = tmp_path_factory.mktemp("tuned") / "run"
    done = train(packed_file, rows, output, "--set", "train.keep_best=false")
    assert done.code == 0, done.err
    return output


def exported(run, form, output):
    done = tezo("export", run, "--output", output, "--format", form)
    assert done.code == 0, done.err
    return output


def added(adapter_file) -> dict[str, torch.Tensor]:
    """What llama.cpp adds to each weight: alpha / rank times B A."""
    reader = gguf.GGUFReader(adapter_file)
    alpha, halves = (
        reader.fields["adapter.lora.alpha"].contents(),
        {t.name: torch.tensor(t.data) for t in reader.tensors},
    )
    names = [name.removesuffix(".lora_a") for name in halves if name.endswith(".lora_a")]
    pairs = {name: (halves[f"{name}.lora_b"], halves[f"{name}.lora_a"]) for name in names}
    return {name: alpha / len(a_RI) * b_OR @ a_RI for name, (b_OR, a_RI) in pairs.items()}


def check_both_exports(base_file, merged, adapter_file, heads=(HEADS, GROUPS)) -> int:
    """The base's own tensors with what the adapter adds are the merged weights; the number of adapted matrices."""
    base = {tensor.name: tensor for tensor in gguf.GGUFReader(base_file).tensors}
    theirs = {
        name: tensor for name, tensor in load_file(merged / "model.safetensors").items() if name != "lm_head.weight"
    }
    layers = 1 + max(int(name.split(".")[2]) for name in theirs if ".layers." in name)
    names, changes = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers), added(adapter_file)
    for theirs_name, weight in theirs.items():
        name = names.get_name(theirs_name, (".weight",))
        own = torch.tensor(gguf.quants.dequantize(base[name].data, base[name].tensor_type)).reshape(weight.shape)
        wanted = own + changes.get(name, torch.zeros(()))
        torch.testing.assert_close(in_llama_cpp_order(name, weight, heads), wanted, rtol=0, atol=1e-6)
    assert set(changes) <= set(base)
    return sum(bool(change.any()) for change in changes.values())


def test_a_run_of_a_file_is_exported_for_transformers_and_for_llama_cpp(run, packed_file, rows, tmp_path):
    merged = exported(run, "merged", tmp_path / "merged")
    adapter = exported(run, "gguf-lora", tmp_path / "adapter") / "adapter.gguf"
    assert check_both_exports(packed_file, merged, adapter) == 14
    fields = gguf.GGUFReader(adapter).fields
    assert fields["general.architecture"].contents() == "llama" and fields["general.type"].contents() == "adapter"
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    answers = {}
    for model in (run, merged):
        output = tmp_path / f"{model.name}.jsonl"
        done = tezo("predict", model, "--input", rows, "--output", output)
        assert done.code == 0, done.err
        answers[model] = read_jsonl(output)
    for row, other in zip(answers[run], answers[merged], strict=True):
        assert row.pop("probability") == pytest.approx(other.pop("probability"), abs=1e-3)
        assert row.pop("probabilities") == pytest.approx(other.pop("probabilities"), abs=1e-3)
    assert answers[run] == answers[merged] and len(answers[run]) == 24
    one, other = (json.loads(tezo("eval", model, "--data", rows, "--json").out) for model in (run, merged))
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert tezo("eval", packed_file, "--data", rows).code == 0


def test_a_run_finds_its_file_again(run, packed_file, tiny, tmp_path):
    """Replay and resume; a file with other weights in its place is noticed."""
    assert tezo("replay", run, "--output", tmp_path / "again").code == 0
    saved = "adapter/adapter_model.safetensors"
    assert (tmp_path / "again" / saved).read_bytes() == (run / saved).read_bytes()
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(packed_file.read_bytes())
    assert tezo("export", run, "--output", tmp_path / "lora", "--model", moved).code == 0
    other = write_gguf(tmp_path / "other.gguf", *tiny, packed=gguf.GGMLQuantizationType.Q8_0)
    refused(tezo("export", run, "--output", tmp_path / "out", "--model", other), "model")
    assert tezo("train", "--output", run, "--resume").code == 0


@pytest.mark.slow
def test_doctor_says_what_a_file_can_be_tuned_with(packed_file):
    report = json.loads(tezo("doctor", "--model", packed_file, "--json").out)
    assert report["model"]["dtype"] == "torch.float32" and report["model"]["linear_parameters"] == 2 * 9216
    assert set(report["embedded"]) == {"embedded:all-minilm-l6-v2", "embedded:smollm2-135m"}


@pytest.mark.parametrize("method", ["tezo-adam", "tezo"])
def test_a_model_that_transformers_read_from_a_file_is_tuned_and_saved(method, packed_file, tmp_path):
    """As an object, which transformers itself refuses to save and names by its folder. Its tokenizer is another one."""
    folder, name = packed_file.parent, packed_file.name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
    with pytest.raises(ValueError, match="quantized with gguf"):
        model.save_pretrained(tmp_path / "refused")
    tokenizer = load_model(str(packed_file)).tokenizer
    options = {"method": method, "steps": 2, "batch_size": 4, "lr": 1e-3}
    run = tezo_package.train(model, label_rows(12), tokenizer=tokenizer, output=tmp_path / "run", **options)
    run.export(tmp_path / "merged", "merged")
    assert load_file(tmp_path / "merged/model.safetensors")
    found = tezo_package.open_run(tmp_path / "run").evaluate(label_rows(8))  # the base by its name
    assert found == pytest.approx(run.evaluate(label_rows(8)), abs=1e-6)


def test_from_python_a_file_is_given_by_its_path(packed_file, tmp_path):
    sizes = {"steps": 1, "batch_size": 4, "lr": 1e-3}
    run = tezo_package.train(packed_file, label_rows(12), method="head-feedback", output=tmp_path / "run", **sizes)
    assert run.predict(label_rows(2))
    text = (tmp_path / "run/adapter/README.md").read_text()
    assert "base_model" not in text.split("---")[1] and str(tmp_path) not in text and "vllm" not in text
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        code = block.replace(HERE, str(tmp_path / "run/adapter")).replace("FOLDER", str(packed_file.parent))
        space: dict = {}
        exec(code, space)
        ids = torch.arange(5, 15)[None]
        torch.testing.assert_close(logits(space["model"].eval(), ids), logits(run.model, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"placement": "cpu"}, "causal"), ({"placement": "spread"}, "causal"), ({"kind": "encoder"}, "encoder"),
     ({"untie_head": True}, "causal")],
)  # fmt: skip
def test_other_ways_of_loading_take_a_file_too(options, kind, tiny, tiny_file):
    loaded, ids = load_model(str(tiny_file), **options), torch.arange(5, 15)[None]
    assert loaded.kind == kind
    with torch.no_grad():
        wanted = tiny[0](input_ids=ids, output_hidden_states=True)
        actual = loaded.model(input_ids=ids)
    if kind == "causal":
        torch.testing.assert_close(actual.logits, wanted.logits, rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(actual.last_hidden_state, wanted.hidden_states[-1], rtol=0, atol=1e-5)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_is_tuned_and_exported(tmp_path):
    """Through the command line; the file's own 272 tensors with the adapter's are the merged folder's."""
    rows = write_rows(tmp_path / "rows.jsonl", completion_rows(6))
    options = {"method__name": "tezo", "method__lr": 1e-4, "method__rho": 1e-4, "train__batch_size": 2}
    keeping = ("--set", "train.keep_best=false")
    done = train("embedded:smollm2-135m", rows, tmp_path / "run", *keeping, steps=1, **options)
    assert done.code == 0, done.err
    merged = exported(tmp_path / "run", "merged", tmp_path / "merged")
    adapter = exported(tmp_path / "run", "gguf-lora", tmp_path / "adapter") / "adapter.gguf"
    assert check_both_exports(embedded_source("embedded:smollm2-135m"), merged, adapter, heads=(9, 3)) == 210
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, 5:]) == " Paris" and tokenizer.chat_template


@pytest.mark.skipif(not DECODER.is_dir(), reason="the pretrained decoder is not there")
@pytest.mark.parametrize("space", [True, False])
def test_a_tokenizer_of_sentence_pieces_splits_as_llama_cpp_does(space, tmp_path):
    known = transformers.AutoTokenizer.from_pretrained(DECODER)
    file = write_sentence_pieces(tmp_path / "pieces.gguf", known, space=space)
    tokenizer, notices = gguf_tokenizer(str(file))
    texts = [
        "Once upon a time",
        " Once",
        "  two  spaces ",
        "<s>[INST] hi [/INST] ok</s>",
        "<s> hi",
        "x </s> y",
        "a\n b",
        "",
    ]
    for text in texts if space else []:  # the folder's is as llama.cpp's with a space
        assert (
            tokenizer(text, add_special_tokens=False)["input_ids"] == known(text, add_special_tokens=False)["input_ids"]
        )
    assert not notices
    if find_library() is not None:
        assert [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts] == split_by_llama_cpp(
            file, texts
        )
