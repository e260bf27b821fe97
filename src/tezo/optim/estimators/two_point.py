"""Simultaneous perturbation (Eq. 2): two losses give the projected gradient along a random direction.

Conservative two-point steps: a step is taken, reversed or left out, by the loss at the points that it can reach.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.spaces import Direction
from tezo.forward.blocks import NotInBlocksError
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift, evaluation_mode, let_interrupt
from tezo.optim.estimators.estimate import (
    TWO_POINT,
    Closure,
    Estimate,
    Estimator,
    ParameterEstimate,
    Probe,
    RowsClosure,
    StepDraw,
    StepRecord,
    evaluate,
)
from tezo.system.errors import RequestError
from tezo.system.ranks import Ranks

TOKENS_OF_A_PASS = 1024
"""Largest number of tokens of a pass that several models share. Below it a pass is limited by reading the weights,
above it by arithmetic; docs/cost.md has measurements of both (J2 and N2)."""

TOKENS_OF_A_DENSE_PASS = 8192
"""The same limit if dense noise is drawn once for all models of a pass; it bounds the memory for activations."""


class TwoPoint(Estimator):
    """The estimate (1/q) sum_i kappa_i Z_i, with kappa_i = (f(W + rho Z_i) - f(W - rho Z_i)) / (2 rho).

    The model is in evaluation mode during the evaluations, so that both use the same function.

    Args:
        rho: perturbation scale.
    """

    kind = TWO_POINT
    single_direction = False
    """Whether it is defined for one direction per step only."""

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._ranks = Ranks()
        self._moving: Mapping[str, PerturbedParameter] = {}
        self._in_blocks = True

    def prepare(self, model: nn.Module, moving: Mapping[str, PerturbedParameter], seed: int) -> None:
        del seed
        self._model, self._moving = model, moving
        self._in_blocks = all(parameter.in_blocks for parameter in moving.values())

    def share_directions(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        probes = self.probes(closure, draw.directions, self.rho)
        loss = sum(probe.loss_plus + probe.loss_minus for probe in probes) / (2 * len(probes))
        return average(loss, probes, self.passes(len(probes), first=False), draw)

    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        return average(record.loss, record.probes, record.forward_passes, draw)

    def accepts(self, probes: int, num_directions: int) -> bool:
        return probes == num_directions

    def probes(self, closure: Closure, drawn: Mapping[str, Sequence[Direction]], rho: float) -> tuple[Probe, ...]:
        """The measurements along all directions; each rank evaluates its part and gets all of them.

        Args:
            closure: evaluates the objective.
            drawn: parameter name -> its directions.
            rho: perturbation scale.

        Raises:
            RequestError: the closure calls none of the tuned modules.
            FloatingPointError: a loss is NaN or infinite.
        """
        set_perturbations = partial(self._set_perturbations, drawn)
        own = range(self._ranks.rank, len(next(iter(drawn.values()))), self._ranks.size)
        with evaluation_mode(self._model), float32_on_emulating_cpu(self._model):
            try:
                probes = two_point(closure, set_perturbations, rho, own, self._copies(closure, len(own)))
            except NotInBlocksError:  # raised at most once, in the first step
                self._in_blocks = False
                probes = two_point(closure, set_perturbations, rho, own, 1)
        probes = gather_probes(probes, self._ranks)
        self._check(probes)
        return probes

    def _set_perturbations(self, drawn: Mapping[str, Sequence[Direction]], points: Sequence[tuple[int, float]]) -> None:
        """Perturbs the j-th block of the rows by scale * Z_i, for the j-th of the points (i, scale)."""
        for name, parameter in self._moving.items():
            parameter.set_perturbations([Shift(drawn[name][index], scale) for index, scale in points])

    def _copies(self, closure: Closure, directions: int) -> int:
        dense = any(parameter.draws_for_all_blocks for parameter in self._moving.values())
        return copies_of_a_pass(closure, directions, dense=dense) if self._in_blocks else 1

    def _check_finite(self, probes: Sequence[Probe]) -> None:
        for probe in probes:
            for value in (probe.loss_plus, probe.loss_minus, probe.projected_grad):
                if not math.isfinite(value):
                    raise FloatingPointError(value)

    def _check(self, probes: Sequence[Probe]) -> None:
        self._check_finite(probes)
        if not any(parameter.was_called for parameter in self._moving.values()):
            raise RequestError(
                f"the closure runs none of the modules that are tuned, such as {next(iter(self._moving))}; it must "
                "call the optimizer's model, and a compiled one only after the optimizer was made."
            )


def average(loss: float, probes: tuple[Probe, ...], passes: int, draw: StepDraw) -> Estimate:
    """The estimate that averages kappa Z over all directions of a step."""
    kappas = [probe.projected_grad for probe in probes]
    gradients = {name: ParameterEstimate(own, kappas, draw.count) for name, own in draw.directions.items()}
    return Estimate(loss, gradients, passes, probes)


def two_point(
    closure: Closure,
    set_perturbations: Callable[[Sequence[tuple[int, float]]], None],
    rho: float,
    directions: Sequence[int],
    copies: int,
) -> tuple[Probe, ...]:
    """Evaluates `closure` at +rho and -rho along each direction, then removes the perturbations.

    Args:
        closure: returns the objective as a scalar; it need not be differentiable.
        set_perturbations: called with (i, scale) pairs; perturbs block j of the rows by the j-th pair, W + scale * Z_i.
            An empty list removes the perturbations.
        rho: perturbation scale.
        directions: indices of the directions to be evaluated.
        copies: number of models per forward pass; above 1, `closure` must be a `RowsClosure`.
    """
    points = [(index, sign * rho) for index in directions for sign in (1, -1)]
    losses: list[float] = []
    try:
        for start in range(0, len(points), copies):
            part = points[start : start + copies]
            let_interrupt()
            set_perturbations(part)
            losses += evaluate(closure, len(part))
    finally:
        set_perturbations([])
    pairs = zip(losses[::2], losses[1::2], strict=True)
    return tuple(Probe(plus, minus, (plus - minus) / (2 * rho)) for plus, minus in pairs)


def gather_probes(probes: tuple[Probe, ...], ranks: Ranks) -> tuple[Probe, ...]:
    """The probes of all ranks: the first probe of each rank, then the second of each, and so on.

    All ranks must have the same number of probes.
    """
    if ranks.size == 1:
        return probes
    gathered = ranks.gather([x for p in probes for x in (p.loss_plus, p.loss_minus, p.projected_grad)])
    by_rank = [[Probe(*values[i : i + 3]) for i in range(0, len(values), 3)] for values in gathered]
    return tuple(probe for turn in zip(*by_rank, strict=True) for probe in turn)


def copies_of_a_pass(closure: Closure, directions: int, *, dense: bool) -> int:
    """Number of models per forward pass: 1, or an even number, so that both signs of a direction share a pass.

    Args:
        closure: the objective; a plain closure is evaluated separately for every model.
        directions: number of directions, with two models each.
        dense: whether sharing a pass saves draws of dense noise.
    """
    if not isinstance(closure, RowsClosure):
        return 1
    return max(1, min(2 * directions, fitting_copies(closure.tokens, dense=dense)))


def fitting_copies(tokens: int, *, dense: bool) -> int:
    """Largest even number of models that share a pass of so many tokens each; 0 if not even two should."""
    fitting = (TOKENS_OF_A_DENSE_PASS if dense else TOKENS_OF_A_PASS) // max(1, tokens)
    return fitting - fitting % 2


class Conservative(TwoPoint):
    """The estimate s kappa Z, with the sign s of the best of three losses on the batch of the step:

        s = argmin over s in {0, 1, -1} of f(W - s lr kappa Z),   kappa as in `TwoPoint`; 0 in a tie.

    A plain step, W - lr (s kappa Z), ends at the best of these points. The recorded projected gradient is s kappa.
    It takes five forward passes, and one direction per step.

    Args:
        rho: perturbation scale.
    """

    single_direction = True

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        (probe,) = self.probes(closure, draw.directions, self.rho)
        step = draw.lr * probe.projected_grad
        with evaluation_mode(self._model), float32_on_emulating_cpu(self._model):
            losses = {sign: self._loss_at(closure, draw, -sign * step) for sign in (0, 1, -1)}
        if not math.isfinite(losses[0]):
            raise FloatingPointError(losses[0])
        best = min(losses, key=lambda sign: losses[sign] if math.isfinite(losses[sign]) else math.inf)
        chosen = replace(probe, projected_grad=best * probe.projected_grad)
        return average(losses[0], (chosen,), self.passes(1, first=False), draw)

    def passes(self, directions: int, *, first: bool) -> int:
        del first
        return 5 * directions

    def _loss_at(self, closure: Closure, draw: StepDraw, scale: float) -> float:
        """f(W + scale * Z)."""
        let_interrupt()
        try:
            self._set_perturbations(draw.directions, [(0, scale)] if scale else [])
            return evaluate(closure, 1)[0]
        finally:
            self._set_perturbations(draw.directions, [])
