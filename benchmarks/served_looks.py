"""Labelled rows on a real server of vLLM: looks by its states, with no weight read, beside looks in torch.

    TEZO_VLLM=python python benchmarks/served_looks.py --shared FOLDER [--out benchmarks/results] [--only WORD ...]
        [--packed FOLDER] [--seconds 3600]

TEZO_VLLM is the python of an environment with vLLM; where it is the package for CPUs, the server has the connector of
`cpu_states.py`. A run has 32 or 48 rows of each label. Lines:

- torch: the default on the weights, with down_proj tuned, as in the other lines.
- 4 states, 8 states: the default on a server that shows the states behind so many blocks of the last half. The client
  has a folder with the configuration and the tokenizer alone.
- no states: the default on a server that shows none, from such a folder: random directions.
- packed, 4 states: on a server with the same model in 4 bits, in the folder of --packed: compressed-tensors,
  4 bits in groups of 64, rounded to nearest by llmcompressor.

The server has one thread. Writes served_looks.json after each run and leaves out runs that it has.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from practice import ROWS, chosen_rows, files_of
from real_tasks import make, options, spent
from tezo_studies.bench.result_files import commit

from tezo.engines import load
from tezo.models.kinds import ModelConfig
from tezo.runs.environment import hardware, peak_resident, versions
from tezo.system.progress import quiet_libraries
from tezo.training.loop import train
from tezo.training.settings import read_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from real_vllm import real_server, states_behind  # the same server as in the tests

LINES = {"torch": None, "4 states": (20, 23, 26, 29), "8 states": (16, 18, 20, 22, 24, 26, 28, 29), "no states": (),
         "packed, 4 states": (20, 23, 26, 29)}  # fmt: skip
"""Line -> blocks, of 30, whose states the server shows; None: torch runs the model."""
COUNTS = {"issues": 32, "sst2": 48}
PORT = 8431
TUNED = "down_proj"


def saved(model: str, folder: Path) -> Path:
    """Writes the model into a folder in bfloat16; returns it."""
    loaded = load(ModelConfig(name=model))
    loaded.model.to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def without_weights(whole: Path, folder: Path) -> Path:
    """Copies the configuration and the tokenizer of a model into a folder; returns it."""
    folder.mkdir()
    for path in whole.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    return folder


@contextmanager
def served(whole: Path, blocks: Sequence[int], folder: Path) -> Iterator[str]:
    """Yields the address of a server of a folder."""
    limits = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "16", "--lora-target-modules", TUNED]
    states = states_behind(blocks, folder / "states") if blocks else []
    with real_server(whole, PORT, [*limits, *states], folder / "log", PYTHONPATH=str(Path(__file__).parent)):
        yield f"http://127.0.0.1:{PORT}"


def runs() -> Iterator[tuple[str, str, str, int]]:
    """Yields (name, line, task, seed) of each run."""
    for line in LINES:
        for task in COUNTS:
            yield f"{task}/{COUNTS[task]} rows a label/{line}, seed 0", line, task, 0


def measured(given: tuple[str, str, str, int, Any]) -> tuple[str, dict[str, Any]]:
    """One run: its name, and what it came to."""
    name, line, task, seed, chosen = given
    if time.time() > chosen.until:
        return name, {"error": "no time is left"}
    if line.startswith("packed") and chosen.packed is None:
        return name, {"error": "--packed names no folder"}
    torch.set_num_threads(chosen.threads)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = chosen_rows(ROWS[task](chosen.shared, folder), COUNTS[task], seed)
        own = [("method.targets", [TUNED]), ("train.seed", seed), *files_of(rows, folder)]
        whole = chosen.packed if line.startswith("packed") else saved(chosen.model, folder / "whole")
        blocks, begun = LINES[line], time.monotonic()
        if blocks is None:
            own += [("model.name", str(whole)), ("model.dtype", "float32")]
            summary = train(read_config(None, own), folder / "run")
        else:
            own += [("model.name", str(without_weights(whole, folder / "card")))]
            with served(whole, blocks, folder) as address:
                begun = time.monotonic()
                summary = train(read_config(None, [*own, ("model.engine", address)]), folder / "run")
        seconds = time.monotonic() - begun
        method = read_config(folder / "run/config.yaml", []).method.name
    found = {
        "method": method,
        "before": {key: summary["before"][key] for key in ("accuracy", "loss")},
        "after": {key: summary["after"][key] for key in ("accuracy", "loss")},
        "passes": spent(summary["phases"]),
        "seconds": round(seconds, 1),
        "peak_memory": peak_resident(),
        "rows": {part: len(every) for part, every in rows.items()},
    }
    about = {"hardware": hardware(), "threads": chosen.threads, "versions": versions(), "commit": commit()}
    return name, json.loads(json.dumps(found | about))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--packed", type=Path)
    make("served_looks.json", measured, list(runs()), parser.parse_args())
