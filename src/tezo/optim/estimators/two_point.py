"""Simultaneous perturbation (Eq. 2): two losses give the projected gradient along a random direction."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from tezo.directions.products import evaluating
from tezo.forward.blocks import NotInBlocksError
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.forward.together import Drawn as Drawn
from tezo.forward.together import Perturber
from tezo.optim.closures import Closure, Losses
from tezo.optim.estimators.estimate import (
    TWO_POINT,
    Estimate,
    Estimator,
    Probe,
    StepDraw,
    StepRecord,
    average,
    mean_loss,
    precise,
)
from tezo.system.errors import RequestError
from tezo.system.processes import ProcessGroup
from tezo.system.signals import let_interrupt

T = TypeVar("T")

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

    rule = TWO_POINT
    single_direction = False
    """Whether it is defined for one direction per step only."""

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._processes = ProcessGroup()

    def prepare(self, model: nn.Module, parameters: Mapping[str, PerturbedParameter], seed: int) -> None:
        del seed
        self._model, self._parameters, self._perturber = model, parameters, Perturber(parameters)
        self._in_blocks = all(parameter.in_blocks for parameter in parameters.values())
        self._dense = any(parameter.draws_for_all_blocks for parameter in parameters.values())

    def share_directions(self, processes: ProcessGroup) -> None:
        self._processes = processes

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        probes = self.probes(closure, draw.directions, self.rho)
        loss = sum(probe.loss_plus + probe.loss_minus for probe in probes) / (2 * len(probes))
        return average(loss, probes, self.passes(len(probes), first=False), draw)

    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        return average(record.loss, record.probes, record.forward_passes, draw)

    def accepts(self, probes: int, num_directions: int) -> bool:
        return probes == num_directions

    def probes(self, closure: Closure, drawn: Drawn, rho: float) -> tuple[Probe, ...]:
        """Returns the measurements along all directions; each rank evaluates its part and gets all of them.

        Args:
            closure: returns the objective as a scalar; it need not be differentiable.
            drawn: parameter name -> its directions.
            rho: perturbation scale.

        Raises:
            RequestError: the closure calls none of the tuned modules.
            FloatingPointError: a loss is NaN or infinite.
        """
        points = [(index, sign * rho) for index in self._shared_out(drawn) for sign in (1, -1)]
        losses = self.evaluated(closure, drawn, points, losses_of)
        return self._checked(gather_probes(probes_of(losses, rho), self._processes))

    def ahead(self, closure: Closure, drawn: Drawn, rho: float) -> list[float]:
        """Returns the losses at W + rho Z_i, in the order of `probes`; on each rank, of its part of the directions."""
        return self.evaluated(closure, drawn, [(index, rho) for index in self._shared_out(drawn)], losses_of)

    def _shared_out(self, drawn: Drawn) -> range:
        """Returns the directions that this rank evaluates."""
        return range(self._processes.rank, len(next(iter(drawn.values()))), self._processes.size)

    def evaluated(
        self,
        closure: Closure,
        drawn: Drawn,
        points: Sequence[tuple[int, float]],
        evaluate: Callable[[Closure, int], list[T]],
    ) -> list[T]:
        """Returns the values of a closure at W + scale * Z_i for each of the points (i, scale), several in a pass.

        Args:
            closure: the objective.
            drawn: parameter name -> its directions.
            points: (i, scale).
            evaluate: returns the values of the closure for a number of models, each perturbed as the next point says.
        """
        copies = copies_of_a_pass(closure, len(points), dense=self._dense) if self._in_blocks else 1
        found: list[T] = []
        try:
            with evaluating(self._model):
                for start in range(0, len(points), copies):
                    let_interrupt()
                    self._set_perturbations(drawn, points[start : start + copies])
                    found += evaluate(closure, len(points[start : start + copies]))
        except NotInBlocksError:
            if not self._in_blocks:
                raise
            self._in_blocks = False  # found out in the first step
            return self.evaluated(closure, drawn, points, evaluate)
        finally:
            self._set_perturbations(drawn, [])
        return found

    def _set_perturbations(self, drawn: Drawn, points: Sequence[tuple[int, float]]) -> None:
        """Perturbs the j-th block of the rows by scale * Z_i, for the j-th of the points (i, scale); none: no rows."""
        self._perturber.perturb(drawn, points)

    def _checked(self, probes: tuple[Probe, ...]) -> tuple[Probe, ...]:
        check_finite(probes)
        if not any(parameter.was_called for parameter in self._parameters.values()):
            raise RequestError(
                f"the closure runs none of the modules that are tuned, such as {next(iter(self._parameters))}; it must "
                "call the optimizer's model, and a compiled one only after the optimizer was made."
            )
        return probes


def losses_of(closure: Closure, copies: int) -> list[float]:
    """Returns the loss of each of so many models; more than one only from `Losses`."""
    if not isinstance(closure, Losses):
        return [mean_loss(closure)]
    losses: list[float] = precise(closure.losses(copies)).tolist()
    return losses


def probes_of(losses: Sequence[float], rho: float) -> tuple[Probe, ...]:
    """Returns the probes whose losses are given, both of the first, both of the second, and so on."""
    pairs = zip(losses[::2], losses[1::2], strict=True)
    return tuple(Probe(plus, minus, (plus - minus) / (2 * rho)) for plus, minus in pairs)


def check_finite(probes: Sequence[Probe]) -> None:
    """Raises a `FloatingPointError` with the first number that is not finite, be it a difference of finite losses."""
    for probe in probes:
        for value in (probe.loss_plus, probe.loss_minus, probe.projected_grad):
            if not math.isfinite(value):
                raise FloatingPointError(value)


def gather_probes(probes: tuple[Probe, ...], processes: ProcessGroup) -> tuple[Probe, ...]:
    """Returns the probes of all ranks: the first probe of each rank, then the second of each, and so on.

    All ranks must have the same number of probes.
    """
    if processes.size == 1:
        return probes
    gathered = processes.gather([x for p in probes for x in (p.loss_plus, p.loss_minus, p.projected_grad)])
    by_rank = [[Probe(*values[i : i + 3]) for i in range(0, len(values), 3)] for values in gathered]
    return tuple(probe for turn in zip(*by_rank, strict=True) for probe in turn)


def copies_of_a_pass(closure: Closure, points: int, *, dense: bool) -> int:
    """Returns the number of models per forward pass: all, or 1, or even, for both signs of a direction in one pass.

    Args:
        closure: the objective; a plain closure is evaluated separately for every model.
        points: number of models.
        dense: whether sharing a pass saves draws of dense noise.
    """
    if not isinstance(closure, Losses):
        return 1
    if closure.most_copies is not None:
        return max(1, min(points, closure.most_copies))
    return max(1, min(points, fitting_copies(closure.tokens, dense=dense)))


def fitting_copies(tokens: int, *, dense: bool) -> int:
    """Returns the largest even number of models that share a pass of so many tokens each; 0 if not even two should."""
    fitting = (TOKENS_OF_A_DENSE_PASS if dense else TOKENS_OF_A_PASS) // max(1, tokens)
    return fitting - fitting % 2
