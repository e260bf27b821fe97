"""The CPU table: time of a step and peak memory, at OPT's shapes with random weights.

About half an hour on two cores.

    python benchmarks/cpu.py [--out FOLDER] [--only step|memory] [--dtype float32] [--targets all] [--model M]
        [--quick]

Writes step_cpu.json and memory_cpu.json, each a list with one result a setting, after every setting. With `--dtype`,
`--targets` or `--model` only the settings with these are measured, and take the place of those in the files. `--quick`
takes tiny shapes, to see that it runs.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tezo_studies.bench.peak_memory import measure_memory
from tezo_studies.bench.result_files import print_table, write_json
from tezo_studies.bench.settings import Settings, entries
from tezo_studies.bench.step_time import measure_step

METHODS = [
    "tezo", "tezo-cadam", "lozo", "head-feedback", "subzo", "tezo-adam", "mezo", "plain-closure:tezo", "published:mezo",
]  # fmt: skip
ONE = ["tezo"]
BATCHES = [
    Settings(dtype="bfloat16", batch=1, length="32", rounds=9, seconds=90),
    Settings(dtype="bfloat16", batch=2, length="16", rounds=9, seconds=90),
    Settings(dtype="bfloat16", batch=16, length="32", seconds=120),
    Settings(dtype="float32", batch=8, length="128", rounds=9, seconds=120),
]
STEP = [(replace(batch, targets=targets), METHODS) for targets in ("all-linear", "all") for batch in BATCHES]
STEP += [(replace(BATCHES[0], model=model, seconds=100), ONE) for model in ("opt-350m", "opt-1.3b")]
MEMORY = [(replace(batch, rounds=3, seconds=100), METHODS) for batch in (BATCHES[0], BATCHES[3])]


def main() -> None:
    """Measures all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=("step", "memory"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--targets", choices=("all-linear", "all"))
    parser.add_argument("--model", choices=("opt-125m", "opt-350m", "opt-1.3b"))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    for kind, measure, plan in (("step", measure_step, STEP), ("memory", measure_memory, MEMORY)):
        if arguments.only in (None, kind):
            wanted = {key: getattr(arguments, key) for key in ("dtype", "targets", "model") if getattr(arguments, key)}
            chosen = [part for part in plan if all(getattr(part[0], key) == value for key, value in wanted.items())]
            path = arguments.out / f"{kind}_cpu.json"
            known = json.loads(path.read_text(encoding="utf-8")) if wanted and path.exists() else []
            run(measure, [quick(*part) for part in chosen] if arguments.quick else chosen, path, known)


def run(
    measure: Callable[..., Any], plan: list[tuple[Settings, list[str]]], path: Path, results: list[dict[str, Any]]
) -> None:
    """Measures one setting after another, and writes what there is after each, in `results` and new."""
    started = time.perf_counter()
    for settings, methods in plan:
        result = measure(settings, entries(methods, published=False))
        same = [i for i, known in enumerate(results) if known["settings"] == result["settings"]]
        place = same[0] if same else len(results)
        results[place : place + 1] = [result]
        write_json(path, results)
        print_table(result)
        print(f"{time.perf_counter() - started:.0f} s so far\n", flush=True)
        gc.collect()


def quick(settings: Settings, methods: list[str]) -> tuple[Settings, list[str]]:
    """The same with the tiny shape, float32, one round."""
    return replace(settings, model="tiny", dtype="float32", rank=4, rounds=1, warmup=1), methods


if __name__ == "__main__":
    main()
