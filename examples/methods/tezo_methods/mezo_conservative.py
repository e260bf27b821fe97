"""MeZO-conservative: a step, its opposite, or none, by the loss of the batch at each of the three points."""

import math
from dataclasses import replace
from typing import Unpack

from torch import nn

from tezo.directions.perturbation import DenseGaussian
from tezo.directions.products import evaluating
from tezo.optim.closures import Closure
from tezo.optim.estimators.estimate import Estimate, StepDraw, average, mean_loss
from tezo.optim.estimators.two_point import TwoPoint
from tezo.optim.method import Method
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import SGD
from tezo.system.signals import let_interrupt


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
        step, losses = draw.lr * probe.projected_grad, {}
        try:
            with evaluating(self._model):
                for sign in (0, 1, -1):
                    let_interrupt()
                    self._set_perturbations(draw.directions, [(0, -sign * step)] if sign * step else [])
                    losses[sign] = mean_loss(closure)
        finally:
            self._set_perturbations(draw.directions, [])
        if not math.isfinite(losses[0]):
            raise FloatingPointError(losses[0])
        best = min(losses, key=lambda sign: losses[sign] if math.isfinite(losses[sign]) else math.inf)
        chosen = replace(probe, projected_grad=best * probe.projected_grad)
        return average(losses[0], (chosen,), self.passes(1, first=False), draw)

    def passes(self, directions: int, *, first: bool) -> int:
        del first
        return 5 * directions


@with_settings
def mezo_conservative(model: nn.Module, *, lr: float = 1e-6, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO-conservative: MeZO's step, or its opposite, or none, by the loss of the batch at each of the three points.

        W <- W - s lr kappa z,   s = argmin over s in {0, 1, -1} of f(W - s lr kappa z).

    A baseline of Zhang et al. 2024 (ZO-SGD-Cons); not in the paper. Five forward passes a step instead of two. State:
    none. Only one direction per step is possible. `lr`: MeZO's.

    Deviations: as in `mezo`. The losses are compared without weight decay, which every step has.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), SGD(), lr=lr, estimator=Conservative, **common)


METHOD = Method("mezo-conservative", mezo_conservative, in_paper=False)
