"""One-sided estimates: the loss along each direction is compared with the loss at the point itself."""

import math
import statistics

from tezo.directions.products import float32_on_emulating_cpu
from tezo.forward.perturbed_parameter import evaluation_mode
from tezo.optim.estimators.estimate import Closure, Estimate, Probe, StepDraw, average, mean_loss
from tezo.optim.estimators.two_point import TwoPoint, check_finite


class OverSpread(TwoPoint):
    """The estimate (1/q) sum_i kappa_i Z_i of q directions, divided by the spread of their losses (FZOO):

        l_i = f(W + rho Z_i),   kappa_i = (l_i - f(W)) / sigma,   sigma^2 = sum_i (l_i - mean l)^2 / (q - 1).

    kappa has no unit, so that the rate is the size of an entry's step. With sigma = 0 there is no step. It takes q + 1
    forward passes, and two directions at least.

    Args:
        rho: perturbation scale.
    """

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        count = len(next(iter(draw.directions.values())))
        with evaluation_mode(self._model), float32_on_emulating_cpu(self._model):
            loss = mean_loss(closure)
        ranks = self._processes.gather(self.ahead(closure, draw.directions, self.rho))
        losses = [one for turn in zip(*ranks, strict=True) for one in turn]
        spread = statistics.stdev(losses) if all(map(math.isfinite, losses)) else math.nan
        kappas = [(one - loss) / spread if spread else 0.0 for one in losses]
        probes = tuple(Probe(one, loss, kappa) for one, kappa in zip(losses, kappas, strict=True))
        check_finite(probes)
        return average(loss, self._checked(probes), self.passes(count, first=False), draw)

    def passes(self, directions: int, *, first: bool) -> int:
        del first
        return directions + 1
