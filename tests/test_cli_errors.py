"""A wrong request: one or two sentences that name the key, the value and the way out, exit code 2, nothing written."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import mostly_slow
from folders import (
    Result,
    completion_rows,
    label_rows,
    message_rows,
    model_folder,
    refused,
    tezo,
    train,
    write_rows,
)
from safetensors.torch import load_file, save_file

from tezo.runs.files import write_manifest
from tezo.runs.folder import FILES


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models and good data files, which tests only read."""
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "roberta", "bert", "llama"):
        model_folder(root, family)
    write_rows(root / "rows.jsonl", label_rows(12))
    write_rows(root / "text.jsonl", completion_rows(8))
    write_rows(root / "chat.jsonl", message_rows(4))
    assert train(root / "opt", root / "rows.jsonl", root / "run", "--test", root / "rows.jsonl").code == 0
    return root


@pytest.fixture
def attempt(home, tmp_path):
    """`tezo train` with one thing wrong; the output folder must not appear."""

    def run(*more, model="opt", data="rows.jsonl", **values) -> Result:
        done = train(home / model, home / data, tmp_path / "out", *more, **values)
        assert not (tmp_path / "out").exists(), "something was written"
        return done

    return run


def broken_model(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "opt", tmp_path / "model"))


# Models


def test_no_such_model(attempt, home):
    missing = home / "nowhere"
    refused(attempt(model=missing), "model.name", missing, "give a folder")


def test_a_folder_that_is_no_model(attempt, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(attempt(model=tmp_path / "empty"), "model.name", tmp_path / "empty", "no config.json", "save_pretrained")


def test_a_folder_without_safetensors(attempt, home, tmp_path):
    folder = broken_model(home, tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(attempt(model=folder), "model.name", folder, "no *.safetensors", "Save the model")


@pytest.mark.parametrize("shard", ["../opt/model.safetensors", "/etc/model.safetensors", "sub/x.safetensors", "a.bin"])
def test_a_shard_index_that_points_outside_its_folder(attempt, home, tmp_path, shard):
    folder = broken_model(home, tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}}))
    refused(attempt(model=folder), "model.name", index, shard, "not a file of its folder")


def test_a_shard_index_that_names_a_missing_shard(attempt, home, tmp_path):
    folder = broken_model(home, tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    refused(attempt(model=folder), "model.name", index, "model-00001-of-00002.safetensors", "missing", "download")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}'])
