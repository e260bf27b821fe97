"""The default run on SST-2 in torch and llama.cpp: what it comes to where its passes are an engine's (135M).

    python benchmarks/engine_runs.py --shared FOLDER [--only PART ...] [--out benchmarks/results]

`tezo train` with nothing set: rounds of `gauss-newton` on 192 rows, with 64 dev and 480 test rows, of at most 110
characters. Files in F32, F16 and Q8_0 are made of the embedded file's unpacked weights. Each run is a process of its
own. Writes engine_runs.json after each, and leaves out those that it has.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import MODEL, gguf_files
from real_model import rows_of
from tezo_studies.bench.result_files import commit

ROWS = {"train": 192, "dev": 64, "test": 480}
KEPT = ("before", "after", "untuned", "dev_loss_before", "dev_loss", "phases", "peak_memory", "kept_step", "verdict",
        "hardware", "versions")  # fmt: skip


def ways_of(folder: Path) -> dict[str, list[str]]:
    """Name -> arguments of the command, for models in `folder`."""
    ways = {"torch float32": ["--model", MODEL], "torch bfloat16": ["--model", MODEL, "--set", "model.dtype=bfloat16"]}
    for name, path in gguf_files(folder).items():
        ways[f"llama.cpp {name}"] = ["--model", str(path), "--engine", "llama.cpp"]
    return ways


def main() -> None:
    """Makes the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of the ways to run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    path = given.out / "engine_runs.json"
    done: dict[str, Any] = {"model": MODEL, "rows": ROWS, "runs": {}}
    if path.exists():
        done = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = rows_of(given.shared, folder, ROWS)
        for way, arguments in ways_of(folder).items():
            if way in done["runs"] or not any(part in way for part in given.only):
                continue
            held = [part for split in ("dev", "test") for part in ("--set", f"data.{split}={files[split]}")]
            output = folder / way.replace(" ", "-")
            data = ["--data", files["train"], *held]
            command = [sys.executable, "-m", "tezo", "train", *arguments, *data, "--output", output, "--json"]
            ran = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, check=False,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            if ran.returncode:
                raise SystemExit(f"{way}: {ran.stderr[-2000:]}")
            summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
            done["runs"][way] = {key: summary[key] for key in KEPT} | {"commit": commit()}
            path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
            print(way, summary["before"], summary["after"], summary["verdict"], flush=True)


if __name__ == "__main__":
    main()
