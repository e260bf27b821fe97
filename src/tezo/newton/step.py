"""A step of Gauss-Newton in the span of a few directions: the outputs of each row are kept, not one loss.

A pass over N rows returns the scores z of C classes at each of T places. Along direction Z_j

    F_j = (z(W + rho Z_j) - z(W)) / rho,   (T, C),

so that z(W + sum_j a_j Z_j) ~ z(W) + sum_j a_j F_j. This is the generalized Gauss-Newton model of the loss (Schraudolph
2002) in a small subspace, as derivative-free least squares has it (DFO-GN and DFBGN, Cartis and Roberts 2019 and 2023).
`linear_model` finds its minimum; there is no learning rate.

The scores are not linear in a, so the real outputs z' at the solution are measured on the same rows. If they differ
clearly from the promised ones, the part t of the step is taken after which the scores

    z + t F a + t^2 (z' - z - F a)

have the lowest loss. A step is judged by the loss to expect on other rows,

    real(lambda) + (validated(lambda) - promised(lambda)),

where the linear model promises one loss on the rows that a was fitted to, and validates another on rows that it was
not. If none is expected to lower the loss, no step is taken: all coefficients are zero.

Where there are rows that nothing is fitted to (held-out ones, the dev rows of a run), they have the last word. Of the
step that was chosen the part t is taken after which the mean loss of their scores z + t (z' - z) is lowest, which may
be none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.outputs import Outputs, change
from tezo.directions.products import evaluating
from tezo.directions.spaces import Direction, FixedFactors
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift
from tezo.newton.linear_model import PARTS, Candidate, LinearModel, without_optimism
from tezo.optim.closures import NO_OUTPUTS, Closure, RowOutputs
from tezo.optim.estimators.estimate import GAUSS_NEWTON, Estimate, ParameterEstimate, Probe, StepDraw, average
from tezo.optim.estimators.two_point import TwoPoint
from tezo.system.errors import RequestError
from tezo.system.progress import BETWEEN, current
from tezo.system.signals import let_interrupt

CLOSE = 0.1
"""A step is taken if its real loss is above the promised one by at most this part of the promised decrease."""


@dataclass(frozen=True)
class Taken:
    """The step that is taken.

    Attributes:
        coefficients: of the directions.
        metrics: the losses that it was chosen by, and the part of the candidate that it is.
    """

    coefficients: list[float]
    metrics: Mapping[str, float]


class GaussNewton(TwoPoint):
    """The step to the minimum of the Gauss-Newton model in the span of a step's directions; see the module.

    The projected gradient of direction j is -K a_j, of K directions, so that a plain step with a rate of 1 is the
    solution. The losses of its probe are those at W + rho Z_j and at W.

    Args:
        rho: perturbation scale.

    Attributes:
        tried: the steps whose real loss the last step measured, each with that loss: the whole one, and a part of it,
            whose other figures are those of the whole.
    """

    rule = GAUSS_NEWTON
    idle_steps = 2  # our choice: one round without a gain may be chance
    tried: Sequence[tuple[Candidate, float]] = ()

    def prepare(self, model: nn.Module, parameters: Mapping[str, PerturbedParameter], seed: int) -> None:
        for name, parameter in parameters.items():
            if not parameter.target.is_matrix:
                raise RequestError(
                    f"method.targets: {name} is no matrix, and gauss-newton combines low-rank directions; leave it out."
                )
        super().prepare(model, parameters, seed)

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        if not isinstance(closure, RowOutputs):
            raise RequestError(NO_OUTPUTS)
        count = len(next(iter(draw.directions.values())))
        try:
            with evaluating(self._model):
                outputs = closure.outputs()
                slopes_TCK, losses = self._slopes(closure, outputs, draw, count)
                model = LinearModel(outputs, slopes_TCK, without_optimism(slopes_TCK, outputs, draw.predictions))
                taken = self._trusted(model, closure, draw)
                if closure.held_out is not None and any(taken.coefficients):
                    taken = self._shortened(taken, closure.held_out, draw)
        finally:
            self._set_perturbations(draw.directions, [])
        loss = outputs.loss()
        probes = tuple(Probe(plus, loss, -count * a) for plus, a in zip(losses, taken.coefficients, strict=True))
        passes = 1 + count + len(self.tried)
        return average(loss, self._checked(probes), passes, draw, {"round": dict(taken.metrics)})

    def _slopes(self, closure: RowOutputs, at: Outputs, draw: StepDraw, count: int) -> tuple[Tensor, list[float]]:
        """Returns (F of all directions (T, C, K), the losses there); each rank evaluates its part of the directions."""
        found: list[float] = []
        rank, size = self._processes.rank, self._processes.size
        points = [(index % count, self.rho) for index in range(rank, size * math.ceil(count / size), size)]
        copies = closure.most_copies or 1  # in torch a pass of many rows gains nothing from others
        for start in range(0, len(points), copies):
            let_interrupt()
            together = points[start : start + copies]
            self._set_perturbations(draw.directions, together)
            for moved in closure.outputs_of(len(together), at):
                found += [moved.loss(), *(change(moved, at) / self.rho).flatten().tolist()]
        ranks = [torch.tensor(values, dtype=torch.float64) for values in self._processes.gather(found)]
        # the first direction of each rank, then the second of each
        table_KX = torch.stack([values.view(math.ceil(count / size), -1) for values in ranks], 1).flatten(0, 1)[:count]
        return table_KX[:, 1:].T.reshape(*at.scores_TC.shape, count), table_KX[:, 0].tolist()

    def _trusted(self, model: LinearModel, closure: RowOutputs, draw: StepDraw) -> Taken:
        """Returns the step after which the loss of other rows should be lowest."""
        step = model.best()
        lowest, chosen, taken = model.loss, [0.0] * model.count, 0.0
        tried: list[tuple[Candidate, float]] = []
        part = 1.0
        while True:
            let_interrupt()
            there = replace(step, coefficients=[part * a for a in step.coefficients])
            self._move(draw, there.coefficients)
            moved = closure.outputs(model.outputs)
            real, shorter = self._processes.first([moved.loss(), model.best_part(step, moved)])
            tried.append((there, real))
            expected = real + step.validated - step.promised
            if expected < lowest:
                lowest, chosen, taken = expected, there.coefficients, part
            missed = real - step.promised > CLOSE * (model.loss - step.promised)
            if part < 1.0 or shorter == 1.0 or not missed:
                break
            part = shorter
        self.tried = tried
        metrics = {
            "own": model.loss,
            "promised": step.promised,
            "validated": step.validated,
            "real": tried[0][1],
            "taken": taken,
        }
        return Taken(self._processes.first(chosen), metrics)

    def _shortened(self, taken: Taken, held_out: RowOutputs, draw: StepDraw) -> Taken:
        """Returns the part of a step after which the loss of held-out rows should be lowest."""
        with current().phase(BETWEEN):
            self._set_perturbations(draw.directions, [])
            before = held_out.outputs()
            self._move(draw, taken.coefficients)
            moved = held_out.outputs(before)
        change_TC = change(moved, before)
        scores_TC, labels_T = before.scores_TC.double().cpu(), before.labels_T.cpu()

        def loss(part: float) -> float:
            return float(functional.cross_entropy(scores_TC + part * change_TC, labels_T))

        part = min((0.0, *PARTS), key=loss)
        judged = {
            "held_out": before.loss(),
            "held_out_real": moved.loss(),
            "taken": part * taken.metrics["taken"],
        }
        coefficients = self._processes.first([part * a for a in taken.coefficients])
        return Taken(coefficients, {**taken.metrics, **judged})

    def _move(self, draw: StepDraw, a_K: Sequence[float]) -> None:
        for name, parameter in self._parameters.items():
            parameter.set_perturbations([Shift(combined(draw.directions[name], a_K), 1.0)])

    def accepts(self, probes: int, num_directions: int) -> bool:
        return 0 < probes <= num_directions

    def passes(self, directions: int, *, first: bool) -> int:
        del first
        return directions + 2


def combined(directions: Sequence[Direction], factors: Sequence[float]) -> Direction:
    """Returns sum_j factors[j] Z_j of low-rank directions with the same fixed factors, the change by a step."""
    first = directions[0]
    assert isinstance(first, FixedFactors)
    ((_, coefficient),) = ParameterEstimate(directions, [len(factors) * factor for factor in factors], 0).tiles()
    return first.with_coefficient(coefficient)
