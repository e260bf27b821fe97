"""What `make demo` runs: the recipe beside this file, once for every seed, each into a run folder of its own.

python examples/routing/demo.py [--seeds 0 1 2] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "examples/routing/recipe.yaml"


def main() -> None:
    """Trains on each seed; with several, prints their table, and with --json writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="write the results of all seeds here")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    results = [run(seed) for seed in arguments.seeds]
    if len(results) > 1:
        print(table(results))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        command = f"python examples/routing/demo.py --seeds {' '.join(map(str, arguments.seeds))}"
        arguments.json.write_text(json.dumps({"command": command, "runs": results}, indent=2) + "\n")


def run(seed: int) -> dict:
    """One run of the recipe, by the command line; its summary."""
    from tezo.cli.main import main as tezo

    output = free_folder(ROOT / "runs" / f"routing-seed{seed}").relative_to(ROOT)
    command = ["train", RECIPE, "--seed", str(seed), "--output", str(output)]
    print("$ tezo " + " ".join(command), flush=True)
    try:
        tezo(command)
    except SystemExit as stop:
        if stop.code:
            sys.exit(stop.code)
    print("Your own: tezo train --model MODEL --data ROWS.jsonl --output RUN\n", flush=True)
    return json.loads((output / "summary.json").read_text())


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that is not there."""
    folder, number = wanted, 2
    while folder.exists():
        folder, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return folder


def table(results: list[dict]) -> str:
    """Accuracy on the test rows before and after, seed by seed, and the median gain."""
    rows = [(r["seed"], 100 * r["before"]["accuracy"], 100 * r["after"]["accuracy"]) for r in results]
    lines = [f"seed {seed}: zero-shot {before:.1f} %, tuned {after:.1f} %" for seed, before, after in rows]
    gain = statistics.median(after - before for _, before, after in rows)
    return "\n".join([*lines, f"median gain: {gain:.1f} points"])


if __name__ == "__main__":
    main()
