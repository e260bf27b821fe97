"""The cells of the cost tables on a GPU, by the benchmark: the maximum that the allocator reserved, and seconds."""

import gc
from collections.abc import Callable

import torch

from tezo.methods import method
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.peft import add_adapter
from tezo.system.errors import RequestError
from tezo_studies.bench.peak_memory import STEPS, forget_peak, peak_now, peak_of
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.step_time import measure_step
from tezo_studies.bench.workload import Work
from tezo_studies.cost_tables.cost_line import CostLine, settings_of


def measured_bytes(line: CostLine, model: str, device: str) -> float | None:
    """Peak memory of some steps, or of one forward pass; None: the device has too little."""
    settings = settings_of(line, model, device)
    if line.method is None:
        return _fitting(lambda: float(peak_of("N", settings)["peak"]))
    if line.by_gradient or line.peft != "none":
        return _fitting(lambda: float(peak_of_tuning(line, settings)))
    label = line.method
    return _fitting(lambda: float(peak_of(label, settings)["peak"]))


def measured_seconds(line: CostLine, model: str, device: str) -> float | None:
    """Median seconds of a step; None: the device has too little memory."""
    assert line.method is not None
    label = line.method

    def measure() -> float:
        result = measure_step(settings_of(line, model, device), [label])
        return next(float(row["seconds"]["median"]) for row in result["rows"] if row["label"] == label)

    return _fitting(measure)


def _fitting(measure: Callable[[], float]) -> float | None:
    gc.collect()
    try:
        return measure()
    except torch.OutOfMemoryError:
        return None
    except RequestError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            return None
        raise


def peak_of_tuning(line: CostLine, settings: Settings) -> int:
    """Peak memory in bytes of some steps of any method, over an adapter or over the model; as `bench.peak_of`."""
    assert line.method is not None
    gc.collect()
    work = Work(settings)
    config = ModelConfig(name=settings.model, peft=line.peft)
    model = add_adapter(LoadedModel(work.model, None, "causal"), config, seed=0).model
    forget_peak(work.device)
    optimizer = method(line.method).build(model, **line.options)
    closure = work.closure(model)
    for _ in range(STEPS):
        optimizer.step(closure)
    work.synchronize()
    optimizer.close()
    return peak_now(work.device)
