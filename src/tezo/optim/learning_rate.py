"""Choosing a learning rate by short trials from the start of a run, on the loss itself, within a number of passes.

First the rate grows by `GROWTH` from step to step on one batch, from a rate that is too low,

    lr_0 = 1e-5 f D / kappa^2   (a plain step lowers the loss f by about lr kappa^2; D is `Update.divisor`), or, where
    passes are few and the curvature c = Z^T H Z along the directions of the run is positive, lr_0 = D / (16 c),

until a step raises the loss of that batch by 5 %. On the same rows a step along their estimate lowers the loss, in
proportion to the rate, until curvature prevails. The growth therefore also ends after `FLAT` steps in a row that lower
it by less than an earlier one did: a loss over few labels is bounded, and need not rise however high the rate is. The
last rate before the rise, or else the one with the lowest loss, bounds the search from above. From there trials of the
first steps of the run go down, by factors of `FINE` or, where passes are few, `COARSE`: each starts at the same
parameters, takes the same batches and directions, and is judged by the loss on held-out rows. A trial fails as soon as
that loss is above the start's by twice the standard error of the rows' differences. The search ends when a trial is
worse than the one before, or where the next would take more passes than are left.

A few steps favour higher rates than a run, whose signal decreases while its noise does not: the result is `CAUTION`
times the best rate of the trials.
If `ENOUGH` trials neither failed nor lowered the loss, they are too short to compare rates: the result is then
`CAUTION`^2 times the highest of their rates. It is `CAUTION`^2 times the bound where there are passes for no trial, and
`CAUTION`^2 D / c where there are none for the bound either.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tezo.directions.products import evaluating
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.closures import Closure
from tezo.optim.measured_scale import MeasuredScale, Progress, untold
from tezo.system.errors import NonFiniteLossError, NonFiniteModelError

T = TypeVar("T")

FIRST_DECREASE = 1e-5
"""Relative decrease of the loss by the first step of the growing rate."""
GROWTH, MOST_GROWTH = 4.0, 20
"""Factor of the growing rate, and its number of steps at most."""
RISE = 0.05
"""Relative rise of the loss that ends the growth."""
FLAT = 4
"""Steps in a row that end it if each lowers the loss by less than an earlier one."""
TRIAL_STEPS, FEWEST_STEPS = 16, 4
"""Steps of a trial, at most and at least: fewer favour higher rates."""
TRIALS = 3
"""Trials that the passes should be enough for, by fewer steps in each."""
MOST_TRIALS = 12
MOST_PASSES = 200
"""Forward passes, for each direction of a step, of a search that nothing else bounds."""
FINE, COARSE = 2.0, 4.0
"""Factor from a rate to the next one that is tried, where passes are enough for full trials, and where they are not."""
GROWTH_SHARE = 0.4
"""Passes of the growing rate, as a part of all, at most."""
CAUTION = 0.5
ENOUGH = 3


@dataclass(frozen=True)
class Trial:
    """A trial of a learning rate.

    Attributes:
        lr: the rate.
        steps: number of steps until it ended.
        change: of the loss on the held-out rows.
        failed: whether the loss had risen.
    """

    lr: float
    steps: int
    change: float
    failed: bool


@dataclass(frozen=True)
class ChosenRate:
    """A learning rate, and how it was found.

    Attributes:
        lr: the rate, rounded to two digits, so that it does not depend on rounding on different machines.
        trials: in their order; none if no direction changes the loss.
        num_forward_passes: number of forward passes of a batch.
        notice: message for the user.
    """

    lr: float
    trials: tuple[Trial, ...]
    num_forward_passes: int
    notice: str


def choose_lr(
    optimizer: BaseOptimizer,
    batch: Callable[[int], Closure],
    held_out: Callable[[], Sequence[float]],
    held_out_passes: int,
    steps: int,
    budget: int | None = None,
    measured: MeasuredScale | None = None,
    progress: Progress = untold,
) -> ChosenRate:
    """Chooses a learning rate; the optimizer is then as before its first step, with this rate.

    Args:
        optimizer: has taken no step.
        batch: step -> the objective on the rows of that step of the run.
        held_out: the losses of rows that the trials' steps do not see; their mean is the objective.
        held_out_passes: its cost in forward passes of a batch.
        steps: of the run; a short one has shorter trials.
        budget: forward passes that the search may take; None: `MOST_PASSES` for each direction.
        measured: result of the measurement of rho along these directions; None: it is measured here.
        progress: called with the passes made, and `budget`.

    Raises:
        NonFiniteModelError: the loss is NaN or infinite before the first step.
    """
    default = float(optimizer.param_groups[0]["lr"])
    most = MOST_PASSES * optimizer.num_directions if budget is None else budget
    search = _Search(optimizer, batch, held_out, held_out_passes, max(2, min(TRIAL_STEPS, steps // 5)), most, progress)
    known, optimizer.unperturbed_loss = (
        optimizer.unperturbed_loss,
        math.inf,
    )  # a rate that destroys the model is no surprise here
    try:
        bound, trials = search.run(measured)
    except BaseException:
        search.back()
        for group in optimizer.param_groups:
            group["lr"] = default
        raise
    finally:
        optimizer.unperturbed_loss = known
    lr, how = _choice(bound, trials, default)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if not trials:
        return ChosenRate(lr, trials, search.passes, f"method.lr: {lr:.1e}, {how}.")
    tried = ", ".join(f"{trial.lr:.1e}: {trial.change:+.3f}" for trial in trials)
    notice = (
        f"method.lr: {lr:.1e} was chosen by {len(trials)} trials ({search.passes} forward passes) of at most "
        f"{max(trial.steps for trial in trials)} steps; change of the held-out loss by rate: {tried}"
        + (f"; {how}." if how else ".")
    )
    return ChosenRate(lr, trials, search.passes, notice)


def _choice(bound: float | None, trials: tuple[Trial, ...], default: float) -> tuple[float, str]:
    """Returns (learning rate, how it was chosen in words; "" by the best trial)."""
    if bound is None:
        return default, "the method's default, because the loss does not change along its directions"
    if bound <= 0:
        return default, "the method's default, because the run has too few steps to try rates"
    best = min(trials, key=lambda trial: trial.change, default=None)
    sound = [trial.lr for trial in trials if not trial.failed]
    if best is None:
        lr, how = CAUTION**2 * bound, "by curvature, because the run has too few steps to try rates"
    elif best.change < 0:
        lr, how = CAUTION * best.lr, ""
    elif sound:
        lr, how = CAUTION**2 * max(sound), "no trial lowered the loss, so it is below the highest that did not fail"
    else:
        lr, how = CAUTION * trials[-1].lr, "all trials failed, so it is below the lowest"
    return float(f"{lr:.1e}"), how


@dataclass
class _Search:
    """The trials of one call of `choose_lr`, whose arguments it has.

    Attributes:
        longest: steps of a trial, at most.
        passes: forward passes so far.
        start: the parameters that trials start from; None before the first.
    """

    optimizer: BaseOptimizer
    batch: Callable[[int], Closure]
    held_out: Callable[[], Sequence[float]]
    held_out_passes: int
    longest: int
    budget: int
    progress: Progress
    passes: int = 0
    start: Mapping[str, Tensor] | None = None

    def run(self, measured: MeasuredScale | None) -> tuple[float | None, tuple[Trial, ...]]:
        """Returns (rate that bounds the search from above, its trials).

        The rate is None where the loss does not change along the directions, and 0 where nothing is known of it.
        """
        directions = self.optimizer.num_directions
        if measured is not None:
            loss, kappa_sq, curvature = measured.loss, measured.kappa_sq, measured.second_derivative
        elif 2 * directions + 1 > self.budget:
            return 0.0, ()
        else:
            loss, kappa_sq, curvature = self._slope()
        self.start = self.optimizer.tuned_state()  # after the first draw: it has a basis that is computed from data
        if kappa_sq == 0 or loss == 0:
            return None, ()
        divisor = self.optimizer.rate_divisor(kappa_sq)
        by_curvature = divisor / curvature if curvature > 0 else 0.0
        first = FIRST_DECREASE * abs(loss) * divisor / kappa_sq
        if self.budget < MOST_PASSES * directions:  # not enough to grow from far below
            first = max(first, by_curvature / GROWTH**2)
        bound = self._bound(first) if self._cost(2) + 3 <= GROWTH_SHARE * self.budget else by_curvature
        steps = self._trial_steps()
        if bound <= 0 or steps == 0:
            return bound, ()
        start = self._evaluate(self.held_out, self.held_out_passes)
        if not all(map(math.isfinite, start)):
            dtype = next(p.dtype for p in self.optimizer.model.parameters() if p.is_floating_point())
            raise NonFiniteModelError("the loss of the untuned model", statistics.fmean(start), dtype)
        trials: list[Trial] = []
        factor = FINE if steps == self.longest else COARSE
        while len(trials) < MOST_TRIALS and not _ends(trials) and self._trial_cost(steps) <= self.budget - self.passes:
            trials.append(self._trial(bound / factor ** len(trials), start, steps))
        return bound, tuple(trials)

    def back(self) -> None:
        """Puts the parameters back that trials start from, if one has begun."""
        if self.start is not None:
            self.optimizer.load_resumable_state(self.start, [])

    def _slope(self) -> tuple[float, float, float]:
        """Returns (loss, mean square of the projected gradients, curvature), along the first step's directions."""
        loss = self._loss(self.batch(0))
        probes, directions = self.optimizer.measure(self.batch(0)), self.optimizer.num_directions
        self._count(2 * directions)
        kappa_sq = sum(probe.projected_grad**2 for probe in probes) / len(probes)
        kappa_sq /= len(probes) / directions  # rows with separate directions; see `MeasuredScale`
        means = [(probe.loss_plus + probe.loss_minus) / 2 for probe in probes]
        rho = self.optimizer.rho
        return loss, kappa_sq, 2 * (sum(means) / len(means) - loss) / rho**2 if rho else 0.0

    def _bound(self, lr: float) -> float:
        """Returns the last growing rate before the loss rose; if it never did, the one with the lowest loss."""
        fixed = self.batch(0)
        start = lowest = self._loss(fixed)
        largest_fall, flat, best = 0.0, 0, lr
        for grown in range(MOST_GROWTH):
            if grown and self.passes + self._cost(1) + 1 > GROWTH_SHARE * self.budget:
                break
            self._step(fixed, lr)
            loss = self._loss(fixed)
            if not loss <= lowest + RISE * abs(start) or self._left_out():
                best = lr / GROWTH
                break
            fall = lowest - loss
            flat = 0 if fall > 0 and fall >= largest_fall else flat + 1
            if flat == FLAT:
                best = best if lowest < start else lr / GROWTH
                break
            if fall > 0:
                lowest, best = loss, lr
            largest_fall = max(largest_fall, fall)
            lr *= GROWTH
        self.back()
        return best

    def _left_out(self) -> bool:
        """Whether the last step was refused by its method, because it would have raised the loss."""
        record = self.optimizer.last_step
        probes = record.probes if record is not None else ()
        return any(probe.projected_grad == 0 and probe.loss_plus != probe.loss_minus for probe in probes)

    def _cost(self, steps: int) -> int:
        """Returns the forward passes of so many first steps."""
        first, other = (self.optimizer.passes_of(self.optimizer.rules[0], first=first) for first in (True, False))
        return first + other * (steps - 1)

    def _trial_cost(self, steps: int) -> int:
        return self._cost(steps) + len(_stops(steps)) * self.held_out_passes

    def _trial_steps(self) -> int:
        """Returns the steps of each trial, so that there are passes for `TRIALS`; 0 if there are not for one."""
        left, fewest = self.budget - self.passes - self.held_out_passes, min(FEWEST_STEPS, self.longest)
        for steps in range(self.longest, fewest - 1, -1):
            if TRIALS * self._trial_cost(steps) <= left:
                return steps
        return fewest if self._trial_cost(fewest) <= left else 0

    def _trial(self, lr: float, start: Sequence[float], steps: int) -> Trial:
        change, taken, failed = 0.0, 0, False
        for stop in _stops(steps):
            if not all(self._step(self.batch(step), lr) for step in range(taken, stop)):
                change, failed = math.inf, True
                break
            taken, now = stop, self._evaluate(self.held_out, self.held_out_passes)
            changes = [after - before for after, before in zip(now, start, strict=True)]
            finite = all(map(math.isfinite, changes))
            change = _beyond_rounding(statistics.fmean(changes), [*start, *now]) if finite else math.inf
            error = statistics.stdev(changes) / math.sqrt(len(changes)) if finite and len(changes) > 1 else 0.0
            failed = change > 2 * error
            if failed:
                break
        self.back()
        return Trial(lr, taken, change, failed)

    def _step(self, closure: Closure, lr: float) -> bool:
        """Takes a step; whether its losses were finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        before = self.optimizer.num_forward_passes
        try:
            self.optimizer.step(closure)
        except NonFiniteLossError:
            return False
        self._count(self.optimizer.num_forward_passes - before)
        return True

    def _loss(self, closure: Closure) -> float:
        losses = torch.as_tensor(self._evaluate(closure, 1))  # of each row, where rows have directions
        return float(losses.double().mean())

    def _evaluate(self, losses: Callable[[], T], passes: int) -> T:
        """Returns losses at the parameters between two steps."""
        self._count(passes)
        model = self.optimizer.model
        with torch.no_grad(), evaluating(model):
            return losses()

    def _count(self, passes: int) -> None:
        self.passes += passes
        self.progress(self.passes, self.budget)


def _stops(steps: int) -> list[int]:
    """Returns after which numbers of steps a trial is judged."""
    if steps <= 2 * FEWEST_STEPS:
        return sorted({(steps + 1) // 2, steps})
    return [steps // 4, steps // 2, steps]


def _beyond_rounding(change: float, losses: Sequence[float]) -> float:
    """Returns a mean change of losses; 0.0 where it is no larger than the rounding of these losses."""
    rounding = sys.float_info.epsilon * statistics.fmean(map(abs, losses))
    return change if abs(change) > rounding else 0.0


def _ends(trials: Sequence[Trial]) -> bool:
    """Whether the last trial was worse than the one before, or enough of them did not lower the loss."""
    sound = [trial for trial in trials if not trial.failed]
    if any(trial.change < 0 for trial in sound):
        return len(trials) > 1 and trials[-2].change < min(0.0, trials[-1].change)
    return len(sound) == ENOUGH
