"""How well a model's projected gradient can be measured at a perturbation scale rho.

A central difference along Z differs from its limit by curvature, which grows with rho, and by rounding, which shrinks:

    kappa(rho) = kappa + a rho^2 + e / rho,

with e much as random: another rho, however close, rounds otherwise. The scatter of kappa over scales around rho shows
the rounding. How far its mean moves to the next smaller scale, beyond that scatter, shows the curvature, and such
rounding as close scales have in common.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tezo.estimators.estimate import Closure
from tezo.optim.optimizer import ZerothOrderOptimizer

RHOS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
AROUND = (0.94, 0.98, 1.02, 1.06)
"""Scales around each, as factors: close enough that a rho^2 moves kappa by little."""

DIRECTIONS = 4
ENOUGH = 0.01
"""Share of the projected gradient: a smaller error is lost in that of the batch."""


@dataclass(frozen=True)
class EstimateError:
    """Of the projected gradient at one scale, as shares of its root mean square over directions.

    Attributes:
        rho: the scale.
        scatter: standard deviation over scales close to rho.
        shift: root mean square of what the mean moves by to the next smaller scale; 0 at the smallest.
    """

    rho: float
    scatter: float
    shift: float

    @property
    def error(self) -> float:
        """Both together."""
        return math.hypot(self.scatter, self.shift)


def measure_estimate_error(
    optimizer: ZerothOrderOptimizer, closure: Closure, rhos: Sequence[float] = RHOS
) -> list[EstimateError]:
    """The noise along the directions of the next step, which is not taken.

    Args:
        optimizer: draws the directions; the more, the surer the figures.
        closure: the loss on a few rows; called 2 x directions x 4 times for each scale.
        rhos: scales, largest first.
    """
    found = [[optimizer.measure(closure, rho * factor) for factor in AROUND] for rho in rhos]
    kappas = [[[probe.projected_grad for probe in probes] for probes in at] for at in found]
    means = [[statistics.fmean(of) for of in zip(*at, strict=True)] for at in kappas]
    scatter = [_rms([statistics.stdev(of) for of in zip(*at, strict=True)]) for at in kappas]
    shifts = [_shift(*pair) for pair in zip(means[:-1], means[1:], scatter[1:], strict=True)]
    best = min(range(len(shifts)), key=lambda i: math.hypot(scatter[i], shifts[i]))
    size = _rms(means[best]) or 1.0
    return [EstimateError(rho, s / size, m / size) for rho, s, m in zip(rhos, scatter, [*shifts, 0.0], strict=True)]


def _shift(means: Sequence[float], finer: Sequence[float], scatter: float) -> float:
    moved = statistics.fmean([(a - b) ** 2 for a, b in zip(means, finer, strict=True)])
    return math.sqrt(max(0.0, moved - scatter**2 / len(AROUND)))


def recommended(noise: Sequence[EstimateError]) -> EstimateError:
    """The largest scale with an error of `ENOUGH`; where there is none, that of least error."""
    return next((at for at in noise if at.error <= ENOUGH), min(noise, key=lambda at: at.error))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean([value**2 for value in values]))
