"""The perturbation scale rho of a run, where the settings leave it open."""

from collections.abc import Callable
from typing import Any

import torch

from tezo.directions.targets import is_packed
from tezo.errors import RequestError
from tezo.estimators.estimate import Closure
from tezo.optim.estimate_error import AROUND, measure_estimate_error, recommended
from tezo.optim.methods import AUTO, Tuner, method
from tezo.progress.meter import RHO, current
from tezo.training.configuration.recipe import REWARD, Config

DEFAULT_RHO = 1e-3
"""The paper's, for models that compute in float32: rounding is then far below the noise of a batch."""
REWARD_RHO = 1e-2
"""For a reward: completions do not change at all within a shorter distance of the parameters."""
SCALES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
"""Scales that are measured otherwise."""


def is_rho_measured(config: Config, model: Any) -> bool:
    """Whether `resolve_rho` measures: rho is open, the objective is the loss, and the model rounds it."""
    is_open = config.method.options.get("rho") in (None, AUTO) and method(config.method.name).defaults().get("rho")
    rounds = any(is_packed(p) or p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return bool(is_open) and config.train.minimises_loss and rounds


def passes_for_rho(num_directions: int) -> int:
    """Forward passes of the measurement."""
    return 2 * num_directions * len(SCALES) * len(AROUND)


def resolve_rho(
    config: Config, build: Callable[[Config], Tuner], loss: Closure, model: Any
) -> tuple[Config, list[str]]:
    """Replaces "auto" in method.rho; returns (configuration, notices for the user).

    A model that is quantised, or computes in half precision, rounds its losses: rho is then the scale at which the
    error of the projected gradient, from rounding and from curvature, is acceptable; see `recommended`.

    Args:
        config: with method.rho, or without it where it is at its default.
        build: makes the optimizer of a configuration.
        loss: on the rows of a step.
        model: the model.

    Raises:
        RequestError: rho is auto by request, and the objective is a metric.
    """
    chosen = method(config.method.name)
    wanted = config.method.options.get("rho")
    if chosen.defaults().get("rho") is None or wanted not in (None, AUTO):
        return config, []
    if wanted == AUTO and not config.train.minimises_loss:
        raise RequestError(
            f"method.rho is auto, which needs train.objective loss, not {config.train.objective}; set a number."
        )
    if not is_rho_measured(config, model):
        return config.with_options(rho=REWARD_RHO if config.train.objective == REWARD else DEFAULT_RHO), []
    cheap = {"basis": "gaussian", "lr": 0.0}
    optimizer = build(config.with_options(**{key: value for key, value in cheap.items() if key in chosen.options()}))
    try:
        with current().phase(RHO, passes_for_rho(optimizer.num_directions)):
            errors = measure_estimate_error(optimizer, loss, SCALES)
    finally:
        optimizer.close()
    found = recommended(errors)
    passes = passes_for_rho(optimizer.num_directions)
    return config.with_options(rho=found.rho), [
        f"method.rho: {found.rho:g} was chosen by the error of the projected gradient in this precision, "
        f"{found.error:.1%} there and {errors[-1].error:.1%} at {errors[-1].rho:g} ({passes} forward passes)."
    ]