def test_a_shard_index_that_is_no_index(attempt, home, tmp_path, text):
    folder = broken_model(home, tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(attempt(model=folder), "model.name", folder / "model.safetensors.index.json", "download")


def test_damaged_weights(attempt, home, tmp_path):
    folder = broken_model(home, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(attempt(model=folder), "model.name", folder, "cannot be loaded")


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no-such-type"}'])
def test_a_configuration_that_is_none(attempt, home, tmp_path, text):
    folder = broken_model(home, tmp_path)
    (folder / "config.json").write_text(text)
    refused(attempt(model=folder), "model.name", folder, "cannot be loaded")


def test_weights_that_the_folder_lacks_are_not_made_up_in_silence(attempt, home, tmp_path):
    folder = broken_model(home, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.decoder.layers.1.fc1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(attempt(model=folder), "model.name", folder, "model.decoder.layers.1.fc1.weight")


def test_an_unknown_device(attempt):
    refused(attempt(model__device="abacus"), "model.device", "'abacus'", "cpu")


# Keys and values


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("train.step=5", ["train.step", "'steps'"]),
        ("model.nam=x", ["model.nam", "'name'"]),
        ("data.tranes=x", ["data.tranes", "'train'"]),
        ("trian.steps=5", ["trian", "'train'"]),
        ("method.name=tezo-cadm", ["method.name", "'tezo-cadm'", "'tezo-cadam'"]),
        ("method.name=sgd", ["method.name", "'sgd'"]),
        ("method.bettas=[0.9, 0.9]", ["method.bettas", "head-feedback", "'betas'"]),
        ("train.steps=many", ["train.steps", "'many'", "whole number"]),
        ("train.steps=2.5", ["train.steps", "2.5", "whole number"]),
        ("train.steps=0", ["train.steps", "0", "at least 1"]),
        ("train.epochs=inf", ["train.epochs", "inf", "positive and finite"]),
        ("train.epochs=nan", ["train.epochs", "nan", "positive and finite"]),
        ("train.epochs=1e12", ["train.epochs", "1e+12", "steps; lower it"]),
        ("train.batch_size=-1", ["train.batch_size", "-1", "at least 1"]),
        ("train.schedule=quadratic", ["train.schedule", "'quadratic'", "cosine"]),
        ("train.keep_best=maybe", ["train.keep_best", "'maybe'", "true or false"]),
        ("data.hold_out=1.5", ["data.hold_out", "1.5", "at least 0 and below 1"]),
        ("data.hold_out=x", ["data.hold_out", "'x'", "a number"]),
        ("data.max_length=2", ["data.max_length", "2", "at least 4"]),
        ("method.lr=fast", ["method.lr", "'fast'", "a number"]),
        ("method.lr=-1", ["method.lr", "-1", "between 0 and"]),
        ("method.lr=nan", ["method.lr", "nan"]),
        ("method.lr=1e300", ["method.lr", "1e+300", "between 0 and 1e+30"]),
        ("method.rho=inf", ["method.rho", "inf", "at most 1e+30"]),
        ("method.betas=[0.9, 1.0]", ["method.betas", "1.0", "below 1"]),
        ("method.betas=[-1, 0.9]", ["method.betas", "-1", "at least 0"]),
        ("method.eps=-1", ["method.eps", "-1", "positive"]),
        ("train.seed=-1", ["train.seed", "-1", "at least 0"]),
        ("train.seed=99999999999999999999", ["train.seed", "2^63"]),
        ("train.batch_size=99999999999999999999", ["train.batch_size", "2^31"]),
        ("method.rho=0", ["method.rho", "0", "positive"]),
        ("method.betas=0.9", ["method.betas", "0.9", "[0.9, 0.99]"]),
        ("method.betas.0=0.5", ["method.betas"]),
        ("method.scale=big", ["method.scale", "'big'", "unit"]),
        ("method.rank=0", ["method.rank", "0", "at least 1"]),
        ("method.num_directions=0", ["method.num_directions", "0", "between 1 and"]),
        ("method.num_directions=5000", ["method.num_directions", "5000", "4096"]),
        ("method.targets=q_prj", ["method.targets", "'q_prj'", "'q_proj'"]),
        ("method.targets=[all-linear, '!all']", ["method.targets", "leaves no parameter"]),
        ("model.dtype=int3", ["model.dtype", "'int3'", "float32"]),
        ("model.kind=poet", ["model.kind", "'poet'", "causal"]),
        ("model.name.x=y", ["model.name"]),
        ("data.shape=square", ["data.shape", "'square'", "completion"]),
        ("steps", ["--set", "'steps'", "key=value"]),
        ("=3", ["--set", "'=3'", "key=value"]),
    ],
)
def test_a_setting_that_cannot_be(attempt, setting, parts):
    refused(attempt("--set", setting), *parts)


@pytest.mark.parametrize("missing", ["--model", "--data", "--output"])
def test_what_was_left_out_is_named(home, tmp_path, missing):
    given = {"--model": home / "opt", "--data": home / "rows.jsonl", "--output": tmp_path / "out"}
    del given[missing]
    done = tezo("train", *(part for pair in given.items() for part in pair))
    refused(done, missing, {"--model": "model.name", "--data": "data.train", "--output": "output"}[missing])
    assert not (tmp_path / "out").exists()


def test_there_must_be_a_run_to_resume_where_nothing_else_is_given(tmp_path):
    typo = tmp_path / "typo"
    refused(tezo("train", "--output", typo, "--resume"), f"there is no run in {typo} to resume", "--model")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ["there is no recipe"]),
        ("model: [", ["cannot be read as YAML"]),
        ("- a\n- b\n", ["is not a recipe", "model, data, method, train"]),
        ("model:\n  name: x\n  nmae: y\n", ["model.nmae", "'name'"]),
        ("modell: x\n", ["modell", "'model'"]),
        ("train: 5\n", ["train is 5", "section"]),
        ("method:\n  1: 2\n", ["method.1"]),
        (b"model: \xff\n", ["cannot be read as YAML"]),
    ],
)
def test_a_recipe_that_is_none(home, tmp_path, text, parts):
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_bytes(text if isinstance(text, bytes) else text.encode())
    flags = ("--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "out")
    in_file = [recipe] if "recipe" in parts[0] or "YAML" in parts[0] else []
    refused(tezo("train", recipe, *flags), *parts, *in_file)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_in_use(home, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    refused(
        train(home / "opt", home / "rows.jsonl", tmp_path / "out"),
        "output",
        tmp_path / "out",
        "exists already",
        "delete",
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    file = tmp_path / "file"
    file.write_text("mine")
    refused(train(home / "opt", home / "rows.jsonl", file), "output", file)
    refused(tezo("predict", home / "run", "--input", home / "rows.jsonl", "--output", file), "output", file, "exists")
    for form in ("lora", "merged"):
        refused(
            tezo("export", home / "run", "--format", form, "--output", tmp_path / "out"), "output", "exists already"
        )
        refused(tezo("export", home / "run", "--format", form, "--output", file), "output", file)
    assert file.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_said_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("mine")
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(4))
    refused(train("nowhere", rows, tmp_path / "file/run"), "output", tmp_path / "file/run", "cannot be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "rows.jsonl"]


def test_a_method_that_compares_rows_needs_two_a_step(home, tmp_path):
    own = {"method__rank": None, "method__name": "grzo", "train__batch_size": 1}
    one = train(home / "opt", home / "rows.jsonl", tmp_path / "one", **own)
    refused(one, "train.batch_size is 1", "grzo", "2 or more")
    assert not (tmp_path / "one").exists()


# Other commands


def test_commands_on_what_is_no_run(home, tmp_path):
    answers = ("--input", home / "rows.jsonl", "--output", tmp_path / "answers.jsonl")
    refused(tezo("predict", tmp_path, *answers), tmp_path, "neither a run folder", "config.yaml")
    refused(tezo("export", home, "--output", tmp_path / "x"), home, "not a run", "tezo train")
    refused(tezo("eval", tmp_path, "--data", home / "rows.jsonl"), tmp_path, "neither a run folder", "config.yaml")
    assert list(tmp_path.iterdir()) == []
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    refused(tezo("eval", adapter, "--data", home / "rows.jsonl"), "an adapter alone", "--format merged")


def test_eval_without_rows(home):
    refused(tezo("eval", home / "opt"), "data is not set", "--data FILE")


def test_an_adapter_that_a_run_does_not_have(home, tmp_path):
    flags = ("--method", "tezo-adam")
    assert train(home / "opt", home / "rows.jsonl", tmp_path / "run", *flags, method__betas="[0.9, 0.9]").code == 0
    done = tezo("export", tmp_path / "run", "--format", "lora", "--output", tmp_path / "out")
    refused(done, tmp_path / "run", "no adapter", "tezo-adam", "merged")
    assert not (tmp_path / "out").exists()


def test_an_unknown_export_format(home, tmp_path):
    refused(tezo("export", home / "run", "--format", "onnx", "--output", tmp_path / "x"), "format", "'onnx'", "merged")


@pytest.mark.parametrize("damage", ["cut", "no tensors", "no config", "other kind"])
def test_a_damaged_adapter(home, tmp_path, damage):
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    weights, config = run / "adapter" / "adapter_model.safetensors", run / "adapter" / "adapter_config.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "no tensors":
        weights.unlink()
    elif damage == "no config":
        config.unlink()
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_type": "IA3"}))
    write_manifest(run, FILES)  # as whoever damaged it by intent would
    answers = ("--input", home / "rows.jsonl", "--output", tmp_path / "answers.jsonl")
    for done in (tezo("eval", run), tezo("predict", run, *answers), tezo("export", run, "--output", tmp_path / "x")):
        refused(done, run / "adapter")
    assert not (tmp_path / "answers.jsonl").exists()
    assert not (tmp_path / "x").exists()


def test_a_run_that_did_not_end(home, tmp_path):
    run = Path(shutil.copytree(home / "run", tmp_path / "a run"))
    shutil.rmtree(run / "adapter")
    (run / "manifest.json").unlink()
    refused(tezo("eval", run), run, "did not end", f"--output '{run}' --resume")
    for form in ("lora", "merged"):
        refused(tezo("export", run, "--format", form, "--output", tmp_path / "out"), run, "did not end", "--resume")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [0, -3, 500])
def test_answers_of_a_length_that_cannot_be(home, tmp_path, count):
    assert train(home / "opt", home / "text.jsonl", tmp_path / "run").code == 0
    flags = ("--input", home / "text.jsonl", "--output", tmp_path / "answers.jsonl", "--max-new-tokens", count)
    refused(tezo("predict", tmp_path / "run", *flags), "max_new_tokens", count)
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize("flags", [["--stepps", "3"], ["--steps", "many"], ["a.yaml", "b.yaml"]])
def test_a_command_line_that_cannot_be_read(flags):
    done = tezo("train", *flags)
    assert done.code == 2
    assert done.err
    assert "Traceback" not in done.err


def test_an_unknown_method_is_refused_by_the_list_of_methods():
    refused(tezo("methods", "tezo-cadm"), "'tezo-cadm'", "'tezo-cadam'")


def test_another_distribution_adds_commands_and_a_broken_one_takes_none_away(tmp_path):
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tezo.commands]\nhello = others.hello\nbroken = others.missing\n")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/__init__.py").write_text("")
    (tmp_path / "others/hello.py").write_text("def register(app):\n    app.command('hello')(lambda: print('hello'))\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tezo", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=True)
    assert done.stdout == "hello\n" and "the command broken cannot be loaded (No module named" in done.stderr


