"""Operations that a step dispatches, beside those of the passes that it needs at least: what a GPU has to launch.

    python benchmarks/launches.py [--json benchmarks/results/launches.json]

Counts on a CPU, with models that have the layers of the named ones and are narrow: the number depends on the layers,
not on their sizes. The batch is small enough for both signs of a step to share a pass, as they do on a GPU. A minute.
`benchmarks/gpu.py` counts the kernels themselves.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tezo_studies.bench.cases import make_case
from tezo_studies.bench.launches import count_launches
from tezo_studies.bench.result_files import commit
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.workload import Work

from tezo.runs.environment import versions
from tezo.system.progress import quiet_libraries

SHAPES = ("opt-1.3b", "llama-7b")
LABELS = (
    "F2", "J2", "tezo", "tezo-m", "tezo-cadam", "tezo-adam", "per-example:tezo", "head-feedback",
    "per-example:head-feedback", "mezo", "published:mezo",
)  # fmt: skip
ROWS, LENGTH, RANK = 4, 16, 32
STEPS = 2
"""Steps before the counted one: the first makes the factors, and the moments of some methods."""


def main() -> None:
    """Counts all cases, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/launches.json")
    given = parser.parse_args()
    quiet_libraries()
    counts = {shape: counted(shape) for shape in SHAPES}
    head = {"command": "python benchmarks/launches.py", "versions": versions(), "commit": commit()}
    found = head | {"rows": ROWS, "length": LENGTH, "rank": RANK, "operations": counts}
    given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def counted(shape: str) -> dict[str, int]:
    """Label -> operations of a step of the narrow model with the layers of a shape."""
    work = Work(Settings(model=f"narrow-{shape}", batch=ROWS, length=str(LENGTH), rank=RANK))
    found: dict[str, Any] = {}
    for label in LABELS:
        case = make_case(label, work)
        try:
            for _ in range(STEPS):
                case.run()
            found[label] = count_launches(case.run, work.device)["operations"]
        finally:
            case.close()
        print(shape, label, found[label], flush=True)
    return found


if __name__ == "__main__":
    main()
