"""Runs the cells of a grid, those that are not finished, one after another on each device."""

import json
import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from transformers.utils import logging

from tezo.config import Config, overlay, parse_config
from tezo.errors import RequestError, RunError, TezoError
from tezo.evaluate import measure
from tezo.job import load
from tezo.reproduce.cells import Grid
from tezo.splits import evaluation_rows
from tezo.train import train

FAILED = "failed.txt"
"""In the folder of a run that could not be finished: why. Delete it to try again."""


def is_finished(folder: Path) -> bool:
    """Whether a run is over, well or not."""
    return (folder / "summary.json").is_file() or (folder / FAILED).is_file()


def run_grid(grid: Grid, output: Path, devices: Sequence[str], tell: Callable[[str], None]) -> None:
    """Runs what is missing; what was begun and not finished starts again.

    Args:
        grid: what to run.
        output: of all runs, see `prepare_output`.
        devices: one run at a time on each, in a process of its own.
        tell: is told of every run that ends.

    Raises:
        RunError: a process died; run the command again.
    """
    cells = list(grid.cells())
    missing = [cell for cell in cells if not is_finished(output / cell.folder)]
    tell(f"{len(cells)} runs, {len(cells) - len(missing)} of them finished")
    context = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, mp_context=context) for _ in devices]
    try:
        jobs = {
            pools[i % len(pools)].submit(run_cell, cell.tree, str(output / cell.folder), devices[i % len(pools)]): cell
            for i, cell in enumerate(missing)
        }
        for number, job in enumerate(as_completed(jobs), start=1):
            fault = job.result()
            tell(f"{number}/{len(missing)} {jobs[job].folder}" + (f": failed: {fault}" if fault else ""))
    except BrokenExecutor as error:
        raise RunError(f"a run's process died ({error}); the same command goes on from here.") from None
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def prepare_output(grid: Grid, output: Path) -> None:
    """Makes the folder, and notes what its runs are of.

    Raises:
        RequestError: it has the runs of another grid, or something else.
    """
    note = output / "grid.json"
    own = {"table": grid.table.name, "model": grid.model, "small": grid.small}
    if note.is_file():
        found = json.loads(note.read_text(encoding="utf-8"))
        if found != own:
            raise RequestError(f"output: {output} has runs of {found}, not of {own}; give another --output.")
        return
    if output.exists() and any(output.iterdir()):
        raise RequestError(f"output: {output} is in use; give another --output, or delete it first.")
    output.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")


def run_cell(tree: dict[str, Any], folder: str, device: str) -> str | None:
    """One run, in this process; None, or why it failed, which is also written into its folder."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = Path(folder)
    shutil.rmtree(path, ignore_errors=True)  # begun and not finished
    try:
        config = parse_config(overlay(tree, [("model.device", device)]))
        if "method" in tree:
            train(config, path)
        else:
            _measure(config, path)
    except TezoError as error:
        path.mkdir(parents=True, exist_ok=True)
        (path / FAILED).write_text(f"{error}\n", encoding="utf-8")
        return str(error)
    return None


def _measure(config: Config, folder: Path) -> None:
    """The model as it is, on the rows that runs are reported on."""
    rows = evaluation_rows(config.data)
    metrics, _ = measure(config, load(config), rows)
    folder.mkdir(parents=True)
    summary = {"after": metrics, "dev_loss": None, "rows": {"test": len(rows)}}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
