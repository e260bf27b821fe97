"""What directions of their own cost the examples of a batch: time of a step and peak memory beside the shared form.

About ten minutes on two cores.

    python benchmarks/per_example.py [--out benchmarks/results] [--quick]

Writes step_per_example.json and memory_per_example.json at the shapes of `benchmarks/cpu.py`, after every setting.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from cpu import BATCHES, quick, run
from tezo_studies.bench.peak_memory import measure_memory
from tezo_studies.bench.step_time import measure_step

METHODS = ["tezo", "per-example:tezo", "head-feedback", "per-example:head-feedback"]
STEP = [(replace(batch, rounds=9, seconds=120), METHODS) for batch in BATCHES if batch.batch > 1]
MEMORY = [(replace(batch, rounds=3, seconds=80), METHODS) for batch in BATCHES if batch.batch > 2]


def main() -> None:
    """Measures all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    for kind, measure, plan in (("step", measure_step, STEP), ("memory", measure_memory, MEMORY)):
        path = given.out / f"{kind}_per_example.json"
        run(measure, [quick(*part) for part in plan] if given.quick else plan, path, [])


if __name__ == "__main__":
    main()
