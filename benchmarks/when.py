"""When not to use tezo: memory and time of a step, and loss against time, beside training by gradients.

    python benchmarks/when.py --shared FOLDER [--only costs/opt-125m curves] [--out FILE] [--quick]

- costs: peak memory and seconds of a step at three shapes of OPT with random weights, in float32 and bfloat16:
  inference, two methods of tezo, LoRA with and without gradient checkpointing, all of these over a base in nf4, and
  full fine-tuning. What the forecast says does not fit is not tried.
- curves: dev loss against seconds, of a pretrained decoder of 260K parameters on completions and of the embedded
  encoder on TREC, 16 rows a class: tezo as it comes, LoRA and full fine-tuning by Adam at four rates each, and for the
  encoder logistic regression on its frozen embeddings.
- arithmetic: forecasts for 7B to 70B parameters; nothing is measured.

Each cell has a process of its own, and is in the file as soon as it is done; the same command goes on with what is
missing. About an hour on two cores. --only names beginnings of cells; --quick runs everything on tiny models, in two
minutes, into another file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from small_runs import model_name, rows
from tezo_studies.bench.peak_memory import ALLOCATOR
from tezo_studies.bench.result_files import commit, cpu

from tezo.forecast.memory import FULL, INFERENCE, LORA, LORA_CHECKPOINTED, USABLE
from tezo.runs.environment import usable_memory, versions

HERE = Path(__file__).parent
SHAPES, DTYPES, BATCH = ("opt-125m", "opt-350m", "opt-1.3b"), ("float32", "bfloat16"), {"rows": 4, "length": 128}
LARGE, LARGE_BATCH = ("llama-7b", "llama-13b", "llama-30b", "llama-70b"), {"rows": 8, "length": 512}
QUICK_BATCH = {"rows": 2, "length": 16}
SECONDS, TIME_LIMIT = 30.0, 540
"""Seconds of timed steps after which no other begins; seconds after which a cell is given up."""
ZEROTH, BY_GRADIENT = {"peft": "none", "checkpointed": False}, {"method": "adam", "peft": "lora"}
WAYS: dict[str, dict[str, Any]] = {
    INFERENCE: ZEROTH | {"method": None},
    "tezo-cadam": ZEROTH | {"method": "tezo-cadam"},
    "head-feedback": ZEROTH | {"method": "head-feedback"},
    LORA: BY_GRADIENT | {"checkpointed": False},
    LORA_CHECKPOINTED: BY_GRADIENT | {"checkpointed": True},
    FULL: BY_GRADIENT | {"peft": "none", "checkpointed": False},
}
"""Way -> its method, adapter and checkpointing."""
QUANTIZATIONS = ("none", "nf4")
RATES = {"lora": (1e-4, 3e-4, 1e-3, 3e-3), "full": (3e-5, 1e-4, 3e-4, 1e-3)}
TREC = {"data.per_class": 16, "data.num_test": 500}


def cells(shared: Path, *, quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what is measured) of all cells, forecasts before the cells that they decide about."""
    shapes, dtypes, batch = (("tiny",), DTYPES[:1], QUICK_BATCH) if quick else (SHAPES, DTYPES, BATCH)
    for shape in shapes:
        for dtype in dtypes:
            for quantization in QUANTIZATIONS:
                base = {"shape": shape, "dtype": dtype, "quantization": quantization, **batch}
                yield from cost_cells(f"costs/{shape}/{dtype}/{quantization}", base, quick=quick)
    large, large_batch = (("tiny-llama",), QUICK_BATCH) if quick else (LARGE, LARGE_BATCH)
    for shape in large:
        for quantization in QUANTIZATIONS:
            base = {"shape": shape, "dtype": "bfloat16", "quantization": quantization, **large_batch}
            yield f"arithmetic/{shape}/{quantization}", base | {"part": "forecast"}
    yield from curve_cells(shared, quick=quick)


def cost_cells(name: str, base: dict[str, Any], *, quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The forecast for a model, and memory and time of each way to train it."""
    yield f"{name}/forecast", base | {"part": "forecast"}
    for way, how in WAYS.items():
        if way == FULL and base["quantization"] == "nf4":
            continue
        for measure in ("memory", "time"):
            timed = {"measure": measure, "seconds": 0.1 if quick else SECONDS}
            yield f"{name}/{way}/{measure}", base | how | timed | {"part": "costs", "way": way}


def curve_cells(shared: Path, *, quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs of both models."""
    for model, data, of_data in (("decoder", "completions", {}), ("encoder", "trec", TREC)):
        name = model_name(model, shared, shared)
        common = {"model.name": name, **rows(data, shared), **of_data, "train.eval_every": 5}
        common |= {"train.steps": 10, "method.lr": 1e-4} if quick else {}
        if data == "trec":
            common = {key: value for key, value in common.items() if key not in ("data.num_train", "data.num_dev")}
            yield f"curves/{model}/probe", {"part": "probe", "settings": common}
        yield f"curves/{model}/tezo", {"part": "curves", "settings": common}
        for way, rates in RATES.items():
            for lr in rates[:1] if quick else rates:
                own = {"method.name": "adam", "method.lr": lr} | ({"model.peft": "lora"} if way == "lora" else {})
                yield f"curves/{model}/{way}/{lr:g}", {"part": "curves", "settings": common | own}


def measured(name: str, cell: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The result of a cell; {"skipped": why} where its forecast does not fit, or it was stopped."""
    if cell["part"] == "costs":
        told = found[name.rsplit("/", 2)[0] + "/forecast"]["ways"][cell["way"]]
        if told > USABLE * usable_memory():
            return {"skipped": f"forecast {told / 2**30:.1f} GiB"}
    line = [sys.executable, str(HERE / "when_cells.py"), json.dumps(cell)]
    environment = os.environ | (ALLOCATOR if cell.get("measure") == "memory" else {})
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"more than {TIME_LIMIT} s"}
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()[-2000:] or f'ended with {done.returncode}'}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measures what the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with models/ and data/")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of the names of cells")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    path = given.out or (Path(tempfile.gettempdir()) / "when-quick.json" if given.quick else HERE / "results/when.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else {}
    head = {
        "command": "python benchmarks/when.py --shared FOLDER", "hardware": cpu(), "memory": usable_memory(),
        "versions": versions(("tezo", "torch", "transformers", "peft", "bitsandbytes")),
    }  # fmt: skip
    for name, cell in cells(given.shared, quick=given.quick):
        wanted = any(name.startswith(start) for start in given.only)
        if name in found or not (wanted or (cell["part"] == "forecast" and name.startswith("costs"))):
            continue
        found[name] = measured(name, cell, found) | {"cell": cell_of(cell, given.shared), "commit": commit()}
        path.write_text(json.dumps({**head, "cells": found}, indent=1) + "\n", encoding="utf-8")
        print(name, {key: value for key, value in found[name].items() if key not in ("cell", "curve")}, flush=True)


def cell_of(cell: dict[str, Any], shared: Path) -> dict[str, Any]:
    """What was measured, without the folders of this machine."""
    changed: dict[str, Any] = json.loads(json.dumps(cell).replace(str(shared), "FOLDER"))
    return changed


if __name__ == "__main__":
    main()
