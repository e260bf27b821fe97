"""The tables of runs as a newcomer starts them: with default settings, on small models and few rows."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from drawing import grid, machine, read

NEAR = 1.05
"""A dev loss below this multiple of the best is near it."""


def first_runs() -> str:
    """How many first runs ended better than they began, by method."""
    results = read("first_runs")
    finished = _finished(results)
    groups = {name: runs for name, runs in _by(finished, "method").items() if name != results["paper"]}
    rows = [[f"`{name}`", *_outcome(runs)] for name, runs in groups.items()]
    every = [run for runs in groups.values() for run in runs]
    rows.append(["all", *_outcome(every)])
    rows.append(["TeZO, no guard, best of three rates", *_outcome(_best_rates(results))])
    table = grid(
        ["measured settings, by method", "runs", "dev loss fell", "rose by more than 1 %", "median change"], rows
    )
    models = ", ".join(_by(finished, "model"))
    return table + f"\nModels: {models}. `{results['command']}`; {machine(results)}.\n"


def first_runs_models() -> str:
    """The dev loss at the start and at the end, by model, data and method."""
    results = read("first_runs")
    finished = _finished(results)
    methods = [name for name in _by(finished, "method") if name != results["paper"]]
    rows = []
    for model, of_model in _by(finished, "model").items():
        for data, runs in _by(of_model, "data").items():
            by_method = _by(runs, "method")
            start = statistics.median({run["seed"]: run["dev_loss_before"] for run in runs}.values())
            ends = [f"{statistics.median(run['dev_loss'] for run in by_method[name]):.3f}" for name in methods]
            best = min(run["dev_loss"] for run in by_method[results["paper"]])
            rows.append([model, data, f"{start:.3f}", *ends, f"{best:.3f}"])
    heads = ["model", "data", "start", *(f"`{name}`" for name in methods), "TeZO, no guard, best of three rates"]
    said = "Dev loss, medians of seeds; the last column is of one"
    return grid(heads, rows) + f"\n{said}. `{results['command']}`; {machine(results)}.\n"


def learning_rates() -> str:
    """The rate that a run chose, beside the best of a grid by dev loss."""
    results, rows, near = read("learning_rates"), [], 0
    finished = {names: runs for names, runs in _settings_of(results).items() if len(runs) == len(results["grid"]) + 1}
    for (model, data, method), runs in finished.items():
        (chosen,) = (run for run in runs if run["asked_lr"] is None)
        best = min((run for run in runs if run["asked_lr"] is not None), key=lambda run: run["dev_loss"])
        ratio = chosen["dev_loss"] / best["dev_loss"]
        near += ratio <= NEAR
        losses = [f"{run['dev_loss']:.3f}" for run in (chosen, best)]
        start, rates = f"{chosen['dev_loss_before']:.3f}", [f"{run['lr']:.1e}" for run in (chosen, best)]
        rows.append([model, data, f"`{method}`", start, rates[0], losses[0], rates[1], losses[1], f"{ratio:.3f}"])
    heads = ["model", "data", "method", "start", "chosen", "dev loss", "best of grid", "dev loss", "ratio"]
    return grid(heads, rows) + (
        f"\n{near} of {len(rows)} chosen rates end within {100 * (NEAR - 1):.0f} % of the best of "
        f"{len(results['grid'])} rates from {results['grid'][0]:g} to {results['grid'][-1]:g}, by the dev loss of the "
        f"kept step of {results['steps']}. `{results['command']}`; {machine(results)}.\n"
    )


def _settings_of(results: dict[str, Any]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        found.setdefault((run["model"], run["data"], run["method"]), []).append(run)
    return found


def _by(runs: Sequence[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run[key], []).append(run)
    return found


def _finished(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of models and data sets that have all methods."""
    of_set: dict[tuple[str, str], set[str]] = {}
    for run in results["runs"]:
        of_set.setdefault((run["model"], run["data"]), set()).add(run["method"])
    most = max(map(len, of_set.values()))
    return [run for run in results["runs"] if len(of_set[run["model"], run["data"]]) == most]


def _best_rates(results: dict[str, Any]) -> list[dict[str, Any]]:
    paper = [runs for (_, _, method), runs in _settings_of(results).items() if method == results["paper"]]
    return [min(runs, key=lambda run: run["dev_loss"]) for runs in paper]


def _outcome(runs: Sequence[dict[str, Any]]) -> list[str]:
    changes = [run["dev_loss"] / run["dev_loss_before"] - 1 for run in runs]
    fell, rose = sum(change < 0 for change in changes), sum(change > 0.01 for change in changes)
    return [f"{len(runs)}", f"{fell}", f"{rose}", f"{100 * statistics.median(changes):+.1f} %"]


def newcomer() -> str:
    """What commands of a newcomer ended with."""
    results, rows = read("newcomer"), []
    for run in results["runs"]:
        metric = "accuracy" if "accuracy" in run["after"] else "token_accuracy"
        asked = "chosen" if run["asked_lr"] is None else "given"
        before, after = run["before"], run["after"]
        rows.append([
            run["model"], f"`{run['method']}`", f"{run['lr']:.1e}, {asked}", f"{run['steps']}",
            *(f"{part['loss']:.3f}" for part in (before, after)),
            *(f"{100 * part[metric]:.1f} %" for part in (before, after)),
            run["verdict"],
        ])  # fmt: skip
    heads = ["model", "method", "rate", "steps", "test loss", "after", "test accuracy", "after", "verdict of the run"]
    return grid(heads, rows) + f"\nOne seed. `{results['command']}`; {machine(results)}.\n"


def real_model() -> str:
    """What a run of the embedded language model says and measures, by data type."""
    results, rows = read("real_model"), []
    for dtype, run in results["runs"].items():
        phases = run["phases"]
        passes = [phases.get(name, {}).get("passes", 0.0) for name in ("measuring rho", "searching the learning rate")]
        rows.append([
            dtype, f"{run['first_line']:.1f} s", f"{run['longest_silence']:.1f} s", f"{run['seconds']:.0f} s",
            f"{sum(phase['passes'] for phase in phases.values()):.0f}", *(f"{made:.0f}" for made in passes),
            f"{run['rho']:g}", f"{run['highest_ratio']:.3f}",
            *(f"{part['loss']:.3f} / {100 * part['accuracy']:.1f} %" for part in (run["before"], run["after"])),
        ])  # fmt: skip
    heads = [
        "dtype", "first line", "longest silence", "whole run", "forward passes", "of them for rho", "for the rate",
        "rho", "highest point / unperturbed loss", "test before", "after",
    ]  # fmt: skip
    said = (
        f"{results['rows']['train']} training rows, {results['rows']['dev']} dev, {results['rows']['test']} test, "
        f"{results['steps']} steps, one seed; the points are of the first 20 steps"
    )
    return grid(heads, rows) + f"\n{said}. `{results['command']}`; {machine(results)}.\n"


FIRST_RUN_TABLES: dict[str, Callable[[], str]] = {
    "first-runs": first_runs,
    "first-runs-models": first_runs_models,
    "learning-rates": learning_rates,
    "newcomer": newcomer,
    "real-model": real_model,
}
