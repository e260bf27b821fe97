"""Forecast of the trained numbers and the additional memory of each method on a model; nothing is trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tezo.directions.bases.activation import collecting_bytes
from tezo.directions.perturbation import DrawKey
from tezo.directions.spaces import FixedFactors
from tezo.directions.targets import ALL, select_targets
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.estimators.estimate import ParameterEstimate
from tezo.optim.estimators.two_point import fitting_copies
from tezo.optim.first_order import stepped_weight
from tezo.optim.methods import METHODS, Method
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError


@dataclass(frozen=True)
class Forecast:
    """The forecast for one method on one model.

    Attributes:
        method: name of the method.
        trained: number of values in the tuned parameters.
        kept: bytes in addition to the model: factors, coefficients and moments, without the activations of a pass.
        collecting: bytes of range finders at a time in the passes that show a data-dependent basis the inputs, before
            the first step.
        written: bytes of the stored weights that every step writes.
        rank: largest rank of the directions; None if they are dense.
        adapter: whether the result is an exact LoRA adapter.
        refusal: the reason why the method cannot tune this model; None if it can.
    """

    method: str
    trained: int = 0
    kept: int = 0
    collecting: int = 0
    written: int = 0
    rank: int | None = None
    adapter: bool = False
    refusal: str | None = None


def forecasts(model: nn.Module) -> list[Forecast]:
    """The forecast of every method on the linear layers; `max_rank` is assumed where ranks depend on the weights."""
    return [forecast(model, method) for method in METHODS.values()]


def forecast(model: nn.Module, method: Method[ZerothOrderOptimizer], **options: Any) -> Forecast:
    """The forecast of one method with these options, and its defaults for all others.

    It depends on the shapes and dtypes of the parameters alone, not on their values, if the ranks do not.
    """
    defaults = method.defaults()
    if "rank" in defaults:
        options.setdefault("rank", defaults["rank"] or defaults["max_rank"])
    sees_data = options.get("basis", defaults.get("basis")) == "activation"
    if "basis" in defaults:
        options["basis"] = "gaussian"  # a data-dependent basis keeps as much memory, but there is no data here
    try:
        optimizer = method.build(model, seed=0, **options)
    except RequestError as error:
        return Forecast(method.name, refusal=str(error))
    try:
        return Forecast(
            method.name,
            trained=sum(target.shape.numel() for target in optimizer.targets),
            kept=optimizer.factor_bytes + _kept(optimizer),
            collecting=_collecting(optimizer) if sees_data else 0,
            written=sum(
                moving.target.parameter.nbytes
                for moving in optimizer.moving.values()
                if moving.writes_weight or optimizer.update.writes_weight
            ),
            rank=max([rank for name in optimizer.moving if (rank := optimizer.rank_and_way(name)[0])], default=None),
            adapter=optimizer.why_no_adapter() is None,
        )
    finally:
        optimizer.close()


def copies_of(said: Forecast, tokens: int) -> int:
    """Number of perturbed models that share a pass, see `tezo.optim.estimators.two_point`."""
    return min(2, max(1, fitting_copies(tokens, dense=said.rank is None)))


def first_order_kept(model: nn.Module) -> tuple[int, int]:
    """(bytes that `FirstOrderOptimizer` keeps between steps, bytes of the gradients in its update).

    It keeps two moments of each tensor that it steps, and that tensor where it is a float32 copy of a weight in half
    precision. In the update, the copy's own gradient is beside the weight's.
    """
    kept = gradients = 0
    for target in select_targets(model, (ALL,)):
        stepped = stepped_weight(target, master=True).stepped
        copy = 0 if stepped is target.parameter else stepped.nbytes
        kept += copy + 2 * stepped.nbytes
        gradients += target.parameter.nbytes + copy
    return kept, gradients


def _collecting(optimizer: ZerothOrderOptimizer) -> int:
    matrices = {name: rank for name in optimizer.moving if (rank := optimizer.rank_and_way(name)[0]) is not None}
    return collecting_bytes([target for target in optimizer.targets if target.name in matrices], matrices)


def _kept(optimizer: ZerothOrderOptimizer) -> int:
    """Bytes of the coefficients and moments of all parameters; those of one shape and kind are measured once."""
    known: dict[Any, int] = {}
    total = 0
    for moving in optimizer.moving.values():
        target = moving.target
        alike = (target.shape, target.parameter.dtype, target.kind, type(moving))
        if alike not in known:
            known[alike] = _kept_for(optimizer, moving)
        total += known[alike]
    return total


@torch.no_grad()
def _kept_for(optimizer: ZerothOrderOptimizer, moving: PerturbedParameter) -> int:
    """Bytes of a parameter's coefficient and moments, which are created to be measured."""
    direction: Any = optimizer.perturbation.direction(moving.target, DrawKey(optimizer.seed, 0), {})
    state = optimizer.update.init(ParameterEstimate([direction], [0.0], 0), moving)
    own = not moving.writes_weight and isinstance(direction, FixedFactors)
    return sum(value.nbytes for value in state.values()) + (direction.coefficient.nbytes if own else 0)
