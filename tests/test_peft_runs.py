"""A run over PEFT's own adapter is opened with the run's settings, whatever stands in the adapter's folder."""

import json
import shutil
import warnings

import pytest
import torch
from folders import label_rows, model_folder, settings, tezo, train, write_rows
from safetensors.torch import load_file, save_file

from tezo.runs.files import write_manifest
from tezo.runs.folder import FILES


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run over each adapter of PEFT."""
    root = tmp_path_factory.mktemp("home")
    base, data = model_folder(root, "llama"), write_rows(root / "rows.jsonl", label_rows(8))
    for adapter in ("lora", "prefix", "prompt"):
        flags = ("--test", data, "--method", "mezo", *settings(model__peft=adapter))
        done = train(base, data, root / adapter, *flags, steps=2, method__rank=None)
        assert done.code == 0, done.err
    return root


def described(home, kind, tmp_path, **changes):
    """A copy of a run with changes to the settings of its adapter."""
    run = tmp_path / "run"
    shutil.copytree(home / kind, run)
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    write_manifest(run, FILES)  # a matching one: it is a stranger's
    return run


def loss_of(run):
    done = tezo("eval", run, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["loss"]


@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt"])
def test_the_adapter_that_was_saved_is_read(home, kind, tmp_path):
    after = json.loads((home / kind / "summary.json").read_text())["after"]["loss"]
    assert loss_of(home / kind) == pytest.approx(after, abs=1e-6)
    run = described(home, kind, tmp_path, peft_version="0.99", base_model_name_or_path="elsewhere", unheard_of=[1])
    assert loss_of(run) == loss_of(home / kind)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("lora", "lora_alpha", 64),
        ("lora", "r", 4),
        ("lora", "use_dora", True),
        ("lora", "use_rslora", True),
        ("lora", "init_lora_weights", "pissa"),
        ("lora", "rank_pattern", {"q_proj": 4}),
        ("lora", "alpha_pattern", {"q_proj": 64}),
        ("lora", "layer_replication", [[0, 1], [0, 2]]),
        ("lora", "target_modules", ["q_proj"]),
        ("lora", "target_modules", "(a+)+q_proj"),
        ("lora", "modules_to_save", ["lm_head"]),
        ("lora", "peft_type", "IA3"),
        ("lora", "task_type", None),
        ("lora", "megatron_config", {}),
        ("prefix", "num_virtual_tokens", 4),
        ("prefix", "prefix_projection", True),
        ("prefix", "token_dim", 4),
        ("prefix", "peft_type", "PROMPT_TUNING"),
        ("prompt", "num_virtual_tokens", 4),
        ("prompt", "prompt_tuning_init", "TEXT"),
        ("prompt", "token_dim", 4),
        ("prompt", "peft_type", "PREFIX_TUNING"),
    ],
)
def test_a_setting_that_the_run_does_not_have_is_refused(home, kind, key, value, tmp_path):
    run = described(home, kind, tmp_path, **{key: value})
    done = tezo("eval", run, "--json")
    assert done.code == 2 and f"adapter_config.json says {key}: " in done.err, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt"])
@pytest.mark.parametrize("change", ["removed", "added", "cut", "another dtype", "NaN name"])
def test_other_tensors_than_those_of_the_adapter_are_refused(home, kind, change, tmp_path):
    run = described(home, kind, tmp_path)
    file = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensor = tensors.pop(name)
    tensors |= {
        "removed": {},
        "added": {name: tensor, f"{name}.more": tensor.clone()},
        "cut": {name: tensor[:-1].contiguous()},
        "another dtype": {name: torch.zeros_like(tensor, dtype=torch.int64)[:-1].contiguous()},
        "NaN name": {f"nan.{name}": tensor},
    }[change]
    save_file(tensors, file)
    write_manifest(run, FILES)
    done = tezo("eval", run, "--json")
    assert done.code == 2 and "is not an adapter that can be read" in done.err, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "null", '{"r": 1e999}'])
def test_settings_that_are_no_settings_are_refused(home, text, tmp_path):
    run = described(home, "lora", tmp_path)
    (run / "adapter" / "adapter_config.json").write_text(text)
    write_manifest(run, FILES)
    done = tezo("eval", run, "--json")
    assert done.code == 2 and "is not an adapter that can be read" in done.err, done.err


@pytest.mark.parametrize("form", ["lora", "merged"])
def test_an_export_has_the_settings_of_the_run(home, form, tmp_path):
    run = described(home, "lora", tmp_path, lora_alpha=64)
    done = tezo("export", run, "--format", form, "--output", tmp_path / "export")
    assert done.code == 2 and "lora_alpha: 64, and the run has 16" in done.err, done.err
    assert not (tmp_path / "export").exists()


def test_what_peft_asks_transformers_by_an_old_name_is_no_warning_to_the_user(home, tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        more = ("--method", "mezo", *settings(model__peft="lora"))
        assert train(home / "llama", home / "rows.jsonl", tmp_path / "run", *more, steps=1, method__rank=None).code == 0
    assert not [warning for warning in seen if warning.category is FutureWarning]
