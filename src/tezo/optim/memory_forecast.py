"""What each method would train on a model, and how much memory it would keep beside it; nothing is trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tezo.directions.perturbations import DrawKey
from tezo.directions.spaces import FixedFactors
from tezo.directions.targets import select_targets
from tezo.errors import RequestError
from tezo.estimators.estimate import ParameterEstimate
from tezo.optim.methods import METHODS, Method
from tezo.optim.optimizer import ZerothOrderOptimizer


@dataclass(frozen=True)
class Forecast:
    """Of one method on one model.

    Attributes:
        method: its name.
        trained: numbers that it would change.
        kept: bytes beside the model: factors, coefficients and moments. The activations of a forward pass come on top.
        rank: of its directions; None where they are dense.
        adapter: whether the result would be an exact LoRA adapter.
        refusal: why it cannot tune this model; None where it can.
    """

    method: str
    trained: int = 0
    kept: int = 0
    rank: int | None = None
    adapter: bool = False
    refusal: str | None = None


def forecasts(model: nn.Module) -> list[Forecast]:
    """Of every method, on the linear layers; ranks are the defaults, or their bound where they depend on weights."""
    side = min(min(target.matrix_shape) for target in select_targets(model))
    return [_forecast(model, method, side) for method in METHODS.values()]


def _forecast(model: nn.Module, method: Method[ZerothOrderOptimizer], side: int) -> Forecast:
    defaults, options = method.defaults(), dict[str, Any]()
    if "rank" in defaults:
        options["rank"] = min(side, defaults["rank"] or defaults["max_rank"])
    if "basis" in defaults:
        options["basis"] = "gaussian"  # of the same size as one that sees data, of which there is none
    try:
        optimizer = method.build(model, seed=0, **options)
    except RequestError as error:
        return Forecast(method.name, refusal=str(error))
    try:
        return Forecast(
            method.name,
            trained=sum(target.shape.numel() for target in optimizer.targets),
            kept=optimizer.factor_bytes + sum(_kept(optimizer, name) for name in optimizer.moving),
            rank=options.get("rank"),
            adapter=optimizer.why_no_adapter() is None,
        )
    finally:
        optimizer.close()


@torch.no_grad()
def _kept(optimizer: ZerothOrderOptimizer, name: str) -> int:
    """Bytes of a parameter's coefficient and moments, counted on real ones."""
    moving = optimizer.moving[name]
    direction: Any = optimizer.perturbation.direction(moving.target, DrawKey(optimizer.seed, 0), {})
    state = optimizer.update.init(ParameterEstimate([direction], [0.0], 0), moving)
    own = not moving.writes_weight and isinstance(direction, FixedFactors)
    return sum(value.nbytes for value in state.values()) + (direction.coefficient.nbytes if own else 0)
