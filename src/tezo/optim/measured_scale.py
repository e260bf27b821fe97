"""The perturbation scale rho of a run, measured along its own directions: not bent by curvature, not lost in rounding.

The loss of row i at W + s rho Z is f_i + s rho g_i + rho^2 h_i / 2 + ... With the losses at both signs and at W,

    odd_i = (f_i(+) - f_i(-)) / 2 ~ rho g_i,    even_i = (f_i(+) + f_i(-)) / 2 - f_i ~ rho^2 h_i / 2.

A step uses the odd part. The even part says how far the two points are from where the model is linear. Their ratio
grows in proportion to rho, so one trial foretells the scale at which it is small enough. Rounding is told by a scale so
close that odd / rho does not change otherwise:

    noise_i = (odd_i(1.02 rho) / 1.02 - odd_i(rho)) / sqrt(1 + 1.02^-2).

Three such variances are taken off the square of the even part: half of a loss's at either sign, and its own at W.
All sizes are root mean squares over rows and directions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tezo.directions.products import float32_on_emulating_cpu
from tezo.forward.perturbed_parameter import evaluation_mode
from tezo.optim.estimators.estimate import RowsClosure, precise
from tezo.optim.tuner import Tuner
from tezo.system.errors import NonFiniteLossError

SCALES = tuple(float(f"{digit}e-{power}") for power in range(1, 8) for digit in (3, 1))[1:]
"""1e-1, 3e-2, 1e-2, ..., 1e-7: results are among them, so that they do not hang on a few rows."""
MOST_CURVATURE = 0.1
"""Largest even part, as a part of the odd part."""
MOST_ROUNDING = 1 / 30
"""Largest rounding noise, as a part of the odd part."""
CLOSE = 1.02
MOST_TRIALS = 4
"""Scales that are tried for curvature, at most."""
STEEPEST = 0.1
"""Least factor from one trial to the next: far from where the model is linear the ratio foretells little."""
MOST_RISE = 0.2
"""Largest rise of the mean loss from W to either point, as a part of it, at a scale that is not sound."""

Progress = Callable[[int, int], None]
"""Called with the number of forward passes made, and the most that there will be."""


def untold(done: int, most: int) -> None:
    """A `Progress` that nobody follows."""
    del done, most


@dataclass(frozen=True)
class ScaleError:
    """How far the losses at a scale are from what a step assumes.

    Attributes:
        rho: the scale.
        curvature: even part over odd part; infinite where a loss was not finite.
        rounding: rounding noise over odd part.
        rise: of the mean loss from W to the higher of the two points, as a part of the loss at W.
    """

    rho: float
    curvature: float
    rounding: float = 0.0
    rise: float = math.inf

    @property
    def excess(self) -> float:
        """The larger of the two over its bound; a scale with at most 1 is sound."""
        return max(self.curvature / MOST_CURVATURE, self.rounding / MOST_ROUNDING)

    @property
    def badness(self) -> tuple[bool, float, float]:
        """Sorts scales from the best: sound ones by their size, the others by their excess, destroyed models last."""
        return self.excess > 1 and self.rise > MOST_RISE, max(1.0, self.excess), -self.rho


@dataclass(frozen=True)
class MeasuredScale:
    """A scale, and how it was found.

    Attributes:
        chosen: the scale.
        tried: the scales in the order in which they were tried.
        loss: mean loss of the rows at W.
        kappa_sq: mean square over the directions of the projected gradient of the mean loss; where each of B rows has
            its own, the mean square of a row's over B, so that entries of a step's estimate are as large.
        second_derivative: mean of Z^T H Z over the directions, with H the Hessian of the mean loss, or of each row's.
        num_forward_passes: number of forward passes over the rows.
    """

    chosen: ScaleError
    tried: tuple[ScaleError, ...]
    loss: float
    kappa_sq: float
    second_derivative: float
    num_forward_passes: int


def most_passes(num_directions: int) -> int:
    """Forward passes of `measure_scale`, at most; the first scale alone takes three with one direction."""
    return 1 + 2 * num_directions * (MOST_TRIALS + 2)


def measure_scale(
    optimizer: Tuner,
    losses: Callable[[], Tensor | float],
    start: float,
    progress: Progress = untold,
    *,
    rounding: float | None = None,
) -> MeasuredScale:
    """Finds the largest of `SCALES`, from `start` down, that obeys both bounds; the least bad one where none does.

    No step is taken. Where no scale that was tried obeys both, one more is tried, which should exceed both alike.

    Args:
        optimizer: draws the directions, those of its next step.
        losses: of the rows at the weights as they are, (rows,) or a scalar, float32 or wider. Where each row has its
            own directions: as in a step.
        start: first scale.
        progress: told after each pair of passes.
        rounding: bound of the rounding error of a loss, as a part of it; None: not known. Where it is small enough no
            passes are made for rounding.

    Raises:
        NonFiniteLossError: a loss at W is NaN or infinite, or at every scale that was tried.
    """
    return _Measurement(optimizer, losses, progress, rounding).run(start)


class _Measurement:
    def __init__(
        self, optimizer: Tuner, losses: Callable[[], Tensor | float], progress: Progress, rounding: float | None
    ) -> None:
        self._rounding = rounding
        self._taken_off = 0.0
        self._optimizer = optimizer
        self._losses = losses
        self._progress = progress
        self._passes = 0
        self._odd: dict[float, Tensor] = {}
        self._even: dict[float, Tensor] = {}
        self._own = torch.zeros(())

    def run(self, start: float) -> MeasuredScale:
        self._own = self._at_own()
        tried = self._go_down(start)
        best = min(tried, key=lambda at: at.curvature)
        if best.rho not in self._odd:
            raise NonFiniteLossError(0, math.inf, float(self._own.mean()))
        chosen = next((at for at in tried if at.curvature <= MOST_CURVATURE), best)
        noise = self._noise(chosen.rho)
        tried = [self._with_rounding(at, noise) for at in tried]
        between = balanced(tried)
        if between is not None:
            tried.append(self._with_rounding(self._error(between), noise))
        chosen = min(tried, key=lambda at: at.badness)
        second = float(2 * self._even[chosen.rho].mean() / chosen.rho**2)
        kappa_sq = self._kappa_sq(chosen.rho)
        return MeasuredScale(chosen, tuple(tried), float(self._own.mean()), kappa_sq, second, self._passes)

    def _kappa_sq(self, rho: float) -> float:
        kappas = self._odd[rho] / rho
        if self._optimizer.per_example:
            return float(kappas.square().mean()) / kappas.shape[1]
        return float(kappas.mean(1).square().mean())

    def _go_down(self, rho: float) -> list[ScaleError]:
        tried: list[ScaleError] = []
        while len(tried) < MOST_TRIALS:
            tried.append(self._error(rho))
            curvature = tried[-1].curvature
            is_noise = len(tried) > 1 and math.isfinite(curvature) and curvature > tried[-2].curvature
            if curvature <= MOST_CURVATURE or is_noise or rho <= SCALES[-1]:
                break
            wanted = rho * max(STEEPEST, MOST_CURVATURE / curvature)
            rho = next((scale for scale in SCALES if scale <= wanted and scale < rho), SCALES[-1])
        return tried

    def _error(self, rho: float) -> ScaleError:
        try:
            plus, minus = self._points(rho)
        except NonFiniteLossError:
            return ScaleError(rho, math.inf)
        self._odd[rho], self._even[rho] = (plus - minus) / 2, (plus + minus) / 2 - self._own
        rise = float(torch.maximum(plus.mean(1), minus.mean(1)).max() - self._own.mean())
        size = max(abs(float(self._own.mean())), 1e-300)
        return ScaleError(rho, _rms(self._even[rho]) / max(_rms(self._odd[rho]), 1e-300), rise=rise / size)

    def _noise(self, rho: float) -> float:
        bound = math.inf if self._rounding is None else self._rounding * float(self._own.abs().max())
        if bound <= MOST_ROUNDING * _rms(self._odd[rho]):
            return bound
        plus, minus = self._points(CLOSE * rho)
        self._taken_off = _rms((plus - minus) / 2 / CLOSE - self._odd[rho]) / math.sqrt(1 + CLOSE**-2)
        return self._taken_off

    def _with_rounding(self, at: ScaleError, noise: float) -> ScaleError:
        if at.rho not in self._odd:
            return at
        odd, even = max(_rms(self._odd[at.rho]), 1e-300), _rms(self._even[at.rho])
        return replace(at, rounding=noise / odd, curvature=math.sqrt(max(0.0, even**2 - 3 * self._taken_off**2)) / odd)

    def _points(self, rho: float) -> tuple[Tensor, Tensor]:
        """(directions, rows), twice: the losses of the rows at both signs of each direction."""
        seen: list[Tensor] = []

        def mean() -> Tensor:
            values = self._rows()
            seen.append(values)
            return values.mean()

        directions = max(1, self._optimizer.num_directions)
        try:
            probes = self._optimizer.measure(self._losses if self._optimizer.per_example else mean, rho)
        finally:
            self._count(2 * directions)
        if self._optimizer.per_example:
            points = torch.tensor([(p.loss_plus, p.loss_minus) for p in probes], dtype=torch.float64)
            seen = list(points.view(-1, 2 * directions).T)
        return torch.stack(seen[::2]), torch.stack(seen[1::2])

    def _at_own(self) -> Tensor:
        model = self._optimizer.model
        with torch.no_grad(), evaluation_mode(model), float32_on_emulating_cpu(model):
            values = self._rows()
        self._count(1)
        if not bool(values.isfinite().all()):
            raise NonFiniteLossError(0, float(values.mean()), None)
        return values

    def _rows(self) -> Tensor:
        if self._optimizer.per_example and isinstance(self._losses, RowsClosure):
            found: Tensor | float = self._losses.example_losses(1)
        else:
            found = self._losses()
        values: Tensor = precise(torch.as_tensor(found))
        return values.detach().double().cpu().flatten()

    def _count(self, passes: int) -> None:
        self._passes += passes
        self._progress(self._passes, most_passes(max(1, self._optimizer.num_directions)))


def balanced(tried: Sequence[ScaleError]) -> float | None:
    """The scale to try where none obeys both bounds, or None: between the best one and the one beside it.

    It is on the side where what exceeds its bound by more is less: rounding falls and curvature grows in proportion to
    the scale. Where nothing was tried on that side it is where both should exceed their bounds alike, or rounding none.
    """
    best = min(tried, key=lambda at: at.badness)
    if best.excess <= 1 or best.rounding == 0:
        return None
    rounding, curvature = best.rounding / MOST_ROUNDING, best.curvature / MOST_CURVATURE
    above, below = ([at.rho for at in tried if sign * at.rho > sign * best.rho] for sign in (1, -1))
    beside = min(above, default=None) if rounding > curvature else max(below, default=None)
    wanted = best.rho * min(rounding, math.sqrt(rounding / max(curvature, 1e-12)))
    if beside is not None:
        wanted = math.sqrt(best.rho * beside)
    nearest = min(SCALES, key=lambda scale: abs(math.log(scale / wanted)))
    return None if nearest in {at.rho for at in tried} else nearest


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def in_words(found: MeasuredScale, dtype: str) -> str:
    """What the user should know of a measured scale.

    Args:
        found: the scale.
        dtype: that the model computes in, as `model.dtype` of a recipe has it.
    """
    at = found.chosen
    measured = f"curvature is {at.curvature:.1%} of the change of the losses there, rounding {at.rounding:.1%}"
    if at.excess <= 1:
        return (
            f"method.rho: {at.rho:g} was measured along the run's directions ({found.num_forward_passes} forward "
            f"passes): {measured}."
        )
    way = "" if dtype in ("float32", "float64") else ", and model.dtype=float32 has one"
    return (
        f"method.rho: no scale keeps curvature below {MOST_CURVATURE:.0%} and rounding below {MOST_ROUNDING:.1%} of "
        f"the change of the losses in {dtype}{way}; {at.rho:g} is the least bad ({found.num_forward_passes} forward "
        f"passes): {measured}."
    )
