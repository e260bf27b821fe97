"""What `make demo` runs: the recipe of an example, once for every seed, each into a run folder of its own.

python examples/demo.py [issues | routing] [--seeds 0 1 2] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 5
"""Answers that are shown."""


def main() -> None:
    """Trains on each seed; with several, prints their table, and with --json writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", nargs="?", choices=("issues", "routing"), default="issues")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="write the results of all seeds here")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    results = [run(arguments.example, seed) for seed in arguments.seeds]
    if len(results) > 1:
        print(table(results))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        command = f"python examples/demo.py {arguments.example} --seeds {' '.join(map(str, arguments.seeds))}"
        arguments.json.write_text(json.dumps({"command": command, "runs": results}, indent=2) + "\n")


def run(example: str, seed: int) -> dict[str, Any]:
    """One run of the recipe, by the command line; its summary."""
    from tezo.cli.main import main as tezo

    output = free_folder(ROOT / "runs" / f"{example}-seed{seed}").relative_to(ROOT)
    command = ["train", f"examples/{example}/recipe.yaml", "--seed", str(seed), "--output", str(output)]
    print("$ tezo " + " ".join(command), flush=True)
    try:
        tezo(command)
    except SystemExit as stop:
        if stop.code:
            sys.exit(stop.code)
    print(answers(json.loads((output / "answers.json").read_text())))
    print(fine_tuned(example) + "Your own: tezo train --model MODEL --data ROWS.jsonl --output RUN\n", flush=True)
    return json.loads((output / "summary.json").read_text())


def answers(found: dict[str, Any]) -> str:
    """Some answers to test rows before and after, of each outcome in turn, and how many rows have it."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in found["shown"]:
        kinds.setdefault(row["outcome"], []).append(row)
    mixed = [row for row in chain(*zip_longest(*kinds.values())) if row is not None][:SHOWN]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found["outcomes"].items())
    lines = [f"Of {found['of']} unseen rows: {counts}. Among them:"]
    for row in mixed:
        text = row["text"].partition("\n")[0]
        mark = "right" if row["after"] == row["right"] else f"wrong, it is {row['right']}"
        lines.append(f"  {text}\n    before: {row['before']}; after: {row['after']} ({mark})")
    return "\n".join(lines)


def fine_tuned(example: str) -> str:
    """What LoRA with gradients came to on the same rows, from the committed table; "" where that has none."""
    path = ROOT / "benchmarks/results/real_tasks.json"
    runs = json.loads(path.read_text())["runs"]
    own = [run for name, run in runs.items() if name.startswith(f"{example}/LoRA with gradients")]
    if not own or example != "issues":  # the other example is of another model
        return ""
    best = min(own, key=lambda run: run["dev_loss"])["after"]
    return (
        f"LoRA with gradients, at the best of {len(own)} rates, ends at {100 * best['accuracy']:.1f} % and a loss of "
        f"{best['loss']:.3f} (benchmarks/results/real_tasks.json).\n"
    )


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that is not there."""
    folder, number = wanted, 2
    while folder.exists():
        folder, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return folder


def table(results: list[dict[str, Any]]) -> str:
    """Accuracy on the test rows before and after, seed by seed, and the median gain."""
    rows = [(r["seed"], 100 * r["before"]["accuracy"], 100 * r["after"]["accuracy"]) for r in results]
    lines = [f"seed {seed}: untuned {before:.1f} %, tuned {after:.1f} %" for seed, before, after in rows]
    gain = statistics.median(after - before for _, before, after in rows)
    return "\n".join([*lines, f"median gain: {gain:.1f} points"])


if __name__ == "__main__":
    main()
