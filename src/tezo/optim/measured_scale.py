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
from tezo.optim.optimizer import ZerothOrderOptimizer
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
    """Returns the forward passes of `measure_scale`, at most; the first scale takes three with one direction."""
    return 1 + 2 * num_directions * (MOST_TRIALS + 2)


def measure_scale(
    optimizer: ZerothOrderOptimizer,
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
    rows = _Rows(optimizer, losses, progress)
    tried: list[ScaleError] = []
    rho = start
    while len(tried) < MOST_TRIALS:
        tried.append(rows.error(rho))
        curvature = tried[-1].curvature
        is_noise = len(tried) > 1 and math.isfinite(curvature) and curvature > tried[-2].curvature
        if curvature <= MOST_CURVATURE or is_noise or rho <= SCALES[-1]:
            break
        wanted = rho * max(STEEPEST, MOST_CURVATURE / curvature)
        rho = next((scale for scale in SCALES if scale <= wanted and scale < rho), SCALES[-1])
    best = min(tried, key=lambda at: at.curvature)
    if best.rho not in rows.odd:
        raise NonFiniteLossError(0, math.inf, float(rows.own.mean()))
    sound = next((at for at in tried if at.curvature <= MOST_CURVATURE), best)
    noise, taken_off = rows.noise(sound.rho, rounding)
    tried = [rows.with_rounding(at, noise, taken_off) for at in tried]
    between = balanced(tried)
    if between is not None:
        tried.append(rows.with_rounding(rows.error(between), noise, taken_off))
    chosen = min(tried, key=lambda at: at.badness)
    second = float(2 * rows.even[chosen.rho].mean() / chosen.rho**2)
    kappas = rows.odd[chosen.rho] / chosen.rho
    if optimizer.per_example:
        kappa_sq = float(kappas.square().mean()) / kappas.shape[1]
    else:
        kappa_sq = float(kappas.mean(1).square().mean())
    return MeasuredScale(chosen, tuple(tried), float(rows.own.mean()), kappa_sq, second, rows.passes)


class _Rows:
    """The losses of the rows of a measurement; the arguments are those of `measure_scale`.

    Attributes:
        own: the losses at W, (rows,).
        odd: scale -> the odd parts, (directions, rows), where the losses are finite.
        even: the even parts.
        passes: forward passes so far.
    """

    def __init__(
        self, optimizer: ZerothOrderOptimizer, losses: Callable[[], Tensor | float], progress: Progress
    ) -> None:
        self._optimizer, self._losses, self._progress = optimizer, losses, progress
        self.passes = 0
        self.odd: dict[float, Tensor] = {}
        self.even: dict[float, Tensor] = {}
        with torch.no_grad(), evaluation_mode(optimizer.model), float32_on_emulating_cpu(optimizer.model):
            self.own = self._evaluate()
        self._count(1)
        if not bool(self.own.isfinite().all()):
            raise NonFiniteLossError(0, float(self.own.mean()), None)

    def error(self, rho: float) -> ScaleError:
        """Measures the odd and even parts at a scale."""
        try:
            plus, minus = self._points(rho)
        except NonFiniteLossError:
            return ScaleError(rho, math.inf)
        self.odd[rho], self.even[rho] = (plus - minus) / 2, (plus + minus) / 2 - self.own
        own = float(self.own.mean())
        rise = float(torch.maximum(plus.mean(1), minus.mean(1)).max() - own) / max(abs(own), 1e-300)
        return ScaleError(rho, _rms(self.even[rho]) / max(_rms(self.odd[rho]), 1e-300), rise=rise)

    def noise(self, rho: float, bound: float | None) -> tuple[float, float]:
        """Returns (rounding noise or its bound, what is to be taken off the even parts for it)."""
        bound = math.inf if bound is None else bound * float(self.own.abs().max())
        if bound <= MOST_ROUNDING * _rms(self.odd[rho]):
            return bound, 0.0
        plus, minus = self._points(CLOSE * rho)
        measured = _rms((plus - minus) / 2 / CLOSE - self.odd[rho]) / math.sqrt(1 + CLOSE**-2)
        return measured, measured

    def with_rounding(self, at: ScaleError, noise: float, taken_off: float) -> ScaleError:
        """Returns the errors at a scale with those of rounding."""
        if at.rho not in self.odd:
            return at
        odd, even = max(_rms(self.odd[at.rho]), 1e-300), _rms(self.even[at.rho])
        return replace(at, rounding=noise / odd, curvature=math.sqrt(max(0.0, even**2 - 3 * taken_off**2)) / odd)

    def _points(self, rho: float) -> tuple[Tensor, Tensor]:
        """(directions, rows), twice: the losses of the rows at both signs of each direction."""
        seen: list[Tensor] = []

        def mean() -> Tensor:
            seen.append(self._evaluate())
            return seen[-1].mean()

        directions = self._optimizer.num_directions
        try:
            probes = self._optimizer.measure(self._losses if self._optimizer.per_example else mean, rho)
        finally:
            self._count(2 * directions)
        if self._optimizer.per_example:
            points = torch.tensor([(p.loss_plus, p.loss_minus) for p in probes], dtype=torch.float64)
            seen = list(points.view(-1, 2 * directions).T)
        return torch.stack(seen[::2]), torch.stack(seen[1::2])

    def _evaluate(self) -> Tensor:
        if self._optimizer.per_example and isinstance(self._losses, RowsClosure):
            found: Tensor | float = self._losses.example_losses(1)
        else:
            found = self._losses()
        values: Tensor = precise(torch.as_tensor(found))
        return values.detach().double().cpu().flatten()

    def _count(self, passes: int) -> None:
        self.passes += passes
        self._progress(self.passes, most_passes(self._optimizer.num_directions))


def balanced(tried: Sequence[ScaleError]) -> float | None:
    """Returns the scale to try where none obeys both bounds, or None: between the best one and the one beside it.

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
    """Returns what the user should know of a measured scale.

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
