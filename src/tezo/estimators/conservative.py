"""Conservative two-point steps: a step is taken, reversed or left out, by the loss at the points that it can reach."""

import math
from dataclasses import replace

from tezo.estimators.estimate import Closure, Estimate, StepDraw, evaluate
from tezo.estimators.two_point import TwoPoint, average
from tezo.forward.evaluation_mode import evaluation_mode
from tezo.forward.uninterrupted import let_interrupt
from tezo.numerics.emulation import float32_on_emulating_cpu


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
