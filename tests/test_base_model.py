"""A base model that was changed by a bit, in its configuration or its tokenizer is not the one of the run."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from folders import model_and_rows, model_folder, refused, saved, tezo, tiny_model, tokenizer_for
from kills import contents
from safetensors.torch import load_file, save_file
from short_runs import config, stopped

from tezo.models import identity
from tezo.models.identity import check_model
from tezo.models.in_file import load_folder
from tezo.models.loading import from_objects, load_model
from tezo.models.stored import stamp
from tezo.system.errors import RequestError
from tezo.training.api import load_adapter
from tezo.training.job import prepare
from tezo.training.loop import train
from tezo.training.resume import log_header, with_dtype_of
from tezo.training.settings import read_run_config


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A llama that talks, rows, a run that has ended and one that was stopped."""
    root = model_and_rows(tmp_path_factory.mktemp("home"), 8)
    model_folder(root, "llama", chat=True)
    made = config(root, model="llama-chat")
    train(made, root / "ended")
    stopped(made, root / "begun", 5)
    return root


def flip(weights: Path, draw: random.Random) -> None:
    """Flips the highest bit of the exponent of one weight."""
    tensors = load_file(weights)
    largest = max(tensor.numel() for tensor in tensors.values())
    tensor = tensors[draw.choice(sorted(name for name in tensors if tensors[name].numel() == largest))].view(-1)
    place = draw.randrange(tensor.numel())
    tensor.view(torch.int32)[place] ^= 1 << 30
    save_file(tensors, weights, metadata={"format": "pt"})


def test_each_of_24_flipped_bits_changes_the_fingerprint_and_is_found(tmp_path):
    draw, base, moved = random.Random(0), tmp_path / "base", tmp_path / "moved"
    tokenizer = tokenizer_for("llama")
    saved(tiny_model("llama", len(tokenizer), intermediate_size=2048), tokenizer, base)
    known = load_model(str(base)).fingerprint
    shutil.copytree(base, moved)
    for number in range(24):
        shutil.copy(base / "model.safetensors", moved)
        flip(moved / "model.safetensors", draw)
        own = load_model(str(moved)).fingerprint
        assert {part for part in known if known[part] != own[part]} == {"weights", "stored"}, number
        with pytest.raises(RequestError, match="its weights are not those"):
            check_model(known, own)


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tree = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(tree | changes))

    return edit


def other_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("\n", " \n"))


