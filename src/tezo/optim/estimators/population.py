"""Estimates that compare the losses of several perturbed models with each other, over their spread."""

import math
import statistics
from typing import ClassVar

import torch
from torch import Tensor

from tezo.directions.products import evaluating
from tezo.optim.closures import Closure, RowLosses
from tezo.optim.estimators.estimate import POPULATION, Estimate, Probe, StepDraw, average, mean_loss
from tezo.optim.estimators.two_point import TwoPoint, check_finite
from tezo.system.errors import RequestError


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
        with evaluating(self._model):
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


SAME = 1e-12
"""Spread of members, as a part of the largest loss, that is rounding alone."""
WIDER, MOST_WIDENINGS = 1.5, 5
"""Factor of the distance of members after a step in which all were alike, and how often it counts. Our choice."""
NEEDS_ROWS = (
    "this method compares the loss of each row, and the closure returns one loss; give one of tezo.closure(model, "
    "batch), or choose another method."
)


class Population(TwoPoint):
    """The estimate (1/P) sum_i kappa_i Z_i of P members W + r Z_i, by their losses l_ij on the rows j:

        a_ij = l_ij - mean_i l_ij,   kappa_i = r mean_j a_ij / sigma,   sigma^2 = sum_i (mean_j a_ij)^2 / (P - 1).

    The distance r is rho, times `WIDER` after each step in which all members were alike, `MOST_WIDENINGS` times at
    most: on a plateau of the score no member at rho may be better. Rows are of different difficulty, which the mean
    over the members takes out. A loss that is missing (NaN) is left out of all means. kappa has the unit of r, so that
    the rate is the size of a step as a multiple of a member's distance: a step with rate lr has length
    lr r |Z| / sqrt(P) where losses are noise. With sigma = 0, as where all members score alike, nothing but weight
    decay changes parameters. A direction has one member for each of `signs`, and the mean of their kappas with these
    signs.

    Args:
        rho: perturbation scale.
    """

    rule = POPULATION
    signs: ClassVar[tuple[int, ...]] = (1,)

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        if not isinstance(closure, RowLosses):
            raise RequestError(NEEDS_ROWS)
        count = len(next(iter(draw.directions.values())))
        indices = self._shared_out(draw.directions)
        reach = self.rho * WIDER ** min(draw.idle, MOST_WIDENINGS)
        points = [(index, sign * reach) for index in indices for sign in self.signs]
        found = self.evaluated(closure, draw.directions, points, losses_of_rows)
        ranks = [torch.tensor(values, dtype=torch.float64) for values in
                 self._processes.gather([loss for losses in found for loss in losses.tolist()])]  # fmt: skip
        # the first direction of each rank, then the second of each
        parts = [values.view(len(indices), len(self.signs), -1) for values in ranks]
        losses_PN = torch.stack(parts, 1).flatten(0, 2)
        if losses_PN.isinf().any():
            raise FloatingPointError(float(losses_PN.nanmean()))
        signs_S = torch.tensor(self.signs, dtype=torch.float64)
        kappas = (torch.tensor(kappas_of(losses_PN, reach)).view(count, -1) * signs_S).mean(1).tolist()
        mean = float(losses_PN.nanmean())
        members = losses_PN.nanmean(1).nan_to_num(mean).view(count, -1).tolist()
        probes = tuple(
            Probe(losses[0], losses[1] if len(losses) > 1 else mean, kappa)
            for losses, kappa in zip(members, kappas, strict=True)
        )
        return average(mean, self._checked(probes), self.passes(count, first=False), draw, {"reach": reach})

    def passes(self, directions: int, *, first: bool) -> int:
        del first
        return directions * len(self.signs)

    def accepts(self, probes: int, num_directions: int) -> bool:
        return probes == num_directions


class AntitheticPopulation(Population):
    """The same of pairs W + r Z_i and W - r Z_i, in which terms of even order cancel."""

    signs = (1, -1)


def losses_of_rows(closure: Closure, copies: int) -> list[Tensor]:
    """Returns the losses of the rows, (rows,), of each of so many models."""
    assert isinstance(closure, RowLosses)
    return [*closure.example_losses(copies)]


def kappas_of(losses_PN: Tensor, reach: float) -> list[float]:
    """Returns kappa of each member at this distance; 0 for one whose losses are all missing."""
    above_P = (losses_PN - losses_PN.nanmean(0)).nanmean(1).nan_to_num(0.0)
    sigma = float(above_P.square().sum() / max(1, len(above_P) - 1)) ** 0.5
    alike = sigma <= SAME * float(losses_PN.nan_to_num(0.0).abs().max())
    return [0.0] * len(above_P) if alike else (reach * above_P / sigma).tolist()
