"""Choosing a learning rate by short trials from the start of a run, on the loss itself.

First the rate grows by `GROWTH` from step to step on one batch, from a rate that is surely too low,

    lr_0 = 1e-5 f D / kappa^2   (a plain step lowers the loss f by about lr kappa^2; D is `Update.divisor`),

until a step raises the loss of that batch by 5 %. On the same rows a step along their own estimate lowers the loss, in
proportion to the rate, until curvature prevails. The growth therefore also ends after `FLAT` steps in a row that lower
it by less than an earlier one did: a loss over few labels is bounded, and need not rise however high the rate is. The
last rate before the rise, or else the one with the lowest loss, bounds the search from above. From there trials of the
run's own first steps go down by factors of 2: each starts at the same parameters, takes the same batches and
directions, and is judged by the loss on held-out rows. A trial fails as soon as that loss is above the start's by twice
the standard error of the rows' differences. The search ends when a trial is worse than the one before.

A few steps favour higher rates than a run, whose signal decreases while its noise does not: the result is `CAUTION`
times the best rate of the trials.
If `ENOUGH` trials neither failed nor lowered the loss, they are too short to tell rates apart: the result is then
`CAUTION`^2 times the highest of their rates.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from tezo.errors import NonFiniteLossError, NonFiniteModelError
from tezo.estimators.estimate import Closure
from tezo.forward.evaluation_mode import evaluation_mode
from tezo.numerics.emulation import float32_on_emulating_cpu
from tezo.optim.tuner import Tuner

T = TypeVar("T")

FIRST_DECREASE = 1e-5
"""Relative decrease of the loss by the first step of the growing rate."""
GROWTH, MOST_GROWTH = 4.0, 20
"""Factor of the growing rate, and its number of steps at most."""
RISE = 0.05
"""Relative rise of the loss that ends the growth."""
FLAT = 4
"""Steps in a row that end it if each lowers the loss by less than an earlier one."""
TRIAL_STEPS = 16
"""Steps of a trial: fewer favour higher rates."""
MOST_TRIALS = 12
MOST_PASSES = 200
"""Forward passes, for each direction of a step, after which no further trial is begun."""
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
    optimizer: Tuner,
    batch: Callable[[int], Closure],
    held_out: Callable[[], Sequence[float]],
    held_out_passes: int,
    steps: int,
) -> ChosenRate:
    """Chooses a learning rate; the optimizer is then as before its first step, with this rate.

    Args:
        optimizer: a zeroth-order optimizer that has taken no step.
        batch: step -> the objective on the rows of that step of the run.
        held_out: the losses of rows that the trials' steps do not see; their mean is the objective.
        held_out_passes: its cost in forward passes of a batch.
        steps: of the run; a short one has shorter trials.

    Raises:
        NonFiniteModelError: the loss is NaN or infinite before the first step.
    """
    default = float(optimizer.param_groups[0]["lr"])
    search = _Search(optimizer, batch, held_out, held_out_passes, max(2, min(TRIAL_STEPS, steps // 5)))
    trials = search.run()
    lr, how = _choice(trials, default)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return ChosenRate(lr, trials, search.passes, _notice(lr, how, trials, search.passes))


def _choice(trials: tuple[Trial, ...], default: float) -> tuple[float, str]:
    """(learning rate, how it was chosen in words; "" by the best trial)."""
    if not trials:
        return default, "the method's default, because the loss does not change along its directions"
    best = min(trials, key=lambda trial: trial.change)
    sound = [trial.lr for trial in trials if not trial.failed]
    if best.change < 0:
        lr, how = CAUTION * best.lr, ""
    elif sound:
        lr, how = (
            CAUTION**2 * max(sound),
            "no trial lowered the loss, so it is below the highest that did not fail",
        )
    else:
        lr, how = CAUTION * trials[-1].lr, "all trials failed, so it is below the lowest"
    return float(f"{lr:.1e}"), how


def _notice(lr: float, how: str, trials: tuple[Trial, ...], passes: int) -> str:
    if not trials:
        return f"method.lr: {lr:.1e}, {how}."
    tried = ", ".join(f"{trial.lr:.1e}: {trial.change:+.3f}" for trial in trials)
    return (
        f"method.lr: {lr:.1e} was chosen by {len(trials)} trials ({passes} forward passes) of at most "
        f"{max(trial.steps for trial in trials)} steps; change of the held-out loss by rate: {tried}"
        + (f"; {how}." if how else ".")
    )


@dataclass
class _Search:
    """The trials of one call of `choose_lr`, whose arguments it has."""

    optimizer: Tuner
    batch: Callable[[int], Closure]
    held_out: Callable[[], Sequence[float]]
    held_out_passes: int
    trial_steps: int
    passes: int = 0
    start: dict[str, Tensor] = field(default_factory=dict)

    def run(self) -> tuple[Trial, ...]:
        probes = self.optimizer.measure(self.batch(0))
        self.passes += 2 * len(probes)
        self.start = self.optimizer.tuned_state()  # after the first draw: it has a basis that is computed from data
        kappa_sq = sum(probe.projected_grad**2 for probe in probes) / len(probes)
        loss = sum(probe.loss_plus + probe.loss_minus for probe in probes) / (2 * len(probes))
        if kappa_sq == 0 or loss == 0:
            return ()
        first = FIRST_DECREASE * abs(loss) * self.optimizer.step_divisor(kappa_sq) / kappa_sq
        lr = self._bound(first)
        start = self._held_out()
        if not all(map(math.isfinite, start)):
            dtype = next(p.dtype for p in self.optimizer.model.parameters() if p.is_floating_point())
            raise NonFiniteModelError("the loss of the untuned model", statistics.fmean(start), dtype)
        trials: list[Trial] = []
        while len(trials) < MOST_TRIALS and not self._is_found(trials):
            trials.append(self._trial(lr, start))
            lr /= 2
        return tuple(trials)

    def _is_found(self, trials: Sequence[Trial]) -> bool:
        sound = [trial for trial in trials if not trial.failed]
        if any(trial.change < 0 for trial in sound):
            spent = self.passes >= MOST_PASSES * self.optimizer.num_directions
            return spent or (len(trials) > 1 and trials[-2].change < min(0.0, trials[-1].change))
        return len(sound) == ENOUGH

    def _bound(self, lr: float) -> float:
        """The last of the growing rates before the loss rose; if it never did, the one with the lowest loss."""
        fixed = self.batch(0)
        start = lowest = self._loss(fixed)
        largest_fall, flat, best = 0.0, 0, lr
        for _ in range(MOST_GROWTH):
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
        self._restart()
        return best

    def _left_out(self) -> bool:
        """Whether the last step was refused by its method, because it would have raised the loss."""
        record = self.optimizer.last_step
        probes = record.probes if record is not None else ()
        return any(probe.projected_grad == 0 and probe.loss_plus != probe.loss_minus for probe in probes)

    def _trial(self, lr: float, start: Sequence[float]) -> Trial:
        change, taken, failed = 0.0, 0, False
        for stop in sorted({max(1, self.trial_steps // 4), max(1, self.trial_steps // 2), self.trial_steps}):
            if not all(self._step(self.batch(step), lr) for step in range(taken, stop)):
                change, failed = math.inf, True
                break
            taken = stop
            changes = [after - before for after, before in zip(self._held_out(), start, strict=True)]
            change = statistics.fmean(changes) if all(map(math.isfinite, changes)) else math.inf
            failed = change > 2 * standard_error(changes)
            if failed:
                break
        self._restart()
        return Trial(lr, taken, change, failed)

    def _step(self, closure: Closure, lr: float) -> bool:
        """Takes a step; whether its losses were finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        try:
            self.optimizer.take_step(closure, self.optimizer.kinds[0])
        except NonFiniteLossError:
            return False
        record = self.optimizer.last_step
        self.passes += record.forward_passes if record is not None else 0
        return True

    def _loss(self, closure: Closure) -> float:
        return float(self._evaluated(closure, 1))

    def _held_out(self) -> Sequence[float]:
        return self._evaluated(self.held_out, self.held_out_passes)

    def _evaluated(self, losses: Callable[[], T], passes: int) -> T:
        """Losses at the parameters between two steps."""
        self.passes += passes
        model = self.optimizer.model
        with torch.no_grad(), evaluation_mode(model), float32_on_emulating_cpu(model):
            return losses()

    def _restart(self) -> None:
        self.optimizer.load_resumable_state(self.start, [])


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value, or where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))
