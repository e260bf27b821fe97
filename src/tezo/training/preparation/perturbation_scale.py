"""The perturbation scale rho of a run, where the settings leave it open."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import is_packed
from tezo.errors import RequestError
from tezo.optim.measured_scale import MeasuredScale, in_words, measure_scale
from tezo.optim.methods import AUTO, Tuner, method
from tezo.progress.meter import RHO, current
from tezo.tasks.objectives import BatchClosure
from tezo.training.configuration.recipe import REWARD, Config

DEFAULT_RHO = 1e-3
"""The paper's: the first scale that is tried where the model computes in float32."""
ROUNDED_RHO = 3e-3
"""The first where it rounds its losses: packed, or in half precision."""
ROUNDED_BITS = 64
"""Bound of the rounding error of a loss on a CPU, in units of the last place of its dtype."""
REWARD_RHO = 1e-2
"""For a reward: completions do not change at all within a shorter distance of the parameters."""


def is_rho_open(config: Config) -> bool:
    """Whether the settings leave rho open, and the method has one.

    Raises:
        RequestError: rho is auto by request, and the objective is a metric.
    """
    wanted = config.method.options.get("rho")
    if method(config.method.name).defaults().get("rho") is None or wanted not in (None, AUTO):
        return False
    if wanted == AUTO and not config.train.minimises_loss:
        raise RequestError(
            f"method.rho is auto, which needs train.objective loss, not {config.train.objective}; set a number."
        )
    return True


def first_scale(model: Any) -> float:
    """The scale that is tried first on a model."""
    rounds = any(is_packed(p) or p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return ROUNDED_RHO if rounds else DEFAULT_RHO


def known_rounding(model: Any) -> float | None:
    """Bound of the rounding error of a loss, as a part of it; None where it has to be measured."""
    kinds = {p.dtype for p in model.parameters()}
    exact = {torch.float32, torch.float64}
    if not kinds <= exact or any(is_packed(p) or p.device.type != "cpu" for p in model.parameters()):
        return None
    return ROUNDED_BITS * max(torch.finfo(kind).eps for kind in kinds)


def losses_of(batch: BatchClosure, optimizer: Tuner) -> Callable[[], Tensor]:
    """What `measure_scale` takes of the rows of a step."""
    return batch if optimizer.per_example else batch.row_losses


def resolve_rho(
    config: Config, optimizer: Tuner, losses: Callable[[], Tensor] | None
) -> tuple[Config, list[str], MeasuredScale | None]:
    """Replaces "auto" in method.rho; returns (configuration, notices for the user, what was measured).

    It is measured along the directions that the run draws; see `tezo.optim.measured_scale`. For a reward or a
    metric, and where there are no rows to measure on, it is a number. The optimizer has the rho of the result.

    Args:
        config: with method.rho, or without it where it is at its default.
        optimizer: of the run, with its directions and its basis.
        losses: of the rows of a step, as `measure_scale` takes them; None: nothing may be measured.

    Raises:
        RequestError: rho is auto by request, and the objective is a metric.
    """
    if not is_rho_open(config):
        return config, [], None
    if not config.train.minimises_loss or losses is None:
        rho = REWARD_RHO if config.train.objective == REWARD else first_scale(optimizer.model)
        optimizer.set_rho(rho)
        return config.with_options(rho=rho), [], None
    with current().phase(RHO):
        found = measure_scale(
            optimizer, losses, first_scale(optimizer.model), current().report, rounding=known_rounding(optimizer.model)
        )
    optimizer.set_rho(found.chosen.rho)
    dtype = next(p.dtype for p in optimizer.model.parameters() if p.is_floating_point())
    notice = in_words(found, str(dtype).removeprefix("torch."))
    return config.with_options(rho=found.chosen.rho), [notice], found
