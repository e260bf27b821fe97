"""The tables of engines, and of what methods learn of real rows with a real language model."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from drawing import grid, machine, read


def engines() -> str:
    """Seconds of a direction's pass over 64 rows, by engine, and what they are of a pass without a change."""
    found = read("engines")
    rows = [
        [
            name,
            f"{own['seconds_changed']:.2f}",
            f"{own['tokens'] / own['seconds_changed']:.0f}",
            f"{own['ratio']:.2f}",
            f"{own['peak'] / 2**20:.0f}",
            f"{own['memory_ratio']:.2f}",
        ]
        for name, own in found["ways"].items()
    ]
    heads = ["", "seconds a direction", "tokens a second", "of a plain pass", "peak MiB", "of a plain pass"]
    what = f"{found['model']}, {found['rows']} rows of SST-2, a change of rank {found['rank']} in all linear layers"
    return grid(heads, rows) + (
        f"\n{what}; medians of {found['passes']} passes, each beside one without a change, a process for each engine. "
        "The peak is that of the process, with Python, torch and transformers. `python benchmarks/engines.py`; "
        f"{machine(found)}.\n"
    )


def engine_runs() -> str:
    """What the default run on SST-2 comes to in each engine."""
    found = read("engine_runs")
    rows = [
        [
            name,
            *(f"{run[when]['loss']:.3f}" for when in ("before", "after")),
            *(f"{100 * own['accuracy']:.1f} %" for own in (run["before"], run["untuned"]["bias"], run["after"])),
            f"{sum(phase['passes'] for phase in run['phases'].values()):.0f}",
            f"{run['peak_memory'] / 2**20:.0f}",
        ]
        for name, run in found["runs"].items()
    ]
    heads = ["", "test loss before", "after", "accuracy before", "with a bias fitted", "after", "passes", "peak MiB"]
    counts = ", ".join(f"{count} {part}" for part, count in found["rows"].items())
    (first, *_) = found["runs"].values()
    return grid(heads, rows) + (
        f"\n{found['model']}, SST-2, rows: {counts}; `tezo train` with nothing set, one seed. "
        f"`python benchmarks/engine_runs.py --shared FOLDER`; {machine(first)}.\n"
    )


def real_tasks() -> str:
    """What methods learn of real rows, beside LoRA: test loss and accuracy, and passes."""
    found = read("real_tasks")
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, own in found["runs"].items():
        groups.setdefault(name.partition(", seed")[0], []).append(own)
    rows = []
    for name, runs in groups.items():
        task, _, method = name.partition("/")
        middle = [statistics.median(part(run) for run in runs) for part in (_passes, _loss, _accuracy)]
        rows.append([task, method, f"{len(runs)}", f"{middle[0]:.0f}", f"{middle[1]:.3f}", f"{middle[2]:.1f} %"])
    for task in dict.fromkeys(row[0] for row in rows):
        first = next(run for name, run in found["runs"].items() if name.startswith(f"{task}/"))
        known = {"untuned": first["before"]}
        if first.get("untuned"):
            known |= {"untuned, bias fitted": first["untuned"]["bias"], "linear probe": first["untuned"]["probe"]}
        rows += [
            [task, what, "", "0", f"{_loss({'after': own}):.3f}", f"{_accuracy({'after': own}):.1f} %"]
            for what, own in known.items()
        ]
    tasks = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: (tasks.index(row[0]), -float(row[4])))
    heads = ["rows", "", "seeds", "passes of 64 rows", "test loss", "accuracy"]
    sizes = {name.partition("/")[0]: run["rows"] for name, run in found["runs"].items()}
    counts = "; ".join(f"{task}: " + ", ".join(f"{n} {part}" for part, n in own.items()) for task, own in sizes.items())
    ran = dict.fromkeys(machine(run) for run in found["runs"].values())
    return grid(heads, rows) + (
        f"\n{found['model']} in float32; medians of the seeds; {counts} rows; accuracy of tokens where the rows are "
        "texts. Passes are all but those of evaluations, looks and searches among them; LoRA's are forward passes, "
        f"each with a backward one. `python benchmarks/real_tasks.py`; {'; '.join(ran)}.\n"
    )


def levels(task: str) -> str:
    """A sentence on a task: the untuned model, what is fitted to it, our default, LoRA at its best rate."""
    runs = {name.partition("/")[2]: run for name, run in read("real_tasks")["runs"].items() if name.startswith(task)}
    ours = [run for name, run in runs.items() if name.startswith("gauss-newton, 6")]
    lora = min((run for name, run in runs.items() if name.startswith("LoRA")), key=lambda run: run["dev_loss"])
    fitted = {what: _accuracy({"after": ours[0]["untuned"][what]}) for what in ("bias", "probe")}
    middle = [statistics.median(part(run) for run in ours) for part in (_accuracy, _passes)]
    said = [
        f"Accuracy on {ours[0]['rows']['test']} test rows: untuned {_accuracy({'after': ours[0]['before']}):.1f} %,",
        f"with a bias fitted to each label {fitted['bias']:.1f} %, under a linear probe {fitted['probe']:.1f} %; the",
        f"default {middle[0]:.1f} % in {middle[1]:.0f} passes of 64 rows, median of {len(ours)} seeds; LoRA with",
        f"gradients {_accuracy(lora):.1f} % in {_passes(lora):.0f} there and back.",
        f"`python benchmarks/real_tasks.py`; {machine(lora)}.",
    ]
    return " ".join(said) + "\n"


def _loss(run: dict[str, Any]) -> float:
    loss: float = run["after"]["loss"]
    return loss


def _accuracy(run: dict[str, Any]) -> float:
    after = run["after"]
    return 100 * float(after["accuracy"] if "accuracy" in after else after["token_accuracy"])


def _passes(run: dict[str, Any]) -> float:
    passes: float = run["passes_of_64_rows"]
    return passes


ENGINE_TABLES: dict[str, Callable[[], str]] = {
    "engines": engines,
    "engine-runs": engine_runs,
    "real-tasks": real_tasks,
    "levels": partial(levels, "issues"),
}
