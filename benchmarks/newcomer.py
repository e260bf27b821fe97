"""What a newcomer types, and what it comes to: five commands on a pretrained decoder, one on an encoder with 60 rows.

    python benchmarks/newcomer.py --shared FOLDER [--out benchmarks/results] [--workers 2]

The decoder's rows are prompt and completion, 200 steps (100 for first-order adam). The encoder's are 60 messages of
examples/routing in a CSV file, all settings at their defaults; its 272 test rows are not seen by the run. Some minutes
of one core. Writes newcomer.json after every run, and goes on with what is missing.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from small_runs import Job, command, measured, model_name, rows

ROUTING = Path(__file__).parents[1] / "examples/routing"
CSV_ROWS = 60
COMMANDS: tuple[tuple[str, float | None, bool, int], ...] = (
    ("head-feedback", None, True, 200),
    ("tezo", None, True, 200),
    ("tezo-cadam", None, True, 200),
    ("head-feedback", 1e-3, False, 200),
    ("adam", 1e-3, True, 100),
)
"""(method, rate or None for the chosen one, whether dev rows are given, steps)."""


def jobs(shared: Path, made: Path) -> Iterator[Job]:
    """All runs."""
    for method, lr, dev, steps in COMMANDS:
        entry = {"model": "decoder", "data": "completions", "method": method, "seed": 0, "asked_lr": lr}
        given = {key: value for key, value in rows("completions", shared).items() if dev or key != "data.dev"}
        own = {} if lr is None else {"method.lr": lr}
        fixed = {
            **measured(method),
            "model.name": model_name("decoder", shared, made),
            "method.name": method,
            "train.steps": steps,
        }
        yield entry, {**fixed, **given, **own}
    entry = {"model": "encoder", "data": "routing", "method": "head-feedback", "seed": 0, "asked_lr": None}
    yield entry, {
        "model.name": model_name("encoder", shared, made), "data.train": str(few_rows(made / "messages.csv")),
        "data.test": str(ROUTING / "test.jsonl"),
    }  # fmt: skip


def few_rows(path: Path) -> Path:
    """Writes the first messages as a CSV file."""
    lines = (ROUTING / "train.jsonl").read_text(encoding="utf-8").splitlines()[:CSV_ROWS]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(map(json.loads, lines))
    return path


if __name__ == "__main__":
    command(__doc__, "newcomer", jobs, (), csv_rows=CSV_ROWS)
