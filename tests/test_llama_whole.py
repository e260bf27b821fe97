"""A whole GGUF file with a change in it: only the changed matrices differ, packed as llama.cpp packs them."""

import json

import gguf
import numpy as np
import pytest
import torch
from architectures import TYPES, makes_models, packed, write_model
from folders import bpe_tokenizer, label_rows, model_folder, refused, tezo, train, write_rows
from gguf_files import tiny_llama, write_gguf
from test_llama_files import log_probs, random_change

import tezo as library
from tezo.engines.llama_cpp import values as unpacking
from tezo.engines.llama_cpp.file import GgufHeader
from tezo.engines.llama_cpp.library import load_library
from tezo.engines.llama_cpp.loading import load_by_file
from tezo.engines.llama_cpp.values import unpack
from tezo.engines.llama_cpp.whole import write_whole
from tezo.system.errors import RequestError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not makes_models(), reason="this llama.cpp does not make the tensors of a model"),
]
SHARE = {"F32": 1e-6, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2}
"""Largest error of packing, as a part of the matrix; for the others 0.2."""


def by_tensor(change):
    return {f"{module}.weight": pair for module, pair in change.items()}


def read(path):
    """(metadata, name -> (type, values in float32, bytes))."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    unpacked = {own.name: gguf.quants.dequantize(own.data, own.tensor_type) for own in reader.tensors}
    return fields, {own.name: (own.tensor_type, unpacked[own.name], bytes(own.data)) for own in reader.tensors}


@pytest.mark.parametrize("kind", TYPES)
def test_changed_matrices_are_packed_in_their_own_type_and_all_else_is_copied(kind, tmp_path):
    base = write_model(tmp_path / "base.gguf", "gemma3", kind)
    change = random_change(load_by_file(str(base)))
    written = write_whole(base, tmp_path / "whole.gguf", by_tensor(change))
    (before, old), (after, new) = read(base), read(tmp_path / "whole.gguf")
    assert before == after and [*old] == [*new]
    for name, (own, values, data) in old.items():
        pair = by_tensor(change).get(name)
        if pair is None:
            assert new[name][2] == data
            continue
        a_RI, b_OR = pair
        wanted = values + (b_OR @ a_RI).numpy()
        assert new[name][0] == own and new[name][2] == packed(wanted, own).tobytes()
        assert np.square(new[name][1] - wanted).sum() <= SHARE.get(kind, 0.2) ** 2 * np.square(wanted).sum()
    assert {own.name for own in written} == set(by_tensor(change))
    assert all(own.before == own.after for own in written)
    lost = {own.name: own.lost for own in written}
    name, (a_RI, b_OR) = next(iter(by_tensor(change).items()))
    moved = (b_OR @ a_RI).numpy()
    error = np.linalg.norm(new[name][1] - old[name][1] - moved) / np.linalg.norm(moved)
    assert lost[name] == pytest.approx(error, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("architecture", ["gemma3", "falcon-h1"])
def test_llama_cpp_reads_it_as_the_base_with_the_adapter(architecture, tmp_path):
    base = write_model(tmp_path / "base.gguf", architecture)
    loaded = load_by_file(str(base))
    change = random_change(loaded)
    write_whole(base, tmp_path / "whole.gguf", by_tensor(change))
    mine, plain = log_probs(loaded.engine, change), log_probs(loaded.engine)
    whole = log_probs(load_by_file(str(tmp_path / "whole.gguf")).engine)
    assert (whole - mine).norm() <= 1e-2 * (mine - plain).norm()


def test_changed_matrices_may_be_kept_in_a_finer_type(tmp_path):
    base = write_model(tmp_path / "base.gguf", "qwen3moe", "Q4_K_M")
    change = by_tensor(random_change(load_by_file(str(base))))
    lost = {}
    for kept in (None, "q8_0", "F16"):
        output = tmp_path / f"{kept}.gguf"
        written = write_whole(base, output, change, keep_tuned=kept)
        lost[kept] = sum(own.lost for own in written) / len(written)
        if kept is not None:
            assert {own.after for own in written} == {kept.lower()}
        assert torch.isfinite(log_probs(load_by_file(str(output)).engine)).all()
        stored = {name: own.kind for name, own in GgufHeader(output).tensors.items()}
        assert all(stored[name] == own.kind for name, own in GgufHeader(base).tensors.items() if name not in change)
    assert lost[None] > 4 * lost["q8_0"] > 16 * lost["F16"]


@pytest.mark.parametrize("keep_tuned", [None, "q8_0"])
def test_with_no_change_the_file_is_the_same_to_the_byte(tmp_path, keep_tuned):
    """Of a run that took no step all factors B are zero; IQ4_NL rounds what is packed again."""
    base = write_model(tmp_path / "base.gguf", "qwen3", "IQ4_NL")
    change = by_tensor(random_change(load_by_file(str(base))))
    for number, none in enumerate(({}, {name: (a_RI, 0 * b_OR) for name, (a_RI, b_OR) in change.items()})):
        assert write_whole(base, tmp_path / f"{number}.gguf", none, keep_tuned=keep_tuned) == []
        assert (tmp_path / f"{number}.gguf").read_bytes() == base.read_bytes()


def test_a_process_that_dies_leaves_what_was_there(tmp_path, monkeypatch):
    base, output = write_model(tmp_path / "base.gguf", "qwen3"), tmp_path / "whole.gguf"
    change = by_tensor(random_change(load_by_file(str(base))))
    output.write_bytes(b"before")
    from tezo.engines.llama_cpp import whole

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(whole, "pack", dies)
    with pytest.raises(KeyboardInterrupt):
        write_whole(base, output, change)
    assert output.read_bytes() == b"before" and {own.name for own in tmp_path.iterdir()} == {base.name, output.name}
    monkeypatch.undo()
    write_whole(base, output, change)
    assert len(output.read_bytes()) == len(base.read_bytes())


def test_a_matrix_with_rows_that_a_type_does_not_divide_stays_in_its_own(tmp_path):
    base, output = write_model(tmp_path / "base.gguf", "mamba", "Q4_K_M"), tmp_path / "whole.gguf"
    change = {
        name: (torch.full((1, 16), 0.1), torch.full((stored.size // (16 * 2), 1), 0.1))
        for name, stored in GgufHeader(base).tensors.items()
        if name.endswith("ssm_dt.weight")
    }
    written = write_whole(base, output, change, keep_tuned="q8_0")
    assert written and {(own.before, own.after) for own in written} == {("f16", "f16")}
    assert max(own.lost for own in written) < 0.1


def test_what_cannot_be_packed_is_one_sentence_and_nothing_is_written(tmp_path):
    base, output = write_model(tmp_path / "base.gguf", "qwen3", "Q4_K_M"), tmp_path / "whole.gguf"
    change = by_tensor(random_change(load_by_file(str(base))))
    name, (a_RI, b_OR) = next(iter(change.items()))
    for own, kept, words in [
        (
            {"blk.9.attn_q.weight": (a_RI, b_OR)},
            None,
            "blk.9.attn_q.weight .*has none of this name.*give the base",
        ),
        ({name: (a_RI[:, :64], b_OR)}, None, "64 values, and .* has one of .* bytes"),
        ({name: (a_RI, b_OR)}, "q9_9", "keep_tuned is 'q9_9'.*q8_0, f16 or f32"),
        ({name: (a_RI, b_OR)}, "iq2_xxs", "iq2_xxs, which is packed by an importance matrix alone.*--keep-tuned q8_0"),
        ({name: (a_RI, b_OR)}, "i32", "cannot be packed as i32.*--keep-tuned f16"),
    ]:
        with pytest.raises(RequestError, match=words):
            write_whole(base, output, own, keep_tuned=kept)
        assert not output.exists()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(base.read_bytes()[:-1000])
    with pytest.raises(RequestError, match="ends after"):
        write_whole(cut, output, {})


def test_a_packed_row_is_unpacked_to_what_it_was_packed_of():
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    lib = load_library()
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q6_K", "Q2_K", "MXFP4"):
        number = int(gguf.GGMLQuantizationType[kind])
        assert lib.ggml_type_name(number).decode().lower() == kind.lower()
        error = np.linalg.norm(unpack(lib, packed(x, number), number) - x) / np.linalg.norm(x)
        assert error < SHARE.get(kind, 0.4)


def test_values_that_ggml_unpacks_are_those_of_its_definition(monkeypatch):
    """To the bit those of the package gguf: by ggml's own function, and where the library has other fields."""
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    lib, kinds = load_library(), ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "MXFP4")
    for kind in map(gguf.GGMLQuantizationType.__getitem__, kinds):
        bits = packed(x, int(kind))
        expected = gguf.quants.dequantize(bits, kind)
        assert (unpacking.unpacker(lib, kind) is None) == (kind.name == "F32")
        assert np.array_equal(unpack(lib, bits, kind), expected)
        assert np.array_equal(unpack(lib, np.repeat(bits, 2, 0)[::2], kind), expected)  # rows that lie apart
        with monkeypatch.context() as patch:
            patch.setattr(unpacking._Traits, "size", 7, raising=False)
            assert unpacking.unpacker(lib, kind) is None and np.array_equal(unpack(lib, bits, kind), expected)


