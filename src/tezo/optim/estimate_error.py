"""The error of a model's measured projected gradient as a function of the perturbation scale rho.

A central difference along Z has a curvature error, which grows with rho, and a rounding error, which shrinks with rho:

    kappa(rho) = kappa + a rho^2 + e / rho.

e is nearly random: even a slightly different rho is rounded differently. The standard deviation of kappa over scales
close to rho therefore measures the rounding error. The change of its mean to the next smaller scale, beyond that
standard deviation, measures the curvature error and the part of the rounding error that close scales share.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tezo.estimators.estimate import Closure
from tezo.optim.tuner import Tuner

RHOS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
AROUND = (0.94, 0.98, 1.02, 1.06)
"""Factors of the scales measured around each rho; they are close enough that a rho^2 changes little between them."""

DIRECTIONS = 4
ENOUGH = 0.01
"""Acceptable error as a fraction of the projected gradient; the noise of the batch exceeds a smaller error."""


@dataclass(frozen=True)
class EstimateError:
    """Errors of the projected gradient at one scale, as fractions of its root mean square over directions.

    Attributes:
        rho: perturbation scale.
        scatter: standard deviation over scales close to rho.
        shift: root mean square of the change of the mean to the next smaller scale; 0 at the smallest scale.
    """

    rho: float
    scatter: float
    shift: float

    @property
    def error(self) -> float:
        """sqrt(scatter^2 + shift^2)."""
        return math.hypot(self.scatter, self.shift)


def measure_estimate_error(optimizer: Tuner, closure: Closure, rhos: Sequence[float] = RHOS) -> list[EstimateError]:
    """The errors along the directions of the next step; no step is taken.

    Args:
        optimizer: draws the directions; more directions give more accurate results.
        closure: the loss on a few rows; called 2 x directions x 4 times for each scale.
        rhos: perturbation scales, in descending order.
    """
    measured = [[optimizer.measure(closure, rho * factor) for factor in AROUND] for rho in rhos]
    kappas = [[[probe.projected_grad for probe in probes] for probes in at_rho] for at_rho in measured]
    means = [[statistics.fmean(along) for along in zip(*at_rho, strict=True)] for at_rho in kappas]
    scatter = [_rms([statistics.stdev(along) for along in zip(*at_rho, strict=True)]) for at_rho in kappas]
    shifts = [_shift(*pair) for pair in zip(means[:-1], means[1:], scatter[1:], strict=True)]
    best = min(range(len(shifts)), key=lambda i: math.hypot(scatter[i], shifts[i]))
    size = _rms(means[best]) or 1.0
    return [EstimateError(rho, s / size, m / size) for rho, s, m in zip(rhos, scatter, [*shifts, 0.0], strict=True)]


def _shift(means: Sequence[float], finer: Sequence[float], scatter: float) -> float:
    moved = statistics.fmean([(a - b) ** 2 for a, b in zip(means, finer, strict=True)])
    return math.sqrt(max(0.0, moved - scatter**2 / len(AROUND)))


def recommended(noise: Sequence[EstimateError]) -> EstimateError:
    """The largest scale with an error of at most `ENOUGH`; if there is none, the scale with the smallest error."""
    return next((scale for scale in noise if scale.error <= ENOUGH), min(noise, key=lambda scale: scale.error))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean([value**2 for value in values]))
