"""The perturbation scale rho of a run, measured along its directions: not bent by curvature, not lost in rounding.

The loss of row i at W + s rho Z is f_i + s rho g_i + rho^2 h_i / 2 + ... With the losses at both signs and at W,

    odd_i = (f_i(+) - f_i(-)) / 2 ~ rho g_i,    even_i = (f_i(+) + f_i(-)) / 2 - f_i ~ rho^2 h_i / 2.

A step uses the odd part. The even part says how far the two points are from where the model is linear. Their ratio
grows in proportion to rho, so one trial predicts the scale at which it is small enough.

Rounding, of variance n^2 in half the difference of two losses, adds 3 n^2 to the square of the even part: half of the
loss's at each sign, and that of the loss at W. So an even part that is small enough says that rounding is, too.
Otherwise one more pass measures it, at a scale so close that nothing else differs from the prediction by the two parts:

    noise_i = f_i(k rho) - (f_i + k odd_i + k^2 even_i),   k = 1.02,
    n^2 = mean noise_i^2 / (2 (1 + (1 - k^2)^2 + (k^2 + k^4) / 2)).

All sizes are root mean squares over rows and directions.

A reward has no slope to measure a scale by. Instead the loss per token of answers that the model
itself wrote is measured: at a member W + rho Z it rises by about c rho^2, the divergence of the member's text from the
model's. rho is where it rises by `RISE`: far enough to change the text, and not so far that it stops being text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tezo.directions.products import evaluating
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.closures import RowLosses
from tezo.optim.estimators.estimate import precise
from tezo.system.errors import NonFiniteLossError

SCALES = tuple(float(f"{digit}e-{power}") for power in range(1, 8) for digit in (3, 1))[1:]
"""1e-1, 3e-2, 1e-2, ..., 1e-7: results are among them, so that they do not hang on a few rows."""
MOST_CURVATURE = 0.1
"""Largest even part, as a part of the odd part."""
MOST_ROUNDING = 1 / 30
"""Largest rounding noise, as a part of the odd part."""
CLOSE = 1.02
FAR, STEP = 1.0, 0.1
"""Of a larger ratio nothing is predicted: the next trial is at this part of the scale."""
MOST_TRIALS = 4
"""Scales that are measured, at most."""
MEASURED = 2
"""After so many scales the next one is not measured: it is predicted."""
MOST_RISE = 0.2
"""Largest rise of the mean loss from W to either point, as a part of it, at a scale that is not sound."""

Progress = Callable[[int, int], None]
"""Called with the number of forward passes made, and the most that there will be."""


def untold(done: int, most: int) -> None:
    """A `Progress` that nobody follows."""
    del done, most


@dataclass(frozen=True)
class ScaleError:
    """How far the losses at a scale deviate from the assumptions of a step.

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
        kappa_sq: mean square over the directions of the projected gradient of the mean loss; for directions
            per row, the mean square of a row's over B rows, so that entries of a step's estimate are as large.
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
    """Returns the forward passes of `measure_scale`, at most; of one direction it is six, but for destroyed models."""
    return 1 + num_directions * (2 * MOST_TRIALS + 1)


def measure_scale(
    optimizer: BaseOptimizer,
    losses: Callable[[], Tensor | float],
    start: float,
    progress: Progress = untold,
    *,
    rounding: float | None = None,
) -> MeasuredScale:
    """Finds the largest of `SCALES` that obeys both bounds, from `start` down; the least bad one where none does.

    No step is taken. The first trial is at `start`, or below it as far as the model is destroyed. The
    second is the one that it predicts; where that does not obey both bounds either, the next prediction is taken.

    Args:
        optimizer: draws the directions, those of its next step.
        losses: of the rows at the weights as they are, (rows,) or a scalar, float32 or wider. With per-row
            directions: as in a step.
        start: first scale.
        progress: called after each pass or pair of passes.
        rounding: bound of the rounding error of a loss, as a part of it; None: not known. Where it is small enough no
            pass is made for rounding.

    Raises:
        NonFiniteLossError: a loss at W is NaN or infinite, or at every scale that was tried.
    """
    rows = _Rows(optimizer, losses, progress)
    tried = [rows.error(start)]
    while tried[-1].curvature > FAR and len(tried) < MOST_TRIALS and tried[-1].rho > SCALES[-1]:
        lower = [scale for scale in SCALES if scale < tried[-1].rho]
        tried.append(rows.error(min(lower, key=partial(_apart, STEP * tried[-1].rho))))
        if math.inf > tried[-1].curvature > tried[-2].curvature:
            break  # it is noise
    at = min(tried, key=lambda at: at.curvature)
    if at.rho not in rows.odd:
        raise NonFiniteLossError(0, math.inf, float(rows.losses.mean()))
    noise, taken_off = rows.noise(at.rho, rounding)
    tried = [rows.with_rounding(at, noise, taken_off) for at in tried]
    while (better := predicted_scale(tried)) is not None:
        if len(tried) >= MEASURED:
            tried.append(better)
            break
        tried.append(rows.with_rounding(rows.error(better.rho), noise, taken_off))
    chosen = min(tried, key=lambda at: at.badness)
    at = min((at for at in tried if at.rho in rows.odd), key=lambda at: _apart(at.rho, chosen.rho))
    second = float(2 * rows.even[at.rho].mean() / at.rho**2)
    kappas = rows.odd[at.rho] / at.rho
    if optimizer.per_example:
        kappa_sq = float(kappas.square().mean()) / kappas.shape[1]
    else:
        kappa_sq = float(kappas.mean(1).square().mean())
    return MeasuredScale(chosen, tuple(tried), float(rows.losses.mean()), kappa_sq, second, rows.passes)


