"""The study of bases that see the data, read off its finished runs: curves, what follows from them, a figure.

    tezo reproduce study --data-dir DATA --devices cpu,cpu --output RUNS
    python benchmarks/study.py RUNS [--results FOLDER] [--figures FOLDER]

Writes runs.csv (every run), curves.json (those at the chosen rates), numbers.json (made from the curves alone), and
the figure study.png and .svg; of study-long likewise, by that name. A line's column counts once all of its runs are
over; what was read before into the same folder stays, but for the lines' columns that RUNS has too, so that a study can
be run in parts. `benchmarks/study.sh` does both, column by column.
"""

import argparse
import csv
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from study_chart import save_chart
from study_join import all_of, joined_curves, joined_runs
from study_numbers import numbers_of
from tezo_studies.bench.result_files import commit
from tezo_studies.reproduce import Cell, Grid, find_table, make_grid
from tezo_studies.reproduce.results import all_cells, chooser, is_finished, summary_of

from tezo.runs.folder import LOG
from tezo.runs.step_log import LogContents, read_log
from tezo.system.errors import RequestError, TezoError
from tezo.system.files import own_object

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "benchmarks/study.sh"
RUN = ("line", "column", "lr", "seed", "chosen", "final_dev_loss", "best_dev_loss", "before", "after", "steps",
       "num_forward_passes", "basis_passes", "seconds_stepping", "seconds_on_basis", "exports", "hardware", "torch",
       )  # fmt: skip
CURVE = ("seed", "passes", "dev_loss", "dev_accuracy", "before", "after", "test_loss", "num_forward_passes",
         "basis_passes", "seconds_stepping", "seconds_on_basis", "exports")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads, computes, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--results", type=Path, help="default: benchmarks/results, the table's name")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs/figures")
    given = parser.parse_args(arguments)
    try:
        written = read_and_write(given.runs, given.results, given.figures)
    except TezoError as error:
        raise SystemExit(str(error)) from None
    for path in written:
        print(f"written: {path}")


def read_and_write(folder: Path, results: Path | None, figures: Path) -> list[Path]:
    """The whole reading of a folder of runs; the paths written."""
    grid = grid_of(folder)
    cells = whole_cells(grid, folder)
    runs = list(read_runs(grid, folder, cells))
    if not any(run["passes"] for run in runs):
        raise RequestError(f"{folder} has no line whose runs of a column are all over; go on with tezo reproduce.")
    results = results or ROOT / "benchmarks/results" / grid.table.name
    curves = joined_curves(results / "curves.json", curves_of(grid, runs, failures(folder, cells)), grid)
    rows = joined_runs(results / "runs.csv", runs, grid)
    results.mkdir(parents=True, exist_ok=True)
    curves["runs"] = len(rows)
    write_runs(results / "runs.csv", rows)
    write_curves(results / "curves.json", curves)
    write_text(results / "numbers.json", json.dumps(numbers_of(curves), indent=1, allow_nan=False) + "\n")
    return [*sorted(results.iterdir()), *save_chart(curves, figures)]


def grid_of(folder: Path) -> Grid:
    """The grid whose runs lie there, with all its lines and columns."""
    if not (folder / "grid.json").is_file():
        raise RequestError(f"{folder} has no runs of a table; give the --output of tezo reproduce study.")
    note = own_object(folder / "grid.json", "give the --output of tezo reproduce study")
    # results do not depend on where model and rows lay
    return make_grid(find_table(note["table"]), model=name_of_model(note["model"]), small=note["small"], data_dir=".")


def whole_cells(grid: Grid, folder: Path) -> list[Cell]:
    """The cells of those lines' columns whose runs are all over, well or not."""
    cells = list(all_cells(grid, folder))
    open_ones = {(cell.line.key, cell.column.key) for cell in cells if not is_finished(folder / cell.folder)}
    return [cell for cell in cells if (cell.line.key, cell.column.key) not in open_ones]


def read_runs(grid: Grid, folder: Path, cells: Iterable[Cell]) -> Iterable[dict[str, Any]]:
    """Every run that ended well."""
    chosen = chooser(grid, folder)
    for cell in cells:
        summary = summary_of(folder / cell.folder)
        if summary is not None:
            own = {"line": cell.line.key, "column": cell.column.key, "lr": cell.rate, "seed": cell.seed}
            is_chosen = cell.line.how != "train" or cell.rate == chosen(cell.line, cell.column)
            yield own | {"chosen": is_chosen} | read_run(cell, folder / cell.folder, summary)


