"""The update of all parameters of a step: those with few coefficients beside their weights are stepped as one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tezo.directions.side_by_side import joined, split_like
from tezo.directions.spaces import Direction, FixedFactors, OwnNumbers, Tile, draw_together
from tezo.forward.beside_weight import InForward
from tezo.forward.blocks import draw_of
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.estimators.estimate import ParameterEstimate
from tezo.optim.updates import Changeable, Elementwise, Moments, Update

Stepped = tuple[PerturbedParameter, ParameterEstimate, Moments]
"""A parameter, the estimate of its gradient, and the moments of the update rule."""


def step_all(update: Update, stepped: Sequence[Stepped], lr: float) -> None:
    """Steps all parameters of an estimate by one rule, in place.

    The numbers are those of separate steps. The coefficients and moments of parameters that are stepped as one become
    views of one buffer each.
    """
    rule = update if isinstance(update, Elementwise) and not update.writes_weight else None
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[InForward, ParameterEstimate, Moments]]] = {}
    for parameter, estimate, state in stepped:
        if rule is not None and isinstance(parameter, InForward) and parameter.has_few(1):
            place = parameter.target.state_dtype, parameter.target.device
            groups.setdefault(place, []).append((parameter, estimate, state))
        else:
            update.step(parameter, estimate, state, lr)
    for group in groups.values():
        assert rule is not None
        _step_as_one(rule, group, lr)


def _step_as_one(update: Elementwise, group: Sequence[tuple[InForward, ParameterEstimate, Moments]], lr: float) -> None:
    for _, estimate, state in group:
        update.carry_over(estimate.direction, state)
    coefficients = [parameter.coefficient for parameter, _, _ in group]
    whole = joined(coefficients)
    for (parameter, _, _), own in zip(group, split_like(whole, coefficients), strict=True):
        parameter.set_coefficient(own)
    moments: Moments = {}
    for key in group[0][2]:
        parts = [state[key] for _, _, state in group]
        moments[key] = joined(parts)
        for (_, _, state), own in zip(group, split_like(moments[key], parts), strict=True):
            state[key] = own
    update.step(_Coefficients(whole), _joint_estimate([estimate for _, estimate, _ in group]), moments, lr)


class _Coefficients(Changeable):
    """The coefficients of several parameters side by side, in place of a parameter."""

    def __init__(self, whole_X: Tensor) -> None:
        self._whole_X = whole_X

    def add_(self, direction: Direction, rows: slice, delta: Tensor, alpha: float) -> None:
        del direction
        self._whole_X[rows].add_(delta, alpha=alpha)


@dataclass(frozen=True)
class _JointEstimate(ParameterEstimate):
    """The estimates of several parameters side by side."""

    coefficient_X: Tensor

    def tiles(self) -> Iterator[Tile]:
        yield slice(None), self.coefficient_X


def _joint_estimate(estimates: Sequence[ParameterEstimate]) -> _JointEstimate:
    first = estimates[0]
    assert isinstance(first.direction, FixedFactors)
    carried = replace(first.direction, before=None)  # moments have been carried over
    return _JointEstimate([carried], first.projected_grads, first.count, _coefficient(estimates))


def _coefficient(estimates: Sequence[ParameterEstimate]) -> Tensor:
    first = estimates[0]
    alike = all(estimate.projected_grads == first.projected_grads for estimate in estimates)
    if not alike or len(first.projected_grads) != len(first.directions):  # each example has directions: sums of many
        return joined([values for estimate in estimates for _, values in estimate.tiles()])
    total: Tensor | None = None
    for index, kappa in enumerate(first.projected_grads):
        draws = [draw_of(estimate.directions[index]) for estimate in estimates]
        draw_together([draw for draw in draws if isinstance(draw, OwnNumbers)], 1)  # in a replay they are not drawn yet
        part = joined([draw.of(0) for draw in draws]) * (kappa / len(first.projected_grads))
        total = part if total is None else total.add_(part)
    assert total is not None
    return total