def other_rules(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('{"type": "Whitespace"}', '{"type": "WhitespaceSplit"}'))
    tree = json.loads(path.read_text())
    tree["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    path.write_text(json.dumps(tree))


def other_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    words = tree["model"]["vocab"]
    words["good"], words["bad"] = words["bad"], words["good"]
    path.write_text(json.dumps(tree))


CHANGES = {
    "weights": (lambda folder: flip(folder / "model.safetensors", random.Random(1)), "its weights are not those"),
    "rope": (edited(rope_parameters={"rope_theta": 500.0, "rope_type": "default"}), "rope_parameters is"),
    "norm": (edited(rms_norm_eps=1e-2), "rms_norm_eps is 0.01 in its configuration, and the run began with 1e-06"),
    "template": (other_template, "the chat template of its tokenizer"),
    "rules": (other_rules, "the rules of its tokenizer"),
    "vocabulary": (other_vocabulary, "the vocabulary of its tokenizer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_command_names_what_is_not_as_it_was(home, tmp_path, change):
    make, said = CHANGES[change]
    moved = Path(shutil.copytree(home / "llama-chat", tmp_path / "moved"))
    make(moved)
    at = ("--set", f"model.name={moved}")
    refused(tezo("eval", home / "ended", "--data", home / "test.jsonl", *at), said)
    refused(tezo("replay", home / "ended", "--model", moved, "--output", tmp_path / "out"), said)
    refused(tezo("export", home / "ended", "--model", moved, "--output", tmp_path / "out"), said)
    model = transformers.AutoModelForCausalLM.from_pretrained(moved)
    if change in ("weights", "rope", "norm"):
        with pytest.raises(RequestError, match=said.split()[0]):
            load_adapter(model, home / "ended" / "adapter")
    run = Path(shutil.copytree(home / "begun", tmp_path / "run"))
    name = home / "llama-chat"
    try:  # a run goes on with the name that it has
        name.rename(home / "kept")
        shutil.copytree(moved, name)
        done = tezo("train", "--output", run, "--resume")
        if change in ("rules", "vocabulary") and "training rows" in done.err:
            said = "training rows are not those"
        refused(done, said)
    finally:
        shutil.rmtree(name)
        (home / "kept").rename(name)
    assert not (tmp_path / "out").exists()


def test_the_base_itself_is_the_same_by_its_name_in_memory_and_after_it_was_used(home):
    base = str(home / "llama-chat")
    loaded = load_model(base)
    loaded.tokenizer(["a", "good film"], padding=True, truncation=True, max_length=2)
    again = from_objects(loaded.model, loaded.tokenizer)
    plain = transformers.AutoTokenizer.from_pretrained(base)
    fresh = from_objects(transformers.AutoModelForCausalLM.from_pretrained(base), plain)
    in_memory = {part: value for part, value in loaded.fingerprint.items() if part != "stored"}
    assert in_memory == again.fingerprint == fresh.fingerprint
    handles = load_adapter(fresh.model, home / "ended" / "adapter")
    assert handles


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("generation_config.json", {"temperature": 0.3, "do_sample": True}, "its generation configuration, which is"),
        ("config.json", {"use_cache": False}, "its configuration, which is saved with the model"),
    ],
)
def test_what_is_saved_with_a_model_is_of_the_base_that_the_run_began_with(home, tmp_path, base, file, change, named):
    made, run = config(home, "mezo", model="llama-chat"), tmp_path / "run"
    train(made, tmp_path / "whole")
    stopped(made, run, 5)
    kept = (base / file).read_bytes()
    (base / file).write_text(json.dumps(json.loads(kept) | change))
    refused(tezo("train", "--output", run, "--resume"), named, "not what the run began with")
    assert tezo("eval", home / "ended").code == 0, "no figure depends on it"
    (base / file).write_bytes(kept)
    train(made, run, resume=True)
    assert contents(run) == contents(tmp_path / "whole")


def test_a_version_of_a_library_that_has_more_settings_is_no_other_model(home):
    known = dict(load_model(str(home / "llama-chat")).fingerprint)
    older = {part: text for part, text in known.items() if part != "config.attention_bias"} | {"versions": "older"}
    check_model(older | {"tokenizer.rules": "written otherwise"}, known)
    with pytest.raises(RequestError, match=r"attention_bias is false in its configuration, and .* not set"):
        check_model(older | {"versions": known["versions"]}, known)
    with pytest.raises(RequestError, match="rms_norm_eps is 1e-06"):
        check_model(older | {"config.rms_norm_eps": "0.1"}, known)
    with pytest.raises(RequestError, match="weights"):
        check_model(known | {"weights": "0"}, known)
    check_model(known | {"weights": "0", "form": "bfloat16"}, known)
    with pytest.raises(RequestError, match="weights"):
        check_model(known | {"form": "bfloat16", "stored": "0"}, known)


def test_a_run_of_an_earlier_version_has_its_base_in_the_dtype_of_its_fingerprint(home):
    asked = config(home)
    for dtype, form in (("auto", "bfloat16"), ("auto", "bfloat16, packed"), ("bfloat16", "float32")):
        begun = {"config": {"model": {"dtype": dtype, "engine": "torch"}}, "model": {"form": form}}
        assert with_dtype_of(begun, asked).model.dtype == "bfloat16"
        begun["config"]["model"]["engine"] = "llama.cpp"
        assert with_dtype_of(begun, asked).model.dtype == "auto"
    assert with_dtype_of({"config": {}, "model": {}}, asked) == asked


def test_an_engine_takes_the_dtype_of_the_file_and_not_that_of_a_run_in_torch(home):
    for settings, dtype in (([], "float32"), ([("model.engine", "torch")], "float32"),
                            ([("model.engine", "llama.cpp")], "auto")):  # fmt: skip
        assert read_run_config(home / "ended/config.yaml", settings).model.dtype == dtype
    loaded, _ = load_folder(str(home / "llama-chat"))
    assert loaded.fingerprint["stored"] == load_model(str(home / "llama-chat")).fingerprint["stored"]
    check_model(loaded.fingerprint, load_model(str(home / "llama-chat")).fingerprint)


def test_ranks_compare_the_same_parts(home):
    header = log_header(prepare(config(home, model="llama-chat")))
    assert json.loads(json.dumps(header))["model"] == load_model(str(home / "llama-chat")).fingerprint


@pytest.mark.slow  # it waits
def test_files_are_read_once_until_one_of_them_changes(home, tmp_path, monkeypatch):
    monkeypatch.setenv("TEZO_CACHE", str(tmp_path / "cache"))
    moved = Path(shutil.copytree(home / "llama-chat", tmp_path / "moved"))
    assert stamp(str(moved)) is None, "a file can change again within the resolution of its time"
    made, read = [], identity.digest
    monkeypatch.setattr(identity, "digest", lambda *given: made.append(1) or read(*given))
    known = load_model(str(moved)).fingerprint
    time.sleep(2.1)
    assert [load_model(str(moved)).fingerprint == known for _ in range(3)] == [True] * 3 and len(made) == 2
    times = (moved / "model.safetensors").stat()
    flip(moved / "model.safetensors", random.Random(2))
    os.utime(moved / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    time.sleep(2.1)
    assert load_model(str(moved)).fingerprint["weights"] != known["weights"] and len(made) == 3


def without_a_layer(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.fixture
def base(home, tmp_path):
    """The base that the runs name, which a test may change, and which is put back after it."""
    folder = home / "llama-chat"
    shutil.copytree(folder, tmp_path / "kept")
    yield folder
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)


def test_another_dtype_in_the_configuration_of_a_base_changes_no_number(home, tmp_path, base):
    before = tezo("eval", home / "ended", "--json").out
    edited(dtype="float64")(base)
    assert tezo("eval", home / "ended", "--json").out == before
    assert tezo("export", home / "ended", "--format", "merged", "--output", tmp_path / "merged").code == 0
    assert {weight.dtype for weight in load_file(tmp_path / "merged/model.safetensors").values()} == {torch.float32}
    shutil.copytree(home / "begun", tmp_path / "run")
    assert tezo("train", "--output", tmp_path / "run", "--resume").code == 0
    assert contents(tmp_path / "run") == contents(home / "ended")


def test_another_dtype_in_the_configuration_of_a_base_hides_no_change_of_its_weights(home, tmp_path, base):
    edited(dtype="float64")(base)
    without_a_layer(base)
    said = "its weights are not those that the run began with"
    refused(tezo("eval", home / "ended"), said)
    refused(
        tezo("eval", home / "ended", "--set", "model.dtype=bfloat16"), said
    )  # where they cannot be compared as cast
    for form in ("lora", "merged", "gguf-lora"):
        refused(tezo("export", home / "ended", "--format", form, "--output", tmp_path / "out"), said)
    refused(tezo("replay", home / "ended", "--output", tmp_path / "out"), said)
    shutil.copytree(home / "begun", tmp_path / "run")
    refused(tezo("train", "--output", tmp_path / "run", "--resume"), said)
    with pytest.raises(RequestError, match="its weights are not those"):
        load_adapter(transformers.AutoModelForCausalLM.from_pretrained(base), home / "ended/adapter")
