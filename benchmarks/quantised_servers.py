"""A tiny model in quantised forms on a real vLLM server on a CPU: which start, take adapters, and are tuned.

    TEZO_VLLM=PYTHON TEZO_QUANTISER=PYTHON python benchmarks/quantised_servers.py [--only PART ...] [--out FOLDER]

The variables name the pythons of environments with vLLM, and with llmcompressor and auto-round, which quantise. Each
form is served with adapters, and tuned by tezo and gauss-newton for a step on six rows; where no server comes up with
adapters, one without is tried. Writes quantised_servers.json after each, and leaves out those that it has.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tezo_studies.bench.result_files import commit

from tezo.runs.environment import hardware, versions
from tezo.system.errors import RequestError
from tezo.training.loop import train
from tezo.training.settings import parse_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from folders import bpe_tokenizer, label_rows, saved, write_rows
from gguf_files import tiny_llama
from quantise import SCHEMES
from real_vllm import PYTHON, real_server, with_adapters

PORT = 8431
LAYER = "model.layers.0.mlp.down_proj."
METHODS: dict[str, dict[str, Any]] = {
    "tezo": {"rank": 4, "lr": 0.05, "rho": 0.03},
    "gauss-newton": {"rank": 4, "frozen_rank": 8},  # within the 16 of the server
}


def main() -> None:
    """Makes the trials that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the schemes to try")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    path = given.out / "quantised_servers.json"
    done: dict[str, Any] = {"trials": {}}
    if path.exists():
        done = json.loads(path.read_text(encoding="utf-8"))
    server = [str(PYTHON), "-c", "import importlib.metadata as m, vllm; print(vllm.__version__, m.version('torch'))"]
    vllm, torch = subprocess.run(server, check=True, capture_output=True, text=True).stdout.split()[-2:]
    done |= {"vllm": vllm, "torch of vllm": torch, "commit": commit(), "hardware": hardware(), "versions": versions()}
    for scheme in missing(done["trials"], given.only):
        with tempfile.TemporaryDirectory() as root:
            done["trials"][scheme] = tried(scheme, Path(root))
        path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(scheme, done["trials"][scheme], flush=True)


def missing(trials: Iterable[str], parts: Iterable[str]) -> list[str]:
    """Returns the schemes that were not tried, of those with one of the parts in their names."""
    return [scheme for scheme in SCHEMES if scheme not in trials and any(part in scheme for part in parts)]


def tried(scheme: str, root: Path) -> dict[str, Any]:
    """Quantises a model, serves it and tunes it; returns what was found."""
    tokenizer, folder = bpe_tokenizer(chat=True), root / "quantised"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = tiny_llama(
        64 * -(-len(tokenizer) // 64), head_dim=64, max_position_embeddings=256, initializer_range=0.06,
        tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    saved(model, tokenizer, root / "plain")
    script = Path(__file__).with_name("quantise.py")
    command = [os.environ["TEZO_QUANTISER"], script, root / "plain", scheme, folder]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    made = subprocess.run(command, check=True, capture_output=True, text=True, env=clean)
    found: dict[str, Any] = {"tool": made.stdout.splitlines()[-1], "tensors": tensors(folder), "methods": {}}
    log = root / "server.log"
    try:
        with real_server(folder, PORT, with_adapters(), log):
            rows = write_rows(root / "rows.jsonl", label_rows(6))
            for name in METHODS:
                found["methods"][name] = tuned(folder, rows, name, root / name)
    except RuntimeError as error:
        found["with adapters"] = first(error)
        try:
            with real_server(folder, PORT, [], log):
                found["without"] = "starts"
        except RuntimeError as alone:
            found["without"] = first(alone)
    return found


def tensors(folder: Path) -> dict[str, str]:
    """Returns the form of a layer: the last part of the name of each tensor -> its type and sizes."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name.removeprefix(LAYER): file.get_slice(name) for name in file.keys() if LAYER in name}  # noqa: SIM118
        return {name: f"{own.get_dtype()} {own.get_shape()}" for name, own in slices.items()}


def tuned(folder: Path, rows: Path, method: str, run: Path) -> dict[str, Any]:
    """Returns the losses before and after a step of a method on the server, or why there was none."""
    config = {
        "model": {"name": str(folder), "engine": f"http://127.0.0.1:{PORT}"},
        "data": {"train": str(rows), "test": str(rows)},
        "method": {"name": method, **METHODS[method]},
        "train": {"steps": 1, "batch_size": 6},
    }
    try:
        result = train(parse_config(config), run)
    except RequestError as error:
        return {"refused": str(error).replace(str(folder), "FOLDER")}
    told = [notice for notice in result["notices"] if notice.startswith("model.engine")]
    return {"before": result["before"]["loss"], "after": result["after"]["loss"], "notices": told}


def first(error: RuntimeError) -> str:
    """Returns the first of the errors of a server."""
    return str(error).splitlines()[0]


if __name__ == "__main__":
    main()
