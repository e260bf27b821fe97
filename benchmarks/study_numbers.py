"""What follows from the study's curves: how soon a loss is reached, how much of the gap to fine-tuning is left.

Everything is made from curves.json, so that it can be made again without the runs.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

LEAST_GAP = 0.02
"""By which fine-tuning must be above MeZO in test accuracy for the gap to be shared out."""
REFERENCES = ("tezo", "tezo-adam")
BLIND, TUNED = "mezo", "ft"
NOT_BY_PASSES = ("", "adam")
CIRCUMSTANCES = (
    "table",
    "title",
    "model",
    "small",
    "seeds",
    "columns",
    "command",
    "commit",
    "hardware",
    "versions",
    "runs",
)


def numbers_of(curves: dict[str, Any]) -> dict[str, Any]:
    """The figures of every line, and the best one whose runs are exact adapters."""
    lines = {line["key"]: line for line in curves["lines"]}
    gaps = {key: gap_of(key, lines) for key in curves["columns"]}
    found = [line_numbers(line, lines, gaps) for line in curves["lines"]]
    made = {key: curves[key] for key in CIRCUMSTANCES}
    return made | {"least_gap": LEAST_GAP, "gaps": gaps, "best_adapter": best_adapter(found), "lines": found}


def line_numbers(line: dict[str, Any], lines: dict[str, Any], gaps: dict[str, Any]) -> dict[str, Any]:
    """The figures of a line, over all columns and in each."""
    runs = [run for column in line["columns"].values() for run in column["runs"]]
    finals = [run["dev_loss"][-1] for run in runs if run["dev_loss"]]
    basis, passes = (sum(of(run) for run in runs) for of in (basis_passes, all_passes))
    return {
        "label": line["label"],
        "key": line["key"],
        "runs": len(runs),
        "exports": bool(runs) and all(run["exports"] for run in runs),
        "median_dev_loss": statistics.median(finals) if finals else None,
        **{name_of(key): passes_to(line, lines.get(key), line["columns"]) for key in REFERENCES},
        "basis_share": basis / passes if passes else None,
        "seconds_on_basis": sum(run["seconds_on_basis"] for run in runs),
        "seconds_stepping": sum(run["seconds_stepping"] or 0.0 for run in runs),
        "columns": {key: column_numbers(key, line, lines, gaps[key]) for key in line["columns"]},
    }


def column_numbers(key: str, line: dict[str, Any], lines: dict[str, Any], gap: dict[str, Any]) -> dict[str, Any]:
    """The figures of a line in a column."""
    column = line["columns"][key]
    accuracy = spread([run["after"] for run in column["runs"]])
    left = (gap["ft"] - accuracy["mean"]) / gap["points"] if gap["is_gap"] else None
    return {
        "rate": column["rate"],
        "at_an_end": column["at_an_end"],
        "failed": len(column["failed"]),
        "dev_loss": spread([run["dev_loss"][-1] for run in column["runs"] if run["dev_loss"]]),
        "accuracy": accuracy,
        "test_loss": spread([run["test_loss"] for run in column["runs"] if run.get("test_loss") is not None]),
        **{name_of(reference): passes_to(line, lines.get(reference), [key]) for reference in REFERENCES},
        "gap_left": left,
    }


def name_of(reference: str) -> str:
    """Of the share of the budget: passes_to_tezo_adam."""
    return "passes_to_" + reference.replace("-", "_")


def crossing(passes: Sequence[float], losses: Sequence[float], target: float) -> float:
    """Where the curve, straight between its points, is first as low as `target`; infinity: nowhere."""
    if losses[0] <= target:
        return passes[0]
    points = itertools.pairwise(zip(passes, losses, strict=True))
    for (before, above), (after, below) in points:
        if below <= target:
            return before + (after - before) * (above - target) / (above - below)
    return math.inf


def passes_to(line: dict[str, Any], reference: dict[str, Any] | None, columns: Iterable[str]) -> dict[str, Any]:
    """After which share of the reference's forward passes a line has its final dev loss, on the same rows and seed.

    Of a line that steps by gradient nothing is counted: a pass of it is forward and backward.

    Returns:
        `median` over columns and seeds, where never counts as infinity and is given as None; `reached` of `of`.
    """
    shares = []
    for key in columns:
        comparable = reference is not None and line["method"] not in NOT_BY_PASSES
        others = reference["columns"].get(key, {"runs": []})["runs"] if comparable else []
        by_seed = {run["seed"]: run for run in others if run["dev_loss"]}
        for run in line["columns"][key]["runs"]:
            if run["dev_loss"] and (other := by_seed.get(run["seed"])) is not None:
                reached = crossing(run["passes"], run["dev_loss"], other["dev_loss"][-1])
                shares.append(reached / other["passes"][-1])
    middle = statistics.median(shares) if shares else math.inf
    reached = sum(map(math.isfinite, shares))
    return {"median": middle if math.isfinite(middle) else None, "reached": reached, "of": len(shares)}


def gap_of(column: str, lines: dict[str, Any]) -> dict[str, Any]:
    """Test accuracy of fine-tuning above MeZO's, means over seeds; `is_gap` tells whether there is one to speak of."""
    tuned, blind = (mean_accuracy(lines.get(key), column) for key in (TUNED, BLIND))
    points = tuned - blind if tuned is not None and blind is not None else None
    return {"ft": tuned, "mezo": blind, "points": points, "is_gap": points is not None and points >= LEAST_GAP}


def mean_accuracy(line: dict[str, Any] | None, column: str) -> float | None:
    """Over the seeds; None: no run."""
    runs = line["columns"].get(column, {"runs": []})["runs"] if line is not None else []
    return statistics.mean(run["after"] for run in runs) if runs else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation; None of too few."""
    return {
        "mean": statistics.mean(values) if values else None,
        "stdev": statistics.stdev(values) if len(values) > 1 else None,
        "of": len(values),
    }


def best_adapter(lines: Sequence[dict[str, Any]]) -> str | None:
    """The line with the lowest median final dev loss of those whose runs are exact adapters, in as many runs."""
    rivals = [line for line in lines if line["exports"] and line["median_dev_loss"] is not None]
    most = max((line["runs"] for line in rivals), default=0)
    whole = [line for line in rivals if line["runs"] == most]
    return min(whole, key=lambda line: line["median_dev_loss"])["key"] if whole else None


def basis_passes(run: dict[str, Any]) -> float:
    """Forward passes that collected the basis."""
    return float(run["basis_passes"])


def all_passes(run: dict[str, Any]) -> float:
    """Forward passes of the run, those among them."""
    return float(run["passes"][-1]) if run["passes"] else 0.0