@pytest.mark.parametrize("kind", ["F32", "Q4_K_M"])
def test_a_run_is_exported_as_a_whole_file_with_the_losses_of_both(kind, tmp_path):
    base, rows = (
        write_model(tmp_path / "base.gguf", "gemma3", kind),
        write_rows(tmp_path / "rows.jsonl", label_rows(16)),
    )
    run, settings = tmp_path / "run", {"method__name": "tezo-cadam", "method__lr": 0.5, "train__keep_best": False}
    done = train(base, rows, run, "--engine", "llama.cpp", "--test", rows, steps=3, train__batch_size=8, **settings)
    assert done.code == 0, done.err
    done = tezo("export", run, "--output", tmp_path / "out", "--format", "gguf", "--json")
    assert done.code == 0, done.err
    found, summary = json.loads(done.out), json.loads((run / "summary.json").read_text())
    with_adapter, packed_in = found["losses"]
    exact = 1e-5 if kind == "F32" else 1e-3  # packed products round their inputs, in groups of tokens
    assert found["matrices"] == 14 and found["notices"] == [] and "16 rows" in found["rows"]
    assert with_adapter == pytest.approx(summary["after"]["loss"], abs=exact)
    assert abs(packed_in - with_adapter) <= (1e-4 if kind == "F32" else 0.5)
    own = tezo("eval", tmp_path / "out/model.gguf", "--set", "model.engine=llama.cpp", "--data", rows, "--json")
    assert json.loads(own.out)["loss"] == pytest.approx(packed_in, abs=exact)
    text = (tmp_path / "out/Modelfile").read_text()
    assert text.startswith("FROM ./model.gguf\nTEMPLATE") and "PARAMETER stop" in text
    said = tezo("export", run, "--output", tmp_path / "finer", "--format", "gguf", "--keep-tuned", "q8_0").out
    assert "14 matrices changed" in said and "llama-server -m" in said and "ollama create" in said
    stored = {name: own.kind for name, own in GgufHeader(tmp_path / "finer/model.gguf").tensors.items()}
    assert stored["blk.0.attn_q.weight"] == int(gguf.GGMLQuantizationType.Q8_0)


