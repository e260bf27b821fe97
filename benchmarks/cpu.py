"""The CPU table: time of a step and peak memory, at OPT's shapes with random weights.

About forty minutes on two cores.

    python benchmarks/cpu.py [--out benchmarks/results] [--only step|memory] [--quick]

Writes step_cpu.json and memory_cpu.json, each a list with one result a setting, after every setting. `--quick` takes
tiny shapes, to see that it runs.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tezo.bench.memory import measure_memory
from tezo.bench.report import print_table, write_json
from tezo.bench.settings import Settings, entries
from tezo.bench.step import measure_step

METHODS = ["tezo", "tezo-m", "tezo-cadam", "lozo", "subzo", "tezo-adam", "mezo", "published:mezo"]
ONE = ["tezo"]
BATCHES = [
    Settings(dtype="bfloat16", batch=1, length="32", rounds=9, seconds=180),
    Settings(dtype="bfloat16", batch=2, length="16", rounds=9, seconds=180),
    Settings(dtype="bfloat16", batch=16, length="32", seconds=200),
    Settings(dtype="float32", batch=8, length="128", seconds=150),
]
STEP = [(replace(batch, targets=targets), METHODS) for targets in ("all-linear", "all") for batch in BATCHES]
STEP += [(replace(BATCHES[0], model=model, seconds=100), ONE) for model in ("opt-350m", "opt-1.3b")]
MEMORY = [(replace(batch, rounds=3, seconds=100), METHODS) for batch in (BATCHES[0], BATCHES[3])]


def main() -> None:
    """Measures all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=("step", "memory"))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    for kind, measure, plan in (("step", measure_step, STEP), ("memory", measure_memory, MEMORY)):
        if arguments.only in (None, kind):
            run(
                measure,
                [quick(*part) for part in plan] if arguments.quick else plan,
                arguments.out / f"{kind}_cpu.json",
            )


def run(measure: Callable[..., Any], plan: list[tuple[Settings, list[str]]], path: Path) -> None:
    """Measures one setting after another, and writes what there is after each."""
    results: list[dict[str, Any]] = []
    started = time.perf_counter()
    for settings, methods in plan:
        results.append(measure(settings, entries(methods, published=False)))
        write_json(path, results)
        print_table(results[-1])
        print(f"{time.perf_counter() - started:.0f} s so far\n", flush=True)
        gc.collect()


def quick(settings: Settings, methods: list[str]) -> tuple[Settings, list[str]]:
    """The same with the tiny shape, float32, one round."""
    return replace(settings, model="tiny", dtype="float32", rank=4, rounds=1, warmup=1), methods


if __name__ == "__main__":
    main()
