"""The cells of `when.py`: each is measured in a process of its own, which prints JSON.

python benchmarks/when_cells.py '{"part": "costs", "shape": "opt-125m", ...}'
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.packed_model import packed
from tezo_studies.bench.peak_memory import forget_peak, peak_now
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.trainable_model import trainable
from tezo_studies.bench.workload import Work
from tezo_studies.cost_tables.meta_models import meta_model

from tezo.directions.targets import select_targets
from tezo.forecast.memory import memory_of_ways
from tezo.methods import method
from tezo.system.progress import quiet_libraries
from tezo.tasks.evaluation import Metrics
from tezo.training.job import Job
from tezo.training.listeners import Listener, Progress

NF4_BYTES = 0.5 + 4 / 64
"""Bytes of a weight in nf4: four bits, and a float32 scale for 64 weights."""
MOST_STEPS = 5
"""Steps that are timed, if the time of the cell allows so many."""

CPU = torch.device("cpu")


def costs(cell: dict[str, Any]) -> dict[str, Any]:
    """Peak memory in bytes of two steps, or seconds of up to `MOST_STEPS` after a first one.

    Memory is that of the process without what it had before the model was built. Libraries are not counted: a step of
    a tiny model loads them first.
    """
    if cell["quantization"] == "nf4":
        import_module("bitsandbytes")
    step_of(cell, Work(Settings(model="tiny", dtype=cell["dtype"], batch=2, length="8")))()
    gc.collect()
    forget_peak(CPU)
    before = peak_now(CPU)
    work = Work(settings_of(cell))
    if cell["quantization"] == "nf4":
        work.model = packed(work.model)
    step = step_of(cell, work)
    gc.collect()
    forget_peak(CPU)
    step()
    if cell["measure"] == "memory":
        step()
        return {"bytes": peak_now(CPU) - before}
    seconds: list[float] = []
    while not seconds or (sum(seconds) < cell["seconds"] and len(seconds) < MOST_STEPS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


def settings_of(cell: dict[str, Any]) -> Settings:
    """The benchmark's settings of a cell."""
    return Settings(model=cell["shape"], dtype=cell["dtype"], batch=cell["rows"], length=str(cell["length"]))


def step_of(cell: dict[str, Any], work: Work) -> Callable[[], object]:
    """What is measured: a forward pass without a gradient, or a step."""
    if cell["method"] is None:
        return torch.no_grad()(work.needed_loss(work.model))
    model = trainable(work.model, cell["peft"], checkpointed=cell["checkpointed"])
    optimizer, closure = method(cell["method"]).build(model), work.closure(model)
    return lambda: optimizer.step(closure)


class Curve(Listener):
    """Dev losses against the seconds that were spent on steps, and the seconds before the first of them."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.preparing = self.seconds = 0.0
        self.points: list[tuple[float, float]] = []

    def started(self, job: Job) -> None:
        del job
        self.preparing = time.perf_counter() - self.began

    def stepped(self, progress: Progress) -> None:
        self.seconds = progress.seconds

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        del step
        if split == "dev":
            self.points.append((round(self.seconds, 3), metrics["loss"]))


def curves(cell: dict[str, Any]) -> dict[str, Any]:
    """A run: its curve, and what it came to."""
    from tezo.training.loop import train
    from tezo.training.settings import read_config

    curve = Curve()
    with tempfile.TemporaryDirectory() as folder:
        summary = train(read_config(None, list(cell["settings"].items())), Path(folder) / "run", [curve])
        lr = read_config(Path(folder) / "run/config.yaml", []).method.options["lr"]
    keys = ("dev_loss_before", "dev_loss", "before", "after", "steps", "kept_step", "seconds_stepping", "rows")
    return {"lr": lr, "preparing": curve.preparing, "curve": curve.points} | {key: summary[key] for key in keys}


def probe(cell: dict[str, Any]) -> dict[str, Any]:
    """Logistic regression on the frozen model: its metrics on the test rows, and seconds with the model in memory."""
    from tezo.tasks.untuned import PROBE, measure_untuned
    from tezo.training.job import load
    from tezo.training.settings import read_config

    config = read_config(None, list(cell["settings"].items()))
    loaded, started = load(config), time.perf_counter()
    sizes = {"batch_size": config.train.eval_batch_size, "seed": config.train.seed}
    metrics, rows = measure_untuned(config.data, loaded, **sizes)
    return {"seconds": time.perf_counter() - started, "after": metrics[PROBE], "rows": rows}


def forecast(cell: dict[str, Any]) -> dict[str, Any]:
    """The forecast of `tezo doctor` for a shape, from shapes alone: way -> bytes."""
    meta = meta_model(settings_of(cell))
    whole = sum(parameter.nbytes for parameter in meta.parameters())
    is_packed = cell["quantization"] == "nf4"
    linear = [target.parameter for target in select_targets(meta)] if is_packed else []
    weights = whole - sum(weight.nbytes for weight in linear) + int(NF4_BYTES * sum(map(torch.numel, linear)))
    ways = memory_of_ways(
        lambda: meta_model(settings_of(cell)), "causal", cell["rows"], cell["length"], weights, packed=is_packed
    )
    return {"weights": weights, "ways": {way.way: way.total for way in ways}}


PARTS = {"costs": costs, "curves": curves, "probe": probe, "forecast": forecast}

if __name__ == "__main__":
    quiet_libraries()
    asked = json.loads(sys.argv[1])
    print(json.dumps(PARTS[asked["part"]](asked)))
