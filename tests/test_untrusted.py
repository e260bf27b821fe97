"""Files from a stranger: whatever they hold, they are read or refused with a sentence; nothing of theirs runs."""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from folders import label_rows, model_folder, refused, settings, tezo, write_rows
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tezo.models.lora import load_adapter
from tezo.runs.checkpoints import load_checkpoint
from tezo.runs.files import write_manifest
from tezo.runs.folder import FILES
from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    rows = write_rows(root / "rows.jsonl", label_rows(8))
    flags = settings(method__rank=4)
    done = tezo("train", "--model", root / "opt", "--data", rows, "--steps", 2, "--output", root / "run", *flags)
    assert done.code == 0, done.err
    return root / "run"


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def copy_of(folder, tmp_path_factory):
    return shutil.copytree(folder, tmp_path_factory.mktemp("copy") / folder.name)


@given(name=st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]), data=st.binary(max_size=300),
       place=st.floats(0, 1), whole=st.booleans())  # fmt: skip
def test_any_bytes_in_an_adapter_are_read_or_refused(run, tmp_path_factory, name, data, place, whole):
    adapter = copy_of(run / "adapter", tmp_path_factory)
    before = (adapter / name).read_bytes()
    at = int(place * len(before))
    (adapter / name).write_bytes(data if whole else before[:at] + data + before[at + len(data) :])
    try:
        load_adapter(adapter)
    except RequestError as error:
        assert "\n" not in str(error)


@given(name=st.sampled_from(["manifest.json", "state.json", "tensors.safetensors"]), data=st.binary(max_size=300))
def test_any_bytes_in_a_checkpoint_are_refused(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("run") / "checkpoint-3"
    folder.mkdir()
    save_file({"run/x": torch.zeros(2)}, folder / "tensors.safetensors")
    (folder / "state.json").write_text('{"step": 3, "best": null}')
    (folder / name).write_bytes(data)
    with pytest.raises(UntrustedError):
        load_checkpoint(folder)


@pytest.mark.parametrize("header", [0xFFFFFFFFFFFFFFFF, 1 << 40, 100_000_001])
def test_a_header_that_claims_gigabytes_takes_no_memory(run, tmp_path_factory, header):
    adapter = copy_of(run / "adapter", tmp_path_factory)
    (adapter / "adapter_model.safetensors").write_bytes(struct.pack("<Q", header) + b"{}")
    with pytest.raises(RequestError, match="not an adapter that can be read"):
        load_adapter(adapter)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", "[]", "null", '{"peft_type": "LORA", "r": 1e999, "lora_alpha": 1e999}']
)
def test_a_forged_adapter_configuration_is_refused(run, tmp_path_factory, text):
    adapter = copy_of(run / "adapter", tmp_path_factory)
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(RequestError):
        load_adapter(adapter)


def test_an_adapter_of_other_shapes_is_refused(run, tmp_path_factory):
    adapter = copy_of(run / "adapter", tmp_path_factory)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in tensors:
        if key.endswith("lora_A.weight"):
            tensors[key] = tensors[key][:, :-1].contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors")
    tuned = copy_of(run, tmp_path_factory)
    shutil.rmtree(tuned / "adapter")
    shutil.copytree(adapter, tuned / "adapter")
    write_manifest(tuned, FILES)  # a matching one: it is a stranger's
    refused(tezo("eval", tuned, "--data", run.parent / "rows.jsonl"), "weight of", "base model that it was trained on")
    tensors = {key: value[:2] if key.endswith("lora_A.weight") else value for key, value in tensors.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(RequestError, match="does not have the shapes of rank 8"):
        load_adapter(adapter)


def test_an_adapter_reads_nothing_outside_its_folder(run, tmp_path_factory, tmp_path):
    adapter = copy_of(run / "adapter", tmp_path_factory)
    shutil.move(adapter / "adapter_model.safetensors", tmp_path / "outside.safetensors")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(RequestError, match="missing, or is a link"):
        load_adapter(adapter)


def test_a_pickle_in_the_place_of_weights_is_not_opened(run, tmp_path_factory, tmp_path):
    mark = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Payload(mark)))
    mark.rmdir()  # the payload works
    root = copy_of(run.parent, tmp_path_factory)
    for file in ("opt/model.safetensors", "run/adapter/adapter_model.safetensors"):
        (root / file).unlink()
    for file in ("opt/pytorch_model.bin", "run/adapter/adapter_model.bin", "run/checkpoint-1/training_args.bin"):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_bytes(pickle.dumps(Payload(mark)))
    refused(tezo("eval", root / "opt", "--data", root / "rows.jsonl"), "safetensors")
    refused(tezo("eval", root / "run", "--data", root / "rows.jsonl"), "adapter")
    prefixed = tezo("train", "--model", run.parent / "opt", "--data", root / "rows.jsonl", "--steps", 1,
                    "--method", "mezo", "--output", root / "lora", *settings(model__peft="lora"))  # fmt: skip
    assert prefixed.code == 0, prefixed.err
    (root / "lora/adapter/adapter_model.safetensors").unlink()
    (root / "lora/adapter/adapter_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    refused(tezo("eval", root / "lora", "--data", root / "rows.jsonl"), "adapter")
    assert not mark.exists()


def test_rows_are_parsed_and_never_run(run, tmp_path):
    rows = tmp_path / "rows.jsonl"
    fields = [("{text.__class__.__mro__}", "__import__('os').abort()"), ("{mask}", "x")]
    lines = [{"text": text, "label": label} for text, label in fields]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = tezo("eval", run.parent / "opt", "--data", rows, "--json")
    assert done.code in (0, 2) and "Traceback" not in done.err
    rows.write_text('{"text": ' + "[" * 100_000)
    refused(tezo("eval", run.parent / "opt", "--data", rows), "rows.jsonl")
