"""Forecast of the trained numbers and the additional memory of each method on a model; nothing is trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tezo.directions.perturbations import DrawKey
from tezo.directions.spaces import FixedFactors
from tezo.errors import RequestError
from tezo.estimators.estimate import ParameterEstimate
from tezo.optim.methods import METHODS, Method
from tezo.optim.optimizer import ZerothOrderOptimizer


@dataclass(frozen=True)
class Forecast:
    """The forecast for one method on one model.

    Attributes:
        method: name of the method.
        trained: number of values in the tuned parameters.
        kept: bytes in addition to the model: factors, coefficients and moments, without the activations of a pass.
        rank: largest rank of the directions; None if they are dense.
        adapter: whether the result is an exact LoRA adapter.
        refusal: the reason why the method cannot tune this model; None if it can.
    """

    method: str
    trained: int = 0
    kept: int = 0
    rank: int | None = None
    adapter: bool = False
    refusal: str | None = None


def forecasts(model: nn.Module) -> list[Forecast]:
    """The forecast of every method on the linear layers; `max_rank` is assumed where ranks depend on the weights."""
    return [_forecast(model, method) for method in METHODS.values()]


def _forecast(model: nn.Module, method: Method[ZerothOrderOptimizer]) -> Forecast:
    defaults, options = method.defaults(), dict[str, Any]()
    if "rank" in defaults:
        options["rank"] = defaults["rank"] or defaults["max_rank"]
    if "basis" in defaults:
        options["basis"] = "gaussian"  # a data-dependent basis needs as much memory, but there is no data here
    try:
        optimizer = method.build(model, seed=0, **options)
    except RequestError as error:
        return Forecast(method.name, refusal=str(error))
    try:
        return Forecast(
            method.name,
            trained=sum(target.shape.numel() for target in optimizer.targets),
            kept=optimizer.factor_bytes + sum(_kept(optimizer, name) for name in optimizer.moving),
            rank=max([rank for name in optimizer.moving if (rank := optimizer.application(name)[0])], default=None),
            adapter=optimizer.why_no_adapter() is None,
        )
    finally:
        optimizer.close()


@torch.no_grad()
def _kept(optimizer: ZerothOrderOptimizer, name: str) -> int:
    """Bytes of a parameter's coefficient and moments, which are created to be measured."""
    moving = optimizer.moving[name]
    direction: Any = optimizer.perturbation.direction(moving.target, DrawKey(optimizer.seed, 0), {})
    state = optimizer.update.init(ParameterEstimate([direction], [0.0], 0), moving)
    own = not moving.writes_weight and isinstance(direction, FixedFactors)
    return sum(value.nbytes for value in state.values()) + (direction.coefficient.nbytes if own else 0)