def read_run(cell: Cell, folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """A run's curve and figures."""
    metric = cell.column.metric
    log = read_log(folder / LOG) if (folder / LOG).is_file() else LogContents()  # zero-shot takes no steps
    dev = {step: metrics for (split, step), metrics in sorted(log.evaluations.items()) if split == "dev"}
    losses = [metrics["loss"] for metrics in dev.values()]
    taken = [0, *accumulate(record.forward_passes for record in log.steps)]
    return {
        "passes": [passes_at(step, cell, taken, int(summary.get("basis_passes") or 0)) for step in dev],
        "dev_loss": [rounded(loss) for loss in losses],
        "dev_accuracy": [rounded(metrics.get(metric, math.nan)) for metrics in dev.values()],
        "final_dev_loss": rounded(losses[-1]) if losses else None,
        "best_dev_loss": rounded(min(losses)) if losses else None,
        "before": rounded(summary.get("before", {}).get(metric, math.nan)),
        "after": rounded(summary["after"][metric]),
        "test_loss": rounded(summary["after"].get("loss", math.nan)),
        "basis_passes": int(summary.get("basis_passes") or 0),
        "seconds_on_basis": summary.get("seconds_on_basis") or 0.0,
        **{key: summary.get(key) for key in ("steps", "num_forward_passes", "seconds_stepping", "hardware")},
        "exports": (summary.get("result") or {}).get("kind") == "adapter",
        "versions": summary.get("versions", {}),
        "torch": summary.get("versions", {}).get("torch"),
    }


def passes_at(step: int, cell: Cell, taken: Sequence[int], basis_passes: int) -> float:
    """Forward passes before the evaluation after `step` steps: those taken, and those that collect the basis.

    A basis that is refreshed is paid for interval by interval, at the first step of each.
    """
    interval = cell.tree["method"].get("lazy_update_interval") or cell.steps
    return taken[step] + basis_passes * math.ceil(step / interval) / math.ceil(cell.steps / interval)


def curves_of(grid: Grid, runs: Sequence[dict[str, Any]], failed: Sequence[Path]) -> dict[str, Any]:
    """The runs at the chosen rates, line by line and column by column, with what the search saw."""
    trained = [run for run in runs if run["passes"]]
    columns = [column.key for column in grid.table.columns if any(run["column"] == column.key for run in trained)]
    lines = []
    for line in grid.table.lines:
        own = [run for run in runs if run["line"] == line.key]
        found = {key: column_of(key, own, line.rates) for key in columns}
        for key, column in found.items():
            column["failed"] = ["/".join(path.parts[2:]) for path in failed if path.parts[:2] == (line.key, key)]
        lines.append({
            "label": line.label, "key": line.key, "method": line.method, "options": dict(line.options),
            "settings": dict(line.settings), "rates": list(line.rates),
            "columns": {key: column for key, column in found.items() if column["runs"]},
        })  # fmt: skip
    return {
        "table": grid.table.name, "title": grid.title, "model": grid.model, "small": grid.small,
        "seeds": list(grid.table.seeds), "columns": columns,
        "command": COMMAND if grid.table.name == "study" else f"STUDY={grid.table.name} {COMMAND}",
        "commit": commit(), "hardware": all_of(run["hardware"] for run in trained),
        "versions": {name: all_of(run["versions"].get(name) for run in trained) for name in trained[0]["versions"]},
        "runs": len(runs), "lines": [line for line in lines if line["columns"]],
    }  # fmt: skip


def name_of_model(model: str) -> str:
    """The name of a model on the hub or embedded; of a folder its last part."""
    return Path(model).name if Path(model).is_absolute() else model


def column_of(key: str, runs: Sequence[dict[str, Any]], rates: Sequence[float]) -> dict[str, Any]:
    """A line's runs of a column at the chosen rate, and the mean final dev loss at each rate of the search."""
    own = [run for run in runs if run["column"] == key]
    kept = [run for run in own if run["chosen"]]
    rate = kept[0]["lr"] if kept else None
    searched = {run["lr"]: [r["final_dev_loss"] for r in own if r["lr"] == run["lr"]] for run in own if run["lr"]}
    return {
        "rate": rate,
        "at_an_end": len(rates) > 2 and rate in (min(rates), max(rates)),
        "search": {f"{lr:g}": rounded(statistics.mean(losses)) for lr, losses in searched.items()},
        "runs": [{name: run[name] for name in CURVE} for run in kept],
    }


def failures(folder: Path, cells: Iterable[Cell]) -> list[Path]:
    """The folders of the runs that were tried and did not end well."""
    over = (cell.folder for cell in cells if is_finished(folder / cell.folder))
    return [path for path in over if summary_of(folder / path) is None]


def rounded(value: float) -> float | None:
    """Six digits; None: it could not be measured."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_runs(path: Path, runs: Iterable[dict[str, Any]]) -> None:
    """A line for each run, without its curve."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, RUN, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(runs)


def write_curves(path: Path, curves: dict[str, Any]) -> None:
    """JSON, a line of the table on a line of the file."""
    head = json.dumps({key: value for key, value in curves.items() if key != "lines"}, indent=1, allow_nan=False)
    lines = ",\n".join(f"  {json.dumps(line, allow_nan=False)}" for line in curves["lines"])
    write_text(path, f'{head[:-2]},\n "lines": [\n{lines}\n ]\n}}\n')


def write_text(path: Path, text: str) -> None:
    """A text file."""
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
