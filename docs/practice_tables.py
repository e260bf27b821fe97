"""The tables of what practitioners take on labelled rows, drawn from `practice.json`."""

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from drawing import grid, machine, read

ENCODER = "22M encoder"
LINES = {
    "gauss-newton": "`gauss-newton`, the default",
    "tezo probe": "`--method probe`",
    "probe": "probe, best depth",
    "neighbours": "nearest neighbours",
    "few-shot": "8 rows in the prompt",
    "encoder": f"{ENCODER}, untouched",
    "setfit": f"{ENCODER}, SetFit",
}
"""Line of the results -> its name in a table, those of one model of 135M parameters first."""
DEFAULT = next(iter(LINES))
SAME_ROWS = ("issues", "trec", "routing", "sst2")
"""Tasks whose rows and prompts are those of `real_tasks`."""
TASKS = ("issues", "trec", "sst2", "sst5", "routing", "rte", "trec-fine")
COUNTS = ("8 rows a label", "16 rows a label", "64 rows a label", "all rows")

Runs = dict[tuple[str, str, str], list[dict[str, Any]]]
"""(task, rows, line) -> its runs, one for each seed."""


def by_cell() -> Runs:
    """All runs that were made, those of the default with all rows by `real_tasks`."""
    found: Runs = {}
    for name, run in read("practice")["runs"].items():
        task, rows, line = name.rpartition(", seed ")[0].split("/")
        found.setdefault((task, rows, line), []).append(run)
    for name, run in read("real_tasks")["runs"].items():
        task, _, line = name.rpartition(", seed ")[0].partition("/")
        if task in SAME_ROWS and line == DEFAULT:
            found.setdefault((task, COUNTS[-1], line), []).append(run)
    return found


def cell(runs: list[dict[str, Any]], key: str, scale: float, digits: int) -> str:
    """The median of some runs, with the lowest and the highest where there are several."""
    values = sorted(scale * run["after"][key] for run in runs)
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({values[0]:.{digits}f} to {values[-1]:.{digits}f})"


def practice(key: str, scale: float, digits: int) -> str:
    """A metric of the test rows of each task and line, by the number of training rows."""
    cells = by_cell()
    rows = []
    for task in (task for task in TASKS if any(own[0] == task for own in cells)):
        for line, label in LINES.items():
            of_line = [cells.get((task, count, line), []) for count in COUNTS]
            if any(of_line):
                seeds = max(len(runs) for runs in of_line)
                rows.append([task, label, str(seeds), *(cell(runs, key, scale, digits) for runs in of_line)])
    return grid(["rows", "", "seeds, at most", *COUNTS], rows) + _source(run for runs in cells.values() for run in runs)


def costs() -> str:
    """Passes, seconds and peak memory of each line on the tasks that all lines have, with all rows."""
    cells = by_cell()
    rows, ran = [], []
    for (task, count, line), runs in sorted(cells.items(), key=lambda own: [*LINES].index(own[0][2])):
        if count == COUNTS[-1]:
            if "peak_memory" not in runs[0]:
                continue
            passes, memory = (
                statistics.median(run[key] for run in runs) for key in ("passes_of_64_rows", "peak_memory")
            )
            ran += runs
            seconds = [run["cpu_seconds"] for run in runs if "cpu_seconds" in run]  # the first runs did not keep them
            spent = f"{statistics.median(seconds):.0f}" if seconds else "-"
            rows.append([LINES[line], task, f"{passes:.0f}", spent, f"{memory / 2**20:.0f} MiB"])
    note = "Seconds are those that a CPU spent on the run's one thread, since the machine was busy with other work. "
    return grid(["", "rows", "passes of 64 rows", "CPU seconds", "peak memory of the process"], rows) + "\n" + note + (
        "SetFit's passes are forward and backward. " + _source(ran).lstrip()
    )  # fmt: skip


def probe_level(task: str) -> str:
    """The end of a sentence on a probe of all rows of a task, with the depth that it does best at; "" without a run."""
    runs = by_cell().get((task, COUNTS[-1], "probe"), [])
    return f", and of those at its best depth {cell(runs, 'accuracy', 100, 1)} %" if runs else ""


def setfit_level(task: str) -> str:
    """A sentence on SetFit with all rows of a task; "" where it has no run yet."""
    runs = by_cell().get((task, COUNTS[-1], "setfit"), [])
    if not runs:
        return ""
    return (
        "SetFit on a sentence encoder of 22M parameters, another model of another size: "
        f"{cell(runs, 'accuracy', 100, 1)} %, median of {len(runs)} seeds (`python benchmarks/practice.py`)."
    )


def _source(runs: Iterable[dict[str, Any]]) -> str:
    where = "; ".join(dict.fromkeys(machine(run) for run in runs))
    cells = "Median, lowest and highest of the seeds; a number alone: one seed; a dash: no run."
    return f"\n{cells} `python benchmarks/practice.py`; {where}.\n"


PRACTICE_TABLES: dict[str, Callable[[], str]] = {
    "practice-accuracy": partial(practice, "accuracy", 100.0, 1),
    "practice-loss": partial(practice, "loss", 1.0, 3),
    "practice-costs": costs,
}