def test_a_run_in_torch_on_a_file_is_exported_too(tmp_path):
    """Its layers have transformers' names, and rows of queries and keys another order."""
    tokenizer = bpe_tokenizer(chat=True)
    base = write_gguf(tmp_path / "base.gguf", tiny_llama(len(tokenizer)), tokenizer)
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(16))
    run, settings = tmp_path / "run", {"method__name": "tezo-cadam", "method__lr": 0.05, "train__keep_best": False}
    assert train(base, rows, run, "--test", rows, steps=3, train__batch_size=8, **settings).code == 0
    done = tezo("export", run, "--output", tmp_path / "out", "--format", "gguf", "--json")
    assert done.code == 0, done.err
    with_adapter, packed_in = json.loads(done.out)["losses"]
    after = json.loads((run / "summary.json").read_text())["after"]["loss"]
    assert abs(packed_in - with_adapter) < 1e-4 and abs(with_adapter - after) < 1e-3
    library.open_run(run).export(tmp_path / "again", "gguf")
    assert (tmp_path / "again/model.gguf").read_bytes() == (tmp_path / "out/model.gguf").read_bytes()


def test_exports_that_are_not_to_be_had_are_one_sentence(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(16))
    folder, run = model_folder(tmp_path, "llama"), tmp_path / "run"
    assert train(folder, rows, run, steps=1, method__name="tezo").code == 0
    ask = ("export", run, "--output", tmp_path / "out", "--format")
    refused(tezo(*ask, "gguf"), "a base in GGUF", folder, "--model", "convert_hf_to_gguf.py")
    refused(tezo(*ask, "lora", "--keep-tuned", "q8_0"), "--keep-tuned is q8_0", "--format gguf")
    assert not (tmp_path / "out").exists()
