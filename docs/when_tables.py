"""The tables of docs/when.md, drawn from what `benchmarks/when.py` has measured so far."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import drawing
from drawing import SHORT, grid, machine, read

GIB = 2**30
AFTER = (2, 5, 15, 60)
"""Seconds of steps after which losses are compared."""
NAMES = {"tezo": "tezo (`head-feedback`)", "lora": "LoRA, Adam", "full": "full fine-tuning, Adam"}
QLORA = {"LoRA with gradients": "QLoRA", "LoRA with gradients, checkpointed": "QLoRA, checkpointed"}
"""Ways over a base in nf4 that have a name of their own."""


def when_memory() -> str:
    """Peak memory beside its forecast, in GiB."""
    return _costs("memory", _measured_memory, "GiB over that of the process without a model; in brackets the forecast")


def when_time() -> str:
    """Seconds of a step."""
    return _costs("time", _measured_seconds, "Seconds of a step, of inference of a pass; medians of up to 5 steps")


def _costs(measure: str, shown: Callable[[dict[str, Any], float], str], what: str) -> str:
    made = when()
    cells = {name: cell for name, cell in made["cells"].items() if name.startswith("costs/")}
    done = [name.split("/") for name in cells if name.endswith(f"/{measure}")]
    if not done:
        return ""
    # the order of the file is that in which cells were measured
    shapes, dtypes = (list(dict.fromkeys(name[place] for name in done)) for place in (1, 2))
    columns = sorted({(n[1], n[2]) for n in done}, key=lambda key: (shapes.index(key[0]), dtypes.index(key[1])))
    order = list(next(cell["ways"] for name, cell in cells.items() if name.endswith("/forecast")))
    rows = []
    for packed, way in sorted({(n[3], n[4]) for n in done}, key=lambda key: (key[0] == "nf4", order.index(key[1]))):
        row = [_label(way, packed)]
        for shape, dtype in columns:
            start = f"costs/{shape}/{dtype}/{packed}"
            cell, forecast = cells.get(f"{start}/{way}/{measure}"), cells[f"{start}/forecast"]["ways"].get(way)
            row.append("-" if cell is None else shown(cell, forecast))
        rows.append(row)
    asked = next(cells["/".join(name)]["cell"] for name in done)
    return grid(["", *(f"{shape} {SHORT[dtype]}" for shape, dtype in columns)], rows) + (
        f"\n{what}. {asked['rows']} rows of {asked['length']} tokens, random weights, each cell in a process of its "
        f"own. `{made['command']}`; {machine(made)}.\n"
    )


def _label(way: str, packed: str) -> str:
    return way if packed == "none" else QLORA.get(way, f"{way}, nf4 base")


def _measured_memory(cell: dict[str, Any], forecast: float) -> str:
    return _skipped(cell) or f"{cell['bytes'] / GIB:.2f} ({forecast / GIB:.2f})"


def _measured_seconds(cell: dict[str, Any], forecast: float) -> str:
    del forecast
    return _skipped(cell) or f"{statistics.median(cell['seconds']):.2f}"


def _skipped(cell: dict[str, Any]) -> str:
    return f"not run ({cell['skipped']})" if "skipped" in cell else ""


def when_curves(model: str, metric: str) -> str:
    """Dev losses against seconds, of the best rate by the dev loss at the end, and a metric of the test rows."""
    made = when()
    cells = {n: c for n, c in made["cells"].items() if n.startswith(f"curves/{model}/") and "skipped" not in c}
    rows = []
    for way, label in NAMES.items():
        runs = [cell for name, cell in cells.items() if name.split("/")[2] == way]
        if runs:
            best = min(runs, key=lambda run: run["dev_loss"])
            losses = [_loss_by(best["curve"], seconds) for seconds in AFTER]
            rate = f"{best['lr']:.0e}, " + ("chosen" if way == "tezo" else f"best of {len(runs)}")
            ends = [f"{best['dev_loss']:.3f}", f"{best['seconds_stepping']:.0f} + {best['preparing']:.0f}"]
            metrics = [f"{100 * best[when_][metric]:.1f} %" for when_ in ("before", "after")]
            rows.append([label, rate, f"{best['dev_loss_before']:.3f}", *losses, *ends, *metrics])
    if not rows:
        return ""
    found = cells.get(f"curves/{model}/probe")
    if found is not None:
        took, after = f"{found['seconds']:.0f}", f"{100 * found['after'][metric]:.1f} %"
        rows.append(["logistic regression, frozen", *["-"] * (len(AFTER) + 3), took, "-", after])
    name = metric.replace("_", " ")
    heads = ["", "rate", "dev loss", *(f"{seconds} s" for seconds in AFTER), "kept", "seconds", f"test {name}", "after"]
    return grid(heads, rows) + (
        "\nDev loss at the start, the lowest until so many seconds of steps, and that of the kept step; seconds of all "
        "steps + before the first one, in which the model is loaded and tezo chooses its rate. One seed. "
        f"`{made['command']}`; {machine(made)}.\n"
    )


def _loss_by(curve: Sequence[Sequence[float]], seconds: float) -> str:
    """The lowest loss by then; of a run that had ended earlier, its lowest."""
    return f"{min(loss for at, loss in curve if at <= seconds):.3f}"


def when_large() -> str:
    """Forecasts for models that were not run, GiB."""
    made = when()
    start = "arithmetic/"
    cells = {name.removeprefix(start): cell for name, cell in made["cells"].items() if name.startswith(start)}
    if not cells:
        return ""
    shapes = list(dict.fromkeys(name.split("/")[0] for name in cells))
    rows = []
    for packed in ("none", "nf4"):
        ways = next((cell["ways"] for name, cell in cells.items() if name.endswith(f"/{packed}")), {})
        for way in ways:
            found = [cells.get(f"{shape}/{packed}") for shape in shapes]
            rows.append([_label(way, packed), *("-" if c is None else f"{c['ways'][way] / GIB:,.0f}" for c in found)])
    asked = next(iter(cells.values()))["cell"]
    return grid(["**arithmetic**, GiB", *shapes], rows) + (
        f"\n**Arithmetic: nothing was run.** bfloat16, {asked['rows']} rows of {asked['length']} tokens, counted from "
        "shapes as `tezo doctor` does; attention is counted with its scores, which fused kernels do not store. "
        f"`{made['command']} --only arithmetic`.\n"
    )


def when() -> Any:
    """What `benchmarks/when.py` has written; no cells: nothing yet."""
    return read("when") if (drawing.RESULTS / "when.json").is_file() else {"cells": {}}


WHEN_TABLES: dict[str, Callable[[], str]] = {
    "when-memory": when_memory,
    "when-time": when_time,
    "when-decoder": partial(when_curves, "decoder", "token_accuracy"),
    "when-encoder": partial(when_curves, "encoder", "accuracy"),
    "when-large": when_large,
}
