"""The benchmark of docs/when.md: what it plans, what it leaves out, what it counts, and the tables drawn from it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from tezo.directions.targets import select_targets
from tezo.forecast.memory import FULL, LORA
from tezo.models.quantization import stored_bytes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "docs")
    return {name: importlib.import_module(name) for name in ("when", "when_cells", "when_tables", "drawing")}


def test_every_cell_has_a_name_and_its_forecast_comes_before_it(scripts):
    names = [name for name, _ in scripts["when"].cells(Path("shared"), quick=False)]
    assert len(set(names)) == len(names)
    for number, name in enumerate(names):
        if name.startswith("costs/"):
            assert "/".join(name.split("/")[:4]) + "/forecast" in names[: number + 1]
    measured = {name.split("/")[4] for name in names if name.endswith("/memory")}
    assert measured == set(scripts["when"].WAYS)


def test_a_cell_that_does_not_fit_is_not_run(scripts, monkeypatch):
    def run(line, **more):
        pytest.fail(f"{line} was run")

    monkeypatch.setattr(scripts["when"].subprocess, "run", run)
    cells = dict(scripts["when"].cells(Path("shared"), quick=False))
    name = f"costs/opt-1.3b/float32/none/{FULL}/memory"
    found = {"costs/opt-1.3b/float32/none/forecast": {"ways": {FULL: 1 << 50}}}
    assert "forecast" in scripts["when"].measured(name, cells[name], found)["skipped"]


def test_the_weights_of_a_packed_base_are_those_that_are_stored(scripts):
    pytest.importorskip("bitsandbytes", reason="packs models in nf4")
    sizes = {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 512, "num_hidden_layers": 2}
    model = OPTForCausalLM(OPTConfig(vocab_size=96, num_attention_heads=2, **sizes))
    linear = sum(target.parameter.numel() for target in select_targets(model))
    counted = stored_bytes(model) - 4 * linear + scripts["when_cells"].NF4_BYTES * linear
    packed = scripts["when_cells"].packed(model)
    assert stored_bytes(packed) == pytest.approx(counted, rel=0.02)
    assert packed(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_measures_goes_on_with_what_is_missing_and_is_drawn(scripts, tmp_path, monkeypatch):
    def measure(*only):
        line = [sys.executable, str(ROOT / "benchmarks/when.py"), "--quick", "--shared", str(tmp_path)]
        more = ["--out", str(tmp_path / "when.json"), "--only", *only]
        done = subprocess.run([*line, *more], capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ways = [f"costs/tiny/float32/none/{way}" for way in (LORA, FULL)]
    assert f"{ways[0]}/memory" in measure(ways[0], "arithmetic")
    assert f"{ways[0]}/memory" not in measure(*ways)
    found = json.loads((tmp_path / "when.json").read_text())["cells"]
    assert found[f"{ways[0]}/time"]["seconds"][0] > 0 and found[f"{ways[1]}/memory"]["bytes"] > 0
    assert str(tmp_path) not in json.dumps(found), "results name no folder of the machine"
    monkeypatch.setattr(scripts["drawing"], "RESULTS", tmp_path)
    tables = {name: draw() for name, draw in scripts["when_tables"].WHEN_TABLES.items()}
    memory = found[f"{ways[1]}/memory"]["bytes"] / 2**30
    assert f"| {FULL} | {memory:.2f} (" in tables["when-memory"] and f"| {LORA} | " in tables["when-time"]
    assert "Arithmetic" in tables["when-large"] and tables["when-decoder"] == ""