class _Rows:
    """The losses of the rows of a measurement; the arguments are those of `measure_scale`.

    Attributes:
        losses: at W, (rows,).
        odd: scale -> the odd parts, (directions, rows), where the losses are finite.
        even: the even parts.
        passes: forward passes so far.
    """

    def __init__(self, optimizer: BaseOptimizer, losses: Callable[[], Tensor | float], progress: Progress) -> None:
        self._optimizer, self._losses, self._progress = optimizer, losses, progress
        self.passes = 0
        self.odd: dict[float, Tensor] = {}
        self.even: dict[float, Tensor] = {}
        with torch.no_grad(), evaluating(optimizer.model):
            self.losses = self._evaluate()
        self._count(1)
        if not bool(self.losses.isfinite().all()):
            raise NonFiniteLossError(0, float(self.losses.mean()), None)

    def error(self, rho: float) -> ScaleError:
        """Measures the odd and even parts at a scale."""
        try:
            plus, minus = self._points(rho)
        except NonFiniteLossError:
            return ScaleError(rho, math.inf)
        self.odd[rho], self.even[rho] = (plus - minus) / 2, (plus + minus) / 2 - self.losses
        mean = float(self.losses.mean())
        rise = float(torch.maximum(plus.mean(1), minus.mean(1)).max() - mean) / max(abs(mean), 1e-300)
        return ScaleError(rho, _rms(self.even[rho]) / max(_rms(self.odd[rho]), 1e-300), rise=rise)

    def noise(self, rho: float, bound: float | None) -> tuple[float, float]:
        """Returns (rounding noise of the odd part, or its bound; the amount to subtract from the even parts for it)."""
        bounds = [_rms(self.even[rho]) / math.sqrt(3)]
        if bound is not None:
            bounds.append(bound * float(self.losses.abs().max()))
        if min(bounds) <= MOST_ROUNDING * _rms(self.odd[rho]):
            return min(bounds), 0.0
        k = CLOSE
        found = self._ahead(k * rho) - (self.losses + k * self.odd[rho] + k**2 * self.even[rho])
        measured = _rms(found) / math.sqrt(2 * (1 + (1 - k**2) ** 2 + (k**2 + k**4) / 2))
        return measured, measured

    def with_rounding(self, at: ScaleError, noise: float, taken_off: float) -> ScaleError:
        """Returns the errors at a scale with those of rounding."""
        if at.rho not in self.odd:
            return at
        odd, even = max(_rms(self.odd[at.rho]), 1e-300), _rms(self.even[at.rho])
        return replace(at, rounding=noise / odd, curvature=math.sqrt(max(0.0, even**2 - 3 * taken_off**2)) / odd)

    def _points(self, rho: float) -> tuple[Tensor, Tensor]:
        """(directions, rows), twice: the losses of the rows at both signs of each direction."""
        optimizer, losses, mean = self._optimizer, list[Tensor](), self._mean
        try:
            probes = optimizer.measure(self._losses if optimizer.per_example else partial(mean, losses), rho)
        finally:
            self._count(2 * optimizer.num_directions)
        if optimizer.per_example:
            points = torch.tensor([(p.loss_plus, p.loss_minus) for p in probes], dtype=torch.float64)
            losses = list(points.view(-1, 2 * optimizer.num_directions).T)
        return torch.stack(losses[::2]), torch.stack(losses[1::2])

    def _ahead(self, rho: float) -> Tensor:
        """(directions, rows): the losses of the rows at the positive sign of each direction."""
        optimizer, losses, mean = self._optimizer, list[Tensor](), self._mean
        found = optimizer.ahead(self._losses if optimizer.per_example else partial(mean, losses), rho)
        self._count(optimizer.num_directions)
        if optimizer.per_example:
            return torch.tensor(found, dtype=torch.float64).view(-1, optimizer.num_directions).T
        return torch.stack(losses)

    def _mean(self, losses: list[Tensor]) -> Tensor:
        """Returns the mean loss; adds the losses of the rows to `losses`."""
        losses.append(self._evaluate())
        return losses[-1].mean()

    def _evaluate(self) -> Tensor:
        if self._optimizer.per_example and isinstance(self._losses, RowLosses):
            found: Tensor | float = self._losses.example_losses(1)
        else:
            found = self._losses()
        values: Tensor = precise(torch.as_tensor(found))
        return values.detach().double().cpu().flatten()

    def _count(self, passes: int) -> None:
        self.passes += passes
        self._progress(self.passes, most_passes(self._optimizer.num_directions))


