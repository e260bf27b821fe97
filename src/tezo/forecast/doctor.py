"""The hardware and packages here, the methods for a model, and the scale at which its losses can be measured."""

import os
from dataclasses import asdict, replace
from typing import Any

import torch

from tezo.directions.targets import find_targets, select_targets
from tezo.forecast.memory import advice, forecasts, memory_of_model
from tezo.methods import AUTO, HEAD_FEEDBACK, method
from tezo.models.loading import EMBEDDED, LoadedModel, embedded_source
from tezo.models.quantization import bytes_of, stored_bytes
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.measured_scale import MeasuredScale
from tezo.runs.environment import hardware, usable_memory, versions
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.system.progress import FORECAST, KEPT, RHO, current
from tezo.tasks.catalogue import task
from tezo.tasks.examples import Row
from tezo.tasks.setup import make_objective
from tezo.training.choices import Choices, check_options, choose_directions, choose_rho
from tezo.training.job import load, make_optimizer
from tezo.training.opening import run_config
from tezo.training.rows_of_steps import RunRows, basis_passes
from tezo.training.settings import LOSS, Config

PACKAGES = ("tezo", "torch", "transformers", "safetensors", "datasets", "peft", "numpy", "bitsandbytes", "torchao")
"""Packages whose versions are reported."""
LENGTH = 128
"""Tokens of a row for which memory is forecast, where no maximum length is set."""
REVIEWS = {
    "a quiet film that stays with you": 1,
    "the plot falls apart in the second half": 0,
    "sharp, funny and over too soon": 1,
    "two hours that feel like four": 0,
    "the cast is a delight from start to finish": 1,
    "every joke arrives late and limps away": 0,
    "a small story told with great care": 1,
    "loud, hollow and badly cut": 0,
}
"""Rows of the task sst2, for models that are looked at without any."""


def machine_report() -> dict[str, Any]:
    """Returns JSON: versions, processor or GPU, cores, memory in bytes, and the state of the embedded models."""
    embedded = {}
    for name in EMBEDDED:
        try:
            embedded_source(name)
            embedded[name] = "installed, weights verified"
        except RequestError as error:
            embedded[name] = str(error)
    return {
        "versions": versions(PACKAGES),
        "hardware": hardware(),
        "cores": os.cpu_count(),
        "memory": usable_memory(),
        "gpu_memory": torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None,
        "embedded": embedded,
    }


def model_report(name: str, settings: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns JSON: a model's sizes, the parameters and state of each method, the memory of training, and rho.

    Memory is compared with training by gradients; the scale is measured as in a run. Where one of the two cannot be
    had, the reason stands in its place.

    Args:
        name: a folder, a hub name or a run folder.
        settings: (dotted key, value) pairs laid over its configuration.

    Raises:
        RequestError: the model cannot be loaded so.
    """
    config = run_config(name, settings)
    if config.method.name == AUTO:  # the default depends on rows; head-feedback takes all kinds
        check_options(config, HEAD_FEEDBACK)
        config = config.with_setting("method.name", HEAD_FEEDBACK)
    loaded = load(config)
    linear = select_targets(loaded.model)
    with current().phase(KEPT):
        methods = [asdict(forecast) for forecast in forecasts(loaded.model)]
    with current().phase(FORECAST):
        memory = _memory_report(config, loaded)
    report: dict[str, Any] = {
        "name": name,
        "kind": loaded.kind,
        "dtype": str(loaded.model.dtype),
        "quantization": config.model.quantization,
        "bytes": stored_bytes(loaded.model),
        "parameters": sum(target.shape.numel() for target in find_targets(loaded.model)),
        "linear_parameters": sum(target.shape.numel() for target in linear),
        "linear_bytes": sum(bytes_of(target.parameter) for target in linear),
        "methods": methods,
        "memory": memory,
    }
    try:
        with current().phase(RHO):
            found = model_scale(config, loaded)
    except (RequestError, NonFiniteLossError) as error:
        return report | {"scales": str(error), "recommended_rho": None}
    return report | {"scales": [asdict(at) for at in found.tried], "recommended_rho": found.chosen.rho}


def _memory_report(config: Config, loaded: LoadedModel) -> dict[str, Any] | str:
    """Returns JSON: the memory of each way to train with a batch of the run, and advice; or why there is none."""
    if config.model.placement != "device":
        return f"model.placement is {config.model.placement}, and the forecast is for a model on one device."
    rows, length = _rows_per_step(config), min(config.data.max_length or LENGTH, loaded.max_length)
    try:
        ways = memory_of_model(loaded, rows, length)
    except RequestError as error:
        return str(error)
    cuda = loaded.device.type == "cuda"
    memory = torch.cuda.get_device_properties(loaded.device).total_memory if cuda else usable_memory()
    listed = [asdict(way) | {"total": way.total} for way in ways]
    return {"rows": rows, "length": length, "available": memory, "ways": listed, "advice": advice(ways, memory)}


def _rows_per_step(config: Config) -> int:
    return config.train.batch_size or method(config.method.name).batch_size


def model_scale(config: Config, loaded: LoadedModel) -> MeasuredScale:
    """Returns the perturbation scale that a run of this configuration would measure, if its rows were `REVIEWS`."""
    config = replace(config, train=replace(config.train, objective=LOSS, reward=None))  # of these rows, not of a run's
    entry = task("sst2")
    form = entry.wording(loaded.kind)
    objective = make_objective(config.data, loaded, form)
    rows = [Row({"sentence": text, "label": label}, text) for text, label in REVIEWS.items()]
    encoded = [objective.encode(form.example(row)) for row in rows]
    seen = RunRows(replace(config.train, batch_size=_rows_per_step(config)), loaded.model, objective, encoded, ())

    def build(settings: Config) -> BaseOptimizer:
        optimizer = make_optimizer(settings, loaded, untrained=())
        optimizer.set_passes(basis_passes(loaded, objective, encoded, config.train.seed))
        return optimizer

    choices = Choices(config.with_options(rho=AUTO))
    choices.add(choose_directions(choices.config, seen, build, measuring=True))
    optimizer = build(choices.config)
    try:
        found = None if optimizer.by_gradients else choose_rho(choices.config, optimizer, seen)[1]
    finally:
        optimizer.close()
    if found is None:
        raise RequestError(f"method.name is {config.method.name}, which has no rho to measure.")
    return found
