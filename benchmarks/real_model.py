"""What a run of the embedded language model (135M parameters) says and measures, in float32 and bfloat16.

    python benchmarks/real_model.py --shared FOLDER [--out benchmarks/results] [--steps 20]

`tezo train --model embedded:smollm2-135m` on short rows of SST-2 by head-feedback, all else by default but the numbers
of rows and steps: seconds to the first line on standard error, the longest silence, the phases with their forward
passes, and the losses before and after. Then the first steps of the same run again, each beside the loss of the model
as it is: how far its points are. Two cores; some ten minutes. Writes real_model.json after each part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tezo_studies.bench.result_files import commit

from tezo.directions.products import evaluation_mode, float32_on_emulating_cpu
from tezo.runs.environment import hardware, threads, versions
from tezo.training.job import prepare
from tezo.training.settings import read_config

MODEL, DTYPES = "embedded:smollm2-135m", ("float32", "bfloat16")
MOST_CHARACTERS = 110
ROWS = {"train": 64, "dev": 32, "test": 64}


def rows_of(shared: Path, folder: Path, rows: dict[str, int]) -> dict[str, Path]:
    """Writes so many rows of text and label of each part, as a user has them; part -> file."""
    files = {}
    for part, source, skip in (("train", "train", 0), ("dev", "train", rows["train"]), ("test", "validation", 0)):
        lines = map(json.loads, (shared / f"data/sst2/{source}.jsonl").read_text(encoding="utf-8").splitlines())
        short = [line for line in lines if len(line["sentence"]) <= MOST_CHARACTERS][skip : skip + rows[part]]
        files[part] = folder / f"{part}.jsonl"
        texts = (json.dumps({"text": row["sentence"], "label": ("bad", "good")[row["label"]]}) for row in short)
        files[part].write_text("\n".join(texts) + "\n", encoding="utf-8")
    return files


def settings_of(files: dict[str, Path], dtype: str, steps: int) -> list[tuple[str, str]]:
    """(key, value) of the run."""
    data = [(f"data.{part}", str(path)) for part, path in files.items()]
    own = ("method.name", "head-feedback"), ("train.steps", str(steps))
    return [("model.name", MODEL), ("model.dtype", dtype), *data, *own]


def command_of(settings: list[tuple[str, str]], output: Path) -> dict[str, Any]:
    """Runs the command; when it said what, and what it came to."""
    given = [part for key, value in settings for part in ("--set", f"{key}={value}")]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "tezo", "train", *given, "--output", str(output)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    told = [started]
    while process.stderr.readline():
        told.append(time.perf_counter())
    if process.wait():
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    gaps = [later - earlier for earlier, later in pairwise(told[1:])]
    return {
        "first_line": round(told[1] - started, 2),
        "longest_silence": round(max(gaps), 2),
        "seconds": round(told[-1] - started, 1),
        **{key: summary[key] for key in ("before", "after", "dev_loss_before", "dev_loss", "phases", "verdict")},
        "notices": [notice for notice in summary["notices"] if notice.startswith(("method.rho", "method.lr"))],
    }


def points_of(settings: list[tuple[str, str]], steps: int) -> dict[str, Any]:
    """The first steps of the run, each with the loss of the model as it is on its rows."""
    job = prepare(read_config(None, settings))
    found, sampler = [], job.sampler()
    for step in range(steps):
        closure = job.objective.closure(job.model, job.batches(sampler.rows(step)))
        with torch.no_grad(), evaluation_mode(job.model), float32_on_emulating_cpu(job.model):
            own = float(closure())
        job.optimizer.step(closure)
        record = job.optimizer.last_step
        assert record is not None
        plus, minus = (fmean(getattr(probe, f"loss_{sign}") for probe in record.probes) for sign in ("plus", "minus"))
        found.append({"own": round(own, 4), "plus": round(plus, 4), "minus": round(minus, 4)})
    return {
        "rho": job.optimizer.rho,
        "steps": found,
        "highest_ratio": round(max(max(at["plus"], at["minus"]) / at["own"] for at in found), 4),
    }


def main() -> None:
    """Measures both data types."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/real_model.py --shared FOLDER",
        "model": MODEL, "rows": ROWS, "steps": given.steps, "commit": commit(), "hardware": hardware(),
        "threads": threads(), "versions": versions(("tezo", "torch", "transformers")), "runs": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        files = rows_of(given.shared, Path(name), ROWS)
        for dtype in DTYPES:
            settings = settings_of(files, dtype, given.steps)
            result["runs"][dtype] = command_of(settings, Path(name) / dtype) | points_of(settings, 20)
            (given.out / "real_model.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(dtype, {key: value for key, value in result["runs"][dtype].items() if key != "steps"}, flush=True)


if __name__ == "__main__":
    main()