def predicted_scale(tried: Sequence[ScaleError]) -> ScaleError | None:
    """Returns the best of `SCALES` by the measurements so far, with the errors predicted for it.

    In proportion to the scale curvature grows, as far as the model is not destroyed, and the part of rounding falls.
    Where no scale obeys both bounds, the best one exceeds them alike. None: it was tried, or the best of those that
    were tried obeys both.
    """
    best = min(tried, key=lambda at: at.badness)
    if best.excess <= 1:
        return None
    clear = [at for at in tried if at.rounding <= at.curvature < math.inf]  # others lose curvature in rounding
    nearest = min(clear, key=lambda at: at.rho, default=best)
    highest = nearest.rho * MOST_CURVATURE / max(nearest.curvature, 1e-12)
    least = max(best.rho * best.rounding / MOST_ROUNDING, 1e-300)
    destroyed = min((at.rho for at in tried if at.curvature > FAR and at.rho > best.rho), default=math.inf)
    scales = [scale for scale in SCALES if scale < destroyed]
    if least > highest:
        rho = min(scales, key=partial(_apart, math.sqrt(least * highest)))
    else:
        rho = max((scale for scale in scales if scale <= min(best.rho, highest)), default=scales[-1])
        if rho < least:
            rho = min((scale for scale in scales if scale >= 0.99 * least), default=scales[0])
    if rho in {at.rho for at in tried}:
        return None
    return ScaleError(rho, MOST_CURVATURE * rho / highest, MOST_ROUNDING * least / rho, best.rise * rho / best.rho)


def _apart(one: float, other: float) -> float:
    return abs(math.log(one / other))


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def in_words(found: MeasuredScale, dtype: str) -> str:
    """Returns a sentence for the user on a measured scale.

    Args:
        found: the scale.
        dtype: that the model computes in, as `model.dtype` of a recipe has it.
    """
    at = found.chosen
    measured = f"curvature is {at.curvature:.1%} of the change of the losses there, rounding at most {at.rounding:.1%}"
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


RISE = 0.1
"""Rise of the loss of the model's answers at a member, in nats a token. In first trials with a model of 135M
parameters members at a rise of 0.05 learnt to write JSON in a form, and those at 0.5 wrote hardly any JSON."""
REACHES = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
NEAR_RISE = 4.0
"""A rise of at most this many times `RISE` is near enough to follow rho^2 down to it."""
MEMBERS = 4
"""Members that the rise is averaged over, at most."""


@torch.no_grad()
def measure_reach(optimizer: BaseOptimizer, loss: Callable[[], float]) -> tuple[float, float]:
    """Returns (rho, the rise that was measured nearest to it), along directions of the next step.

    Args:
        optimizer: whose directions are used; its rho stays as it is.
        loss: mean loss per token of the model's answers, at the parameters of the time of the call.
    """
    count = min(MEMBERS, optimizer.num_directions)
    rise = math.inf
    with evaluating(optimizer.model):
        unperturbed = loss()
    for rho in REACHES:
        rise = sum(optimizer.ahead(loss, rho, count)) / count - unperturbed
        if math.isfinite(rise) and rise <= NEAR_RISE * RISE:
            break
    longer = math.sqrt(RISE / rise) if 0 < rise < math.inf else 3.0
    return float(f"{rho * min(3.0, longer):.1e}"), rise


def passes_of_reach() -> int:
    """Returns the forward passes that it takes, at most."""
    return 1 + MEMBERS * len(REACHES)