@pytest.mark.slow
def test_a_stream_that_lacks_a_character_does_not_end_a_command(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(24))
    code = "import sys; from tezo.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "train", "--model", model_folder(tmp_path, "opt"), "--data", rows,
               "--lr", 0.05, "--method", "tezo-cadam", "--steps", 20, "--output", tmp_path / "run"]  # fmt: skip
    plain = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([str(part) for part in command], capture_output=True, env=plain, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\u2212" in done.stdout, "the minus sign of a fall"


def _no_map():
    raise ImportError("/site-packages/scipy/x.so: failed to map segment from shared object")


def _behind():
    try:
        bytearray(1 << 62)
    except MemoryError as error:
        raise ValueError("no list of anything") from error


def _no_fork():
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize(
    "fails", [lambda: bytearray(1 << 62), lambda: torch.empty(1 << 60), _no_map, _behind, _no_fork]
)
def test_memory_that_is_short_is_said_whatever_notices_it(monkeypatch, fails):
    """As in a small container: in imports, in torch and in the system's calls."""
    monkeypatch.setattr("tezo.forecast.doctor.machine_report", fails)
    done = tezo("doctor")
    *_, last = done.err.strip().splitlines()
    assert done.code == 1 and last.startswith("error: memory is short (") and "ulimit -v" in last, done.err


def test_an_error_of_another_kind_is_not_taken_for_memory(monkeypatch):
    monkeypatch.setattr("tezo.forecast.doctor.machine_report", lambda: [].index("out of memory"))
    assert "ValueError was not foreseen" in tezo("doctor").err


@pytest.mark.parametrize("mebibytes", mostly_slow([300, 500, 800], 500))
def test_a_limit_of_memory_ends_a_command_in_a_sentence(mebibytes):
    resource = pytest.importorskip("resource", reason="limits are set by a module that Windows lacks")
    limit = mebibytes << 20
    done = subprocess.run(
        [sys.executable, "-m", "tezo", "doctor"], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: memory is short ("), done.stderr
