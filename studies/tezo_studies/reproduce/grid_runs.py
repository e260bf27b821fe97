"""Runs the unfinished cells of a grid, one at a time on each device."""

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tezo.runs.folder import LOG
from tezo.system.errors import NonFiniteLossError, NonFiniteResultError, RequestError, RunError, TezoError
from tezo.system.files import check_free, own_object, write_file
from tezo.system.progress import quiet_libraries
from tezo.tasks.evaluation import Metrics, measure
from tezo.tasks.splits import evaluation_rows
from tezo.tasks.untuned import PROBE, measure_untuned
from tezo.training.job import load
from tezo.training.loop import train
from tezo.training.settings import Config, overlay, parse_config
from tezo_studies.reproduce.grid import Cell, Grid
from tezo_studies.reproduce.results import FAILED, SUMMARY, chooser, is_finished


def run_grid(grid: Grid, output: Path, devices: Sequence[str], tell: Callable[[str], None]) -> int:
    """Runs the missing cells: first the search, then the other seeds. Unfinished runs are resumed.

    Returns the number of runs that could not be run for outside reasons, such as rows or a model that cannot be read;
    they stay missing. If there are any in the search, the other seeds are not run, because the rate is not chosen yet.

    Args:
        grid: the runs.
        output: folder of all runs, see `prepare_output`.
        devices: devices; each takes one run at a time in its own process, and those on the CPU share its cores.
        tell: called with a message for every run that ends.

    Raises:
        RunError: a process died; run the command again.
    """
    stopped = _run(grid.search(), output, devices, tell)
    return stopped or _run(grid.rest(chooser(grid, output)), output, devices, tell)


def _run(cells: Iterable[Cell], output: Path, devices: Sequence[str], tell: Callable[[str], None]) -> int:
    planned = list(cells)
    missing = [cell for cell in planned if not is_finished(output / cell.folder)]
    if planned:
        tell(f"{len(planned)} runs, {len(planned) - len(missing)} of them finished")
    if not missing:
        return 0
    context, cpus = multiprocessing.get_context("spawn"), sum(not device.startswith("cuda") for device in devices)
    pools = [
        ProcessPoolExecutor(1, mp_context=context, initializer=_begin_process, initargs=(cpus,)) for _ in devices
    ]  # fmt: skip
    try:
        jobs = {
            pools[i % len(pools)].submit(run_cell, cell, str(output / cell.folder), devices[i % len(pools)]): cell
            for i, cell in enumerate(missing)
        }
        for number, job in enumerate(as_completed(jobs), start=1):
            reason = job.result()
            tell(f"{number}/{len(missing)} {jobs[job].folder}" + (f": failed: {reason}" if reason else ""))
        return sum(not is_finished(output / cell.folder) for cell in missing)
    except BrokenExecutor as error:
        raise RunError(f"the process of a run died ({error}); run the same command again to go on.") from None
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_process(processes: int) -> None:
    """Sets up a worker process: no progress bars, its share of the cores, and an exit when the parent has ended."""
    quiet_libraries()
    if processes > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def prepare_output(grid: Grid, output: Path) -> None:
    """Creates the folder, and writes grid.json with the table, model, scales and settings of its runs.

    Raises:
        RequestError: the folder has the runs of another grid, or other files.
    """
    note = output / "grid.json"
    own: dict[str, Any] = {"table": grid.table.name, "model": grid.model, "small": grid.small}
    if grid.table.directions != "unit":
        own["directions"] = grid.table.directions
    if grid.settings:
        own["settings"] = {key: str(value) for key, value in grid.settings}
    if note.is_file():
        existing = own_object(note, "give another --output")
        if existing != own:
            raise RequestError(f"output: {output} has runs of {existing}, not of {own}; give another --output.")
        return
    check_free(output)
    output.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")


def run_cell(cell: Cell, folder: str, device: str) -> str | None:
    """Runs one cell in this process; returns None or the reason of the failure.

    A NaN or infinite loss, which would occur again, is written to a file in the folder, so the cell counts as finished.

    Args:
        cell: the run.
        folder: folder of the run.
        device: name of a torch device.
    """
    path = Path(folder)
    if not (path / LOG).is_file():
        shutil.rmtree(path, ignore_errors=True)  # started, but no step was finished
    try:
        config = parse_config(overlay(cell.tree, [("model.device", device)]))
        if cell.line.how == "train":
            train(config, path, resume=True)
        else:
            _write_summary(path, *(_probe(config) if cell.line.how == "probe" else _zero_shot(config)))
    except (NonFiniteLossError, NonFiniteResultError) as error:
        path.mkdir(parents=True, exist_ok=True)
        (path / FAILED).write_text(f"{error}\n", encoding="utf-8")
        return str(error)
    except TezoError as error:
        return str(error)
    return None


def _zero_shot(config: Config) -> tuple[Metrics, dict[str, int]]:
    """(metrics of the untrained model on the test rows, number of rows)."""
    rows = evaluation_rows(config.data)
    metrics, _ = measure(config.data, load(config), rows, batch_size=config.train.eval_batch_size)
    return metrics, {"test": len(rows)}


def _probe(config: Config) -> tuple[Metrics, dict[str, int]]:
    """(metrics of a linear probe on the test rows, numbers of rows)."""
    found, rows = measure_untuned(
        config.data, load(config), batch_size=config.train.eval_batch_size, seed=config.train.seed
    )
    return found[PROBE], rows


def _write_summary(folder: Path, metrics: Metrics, rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    summary = {"after": metrics, "dev_loss": None, "rows": rows}
    write_file(folder / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
