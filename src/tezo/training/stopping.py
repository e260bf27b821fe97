"""When a run goes on, goes back to its best state, or ends.

`History` takes in the events of a run, and `decide(history)` is a function of these alone: it returns `CONTINUE`, a
`Rollback` or a `Stop`. `BestState` applies decisions: it keeps the parameters of the best state, and goes back to them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from torch import Tensor

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.folder import LOG, ResumeState, RunFolder
from tezo.runs.step_log import NewTotal, Rollback
from tezo.system.errors import RunError
from tezo.system.processes import ProcessGroup
from tezo.system.progress import BETWEEN, current
from tezo.tasks.evaluation import Metrics
from tezo.training.evaluations import Evaluations
from tezo.training.job import Job
from tezo.training.listeners import Listener
from tezo.training.rows_of_steps import evaluates, interval, judged_feedback
from tezo.training.settings import TrainConfig

FALSE_ALARM_RATE = 0.01
"""Largest probability of an alarm in a whole run whose loss does not rise and has normal noise."""
SHORTEST_WINDOW = 8
"""Steps of the shortest window: means of fewer losses are too far from normal where a batch has few rows."""
FEWEST_DIFFERENCES = 15
"""Differences that the noise is estimated from, at least: those of the first two windows."""


@dataclass
class _Window:
    """The window of `size` losses that is being filled, and the lowest mean of those before it."""

    size: int
    sum: float = 0.0
    count: int = 0
    lowest: float = math.inf


class Guard:
    """The test of one run.

    Let x_1, x_2, ... be the losses of the steps. Under the hypothesis that the run is sound they are a mean that does
    not rise plus independent noise of variance sigma^2, because batches differ. sigma^2 is estimated from differences
    of successive losses, which a slow change of the mean hardly enlarges:

        s^2 = mean of (x_{t+1} - x_t)^2 / 2.

    For windows of n = 8, 16, 32, ... steps, at every multiple of n, the mean of the last n losses is compared with the
    lowest mean of n losses of an earlier window (since the last return, where dev rows chose its state),

        z = (mean of the last n - lowest mean of n) / (s sqrt(2 / n)).

    Each comparison with one earlier window exceeds its quantile with probability at most `FALSE_ALARM_RATE` / C if the
    hypothesis is true and the noise normal, where C is the number of pairs of windows of a whole run. Hence a whole run
    raises a false alarm with probability at most `FALSE_ALARM_RATE`. The quantile is Student's, for s is estimated;
    successive differences are worth 2/3 of their number in degrees of freedom.
    """

    def __init__(self, steps: int) -> None:
        self._windows: list[_Window] = []
        size = SHORTEST_WINDOW
        while 2 * size <= steps:
            self._windows.append(_Window(size))
            size *= 2
        pairs = sum(math.comb(steps // window.size, 2) for window in self._windows)
        self._alpha = FALSE_ALARM_RATE / max(1, pairs)
        self._last: float | None = None
        self._squares, self._differences = 0.0, 0

    def add(self, loss: float) -> bool:
        """Takes in the loss of the next step; returns whether the losses have risen."""
        if self._last is not None:
            self._squares += (loss - self._last) ** 2 / 2
            self._differences += 1
        self._last = loss
        risen = False
        for window in self._windows:
            window.sum += loss
            window.count += 1
            if window.count == window.size:
                mean = window.sum / window.size
                risen |= self._is_large((mean - window.lowest) * math.sqrt(window.size / 2))
                window.sum, window.count, window.lowest = 0.0, 0, min(window.lowest, mean)
        return risen

    def is_above(self, rise: float, ratio: float) -> bool:
        """Returns whether a rise of the loss on other rows is larger than the noise allows.

        Args:
            rise: a loss on these rows minus an earlier one. On the same rows it varies less than the test assumes.
            ratio: rows of a step over rows of either loss.
        """
        return self._is_large(rise / math.sqrt(2 * ratio))

    def restart(self, *, keep_lowest: bool) -> None:
        """Goes on after a return to an earlier state.

        The noise is estimated anew: a rise may have begun in the first steps, and would have been taken for noise.

        Args:
            keep_lowest: whether the lowest means count from now on. They should not if other rows chose the state: a
                state that has learnt the training rows by heart has lower losses on them than a better one.
        """
        self._last = None
        self._squares, self._differences = 0.0, 0
        self._windows = [_Window(w.size, lowest=w.lowest if keep_lowest else math.inf) for w in self._windows]

    def _is_large(self, rise: float) -> bool:
        """Returns whether a difference of two means, scaled to the variance of one loss, is above its quantile."""
        if self._differences < FEWEST_DIFFERENCES:
            return False
        noise = math.sqrt(self._squares / self._differences)
        return rise > noise * student_quantile(1 - self._alpha, 2 / 3 * self._differences)


def student_quantile(p: float, freedom: float) -> float:
    """Returns the quantile of Student's distribution, by its expansion about the normal one.

    The next term of the expansion is below 1 % of the quantile for p <= 1 - 1e-7 and freedom >= 10.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))


LOWERED = 1 / 3
"""Factor of the learning rate at a rollback. Not searched."""
PATIENCE = 3
"""Evaluations in a row without a lower dev loss, over `PATIENT_SHARE` of the steps and `PATIENT_STEPS` at least."""
PATIENT_SHARE, PATIENT_STEPS = 0.3, 24
IDLE_GAIN = 0.01
"""Part by which the dev loss must have fallen since its last such fall, or the evaluation is in vain. Our choice."""
MOST_ROLLBACKS = 8
"""Rollbacks of a run. After as many the rate is below a thousandth of the first, and the run ends."""

STEPS_ROSE, DEV_ROSE, STAGNATED, NOT_FINITE = "steps rose", "dev rose", "stagnated", "not finite"
FEEDBACK_ROSE, IDLE = "feedback rose", "idle"
REASONS = {
    STEPS_ROSE: "the losses of the steps have risen",
    DEV_ROSE: "the dev loss has risen",
    STAGNATED: "the dev loss was no lower for long",
    NOT_FINITE: "the loss was not finite",
    FEEDBACK_ROSE: "the feedback steps raised the dev loss",
}
"""Reason for a rollback, as in the step log -> in words."""
ENDED = {reason: f"{words}, at a lower rate too" for reason, words in REASONS.items()} | {
    IDLE: "the last ones hardly lowered the loss of rows that they were not fitted to"
}
"""Reason for the end of a run -> in words."""


def in_words(rollback: Rollback) -> str:
    """Returns a sentence on a rollback, without its end."""
    reason = REASONS.get(rollback.reason, rollback.reason)
    share = "" if rollback.lr_scale == 1 else f"{rollback.lr_scale:.3g} of "
    return f"{reason}: back to step {rollback.to}, with {share}the first learning rate"


@dataclass(frozen=True)
class Continue:
    """The decision that the next step follows."""


@dataclass(frozen=True)
class Stop:
    """The decision that a run ends, for a `reason` of `ENDED`."""

    reason: str


CONTINUE = Continue()
Decision = Continue | Rollback | Stop


class History:
    """The events of one run that decisions depend on, and no tensor.

    Args:
        settings: of the run.
        dev_rows: number of dev rows; 0: there are none.
        idle_steps: idle steps in a row that end a run, see `BaseOptimizer.idle_steps`; None: none do.
        totals: the numbers of steps that the user gave the run after its start.
        scorers: numbers of steps after which the run went on with a scorer that gives other scores.

    Attributes:
        best: (number of steps, loss) with the lowest loss so far; None before the first evaluation.
        dev_loss: loss on the dev rows after the newest step; None if they were not evaluated then.
        rise: by how much that is above the loss of the best state before, on the rows whose losses are known for both;
            NaN: there are none.
        rollbacks: the returns so far.
    """

    def __init__(
        self,
        settings: TrainConfig,
        dev_rows: int,
        idle_steps: int | None = None,
        totals: Sequence[NewTotal] = (),
        scorers: Collection[int] = (),
    ) -> None:
        self.settings = settings
        self.dev_rows = dev_rows
        self.idle_steps = idle_steps
        self.totals = totals
        self.scorers = scorers
        self.every = interval(settings.eval_every, settings) if dev_rows else 0
        self.steps = 0
        self.best: tuple[int, float] | None = None
        self.dev_loss: float | None = None
        self.rise = math.nan
        self.rollbacks: list[Rollback] = []
        self.guard = Guard(settings.num_steps)
        self.have_risen = False
        self.idle = 0
        self.gain: tuple[int, float] | None = None  # the step of the last fall by `IDLE_GAIN`, and the loss there
        self.losses: list[float] = []  # of steps since the last mean, where there are no dev rows

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate."""
        return self.rollbacks[-1].lr_scale if self.rollbacks else 1.0

    @property
    def patient_from(self) -> int:
        """After how many steps the user asked a run that had ended to go on: it has its patience from there."""
        return max((total.step for total in self.totals if total.ended), default=0)

    def settings_at(self, steps: int) -> TrainConfig:
        """Returns the settings that held when the run took so many steps: their number may have changed since."""
        later = next((total for total in self.totals if steps <= total.step), None)
        return self.settings if later is None else replace(self.settings, steps=later.before)

    def add_step(self, record: StepRecord) -> None:
        """Takes in a step."""
        self.steps = record.step + 1
        self.dev_loss = None
        if self.settings.guard:
            if record.step in self.scorers:  # losses by two scorers are not compared
                self.guard.restart(keep_lowest=False)
            self.have_risen = self.guard.add(record.loss)
            self.idle = self.idle + 1 if record.is_idle else 0
            self.losses.append(record.loss)

    def mean_of_steps(self) -> float | None:
        """Returns the mean loss of the steps since the last call, where it takes the place of a dev loss now."""
        due = self.settings.guard and not self.every
        if not due or self.steps % interval(None, self.settings_at(self.steps)) != 0:
            return None
        losses, self.losses = self.losses, []
        return sum(losses) / len(losses) if losses else math.inf

    def add_loss(self, loss: float, rise: float | None = None) -> bool:
        """Takes in a loss of the present state; returns whether it is the lowest so far.

        Args:
            loss: of all rows whose losses are known.
            rise: see `History.rise`; None: the same rows are known for all states.
        """
        if math.isfinite(loss) and (self.gain is None or loss < (1 - IDLE_GAIN) * self.gain[1]):
            self.gain = self.steps, loss
        if self.best is not None:
            self.rise = loss - self.best[1] if rise is None else rise
            if not self.rise < 0:
                return False
        self.best = self.steps, loss
        return True

    def add_rollback(self, rollback: Rollback) -> None:
        """Takes in a return to the best state."""
        self.rollbacks.append(rollback)
        self.guard.restart(keep_lowest=not (self.every and self.settings.chooses_by_dev_rows))
        self.have_risen = False
        self.losses = []


def decide(history: History) -> Decision:
    """Returns how a run goes on after its newest step and the evaluation there."""
    if not history.settings.guard:
        return CONTINUE
    reason = IDLE if _is_idle(history) else _reason(history)
    if reason is None:
        return CONTINUE
    decision = Stop(IDLE) if reason == IDLE else _rollback(history, reason)
    asked_to_go_on = any(history.steps == total.step for total in history.totals)
    return CONTINUE if isinstance(decision, Stop) and asked_to_go_on else decision


def decide_after_failure(history: History) -> Decision:
    """Returns how a run goes on whose next step has a loss that is not finite."""
    since = max([0, *(rollback.step for rollback in history.rollbacks)])
    if not history.settings.guard or history.best is None or history.steps in (history.best[0], since):
        return Stop(NOT_FINITE)  # the parameters are the best already
    return _rollback(history, NOT_FINITE)


def _is_idle(history: History) -> bool:
    most, steps, since = history.idle_steps, history.steps, history.patient_from
    if most is None:
        return False
    judged = history.every and history.settings.chooses_by_dev_rows
    in_vain = 0
    if judged and history.gain is not None:
        in_vain = steps // history.every - max(history.gain[0], since) // history.every
    return max(min(history.idle, steps - since), in_vain) >= most


def _reason(history: History) -> str | None:
    """Returns why a run should return to its best state; None if it should go on."""
    assert history.best is not None
    settings, steps, (best, _) = history.settings, history.steps, history.best
    if best == steps:
        return None
    dev_loss = history.dev_loss if settings.chooses_by_dev_rows else None
    if dev_loss is not None and not math.isfinite(dev_loss):
        return NOT_FINITE
    if dev_loss is not None and steps == judged_feedback(settings):
        return FEEDBACK_ROSE
    if history.have_risen:
        return STEPS_ROSE
    if dev_loss is None:
        return None
    if history.guard.is_above(history.rise, settings.rows_per_step / history.dev_rows):
        return DEV_ROSE
    start = max([best, history.patient_from, *(rollback.step for rollback in history.rollbacks)])
    every = history.every or 1
    long = steps - start >= max(PATIENT_SHARE * settings.num_steps, PATIENT_STEPS)
    return STAGNATED if long and steps // every - start // every >= PATIENCE else None


def _rollback(history: History, reason: str) -> Rollback | Stop:
    """Returns the return to the best state for a reason, or the end where returns have not helped."""
    assert history.best is not None
    last = history.rollbacks[-1] if history.rollbacks else None
    in_vain = reason == STAGNATED and last is not None and (last.reason, last.to) == (STAGNATED, history.best[0])
    if in_vain or len(history.rollbacks) == MOST_ROLLBACKS:
        return Stop(reason)
    lowered = 1.0 if reason == FEEDBACK_ROSE else LOWERED
    return Rollback(history.steps, history.best[0], history.lr_scale * lowered, reason)


class BestState:
    """The parameters of the best state of one run, and the returns to it.

    Of ranks that share the run the first one's dev loss counts.

    Attributes:
        history: the events so far.
        tensors: the parameters of the best state, see `BaseOptimizer.tuned_state`; None: they are not kept.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        evaluations: Evaluations,
        listeners: Sequence[Listener],
        processes: ProcessGroup,
    ) -> None:
        self.job = job
        self.settings = job.config.train
        self.folder = folder
        self.evaluations = evaluations
        self.listeners = listeners
        self.processes = processes
        self.history = History(self.settings, len(job.dev), job.optimizer.idle_steps)
        self.tensors: Mapping[str, Tensor] | None = None
        self._resumed = ResumeState()

    @property
    def kept(self) -> tuple[int, float] | None:
        """(number of steps, dev loss) of the state that the run keeps; None: it keeps the last one."""
        return self.history.best if self.settings.keep_best and self.history.every else None

    def begin(self, resumed: ResumeState) -> None:
        """Takes in what there is of the run, before its first step here."""
        self._resumed = resumed
        self.history.totals = resumed.totals
        self.history.scorers = {change.step for change in resumed.scorers if change.answers is None}

    def _is_due(self, *, last: bool) -> bool:
        """Whether the dev rows are evaluated now, or were."""
        history = self.history
        if not history.every:
            return False
        logged = ("dev", history.steps) in self._resumed.evaluations
        return last or logged or evaluates(history.steps, history.settings_at(history.steps))

    def note(self, before: Metrics | None = None, *, last: bool = False) -> None:
        """Evaluates the dev rows, where it is time, and keeps the state if it is the best so far.

        Args:
            before: metrics of the test rows, where that is before the first step.
            last: whether no step follows.
        """
        history = self.history
        loss: float | None
        rise: float | None = None
        if self._is_due(last=last):
            if before is not None and self.job.dev is self.job.test:
                loss = before["loss"]
            else:
                with current().phase(BETWEEN):
                    loss = self.evaluations.of("dev", history.steps)["loss"]
            best, lowest = history.best or (history.steps, loss)
            common = self.evaluations.in_common("dev", best, history.steps)
            if not self.evaluations.by_one_scorer("dev", best, history.steps):
                rise = -math.inf
            else:
                rise = loss - lowest if common is None else common.rise
            loss, rise = self.processes.first([loss, rise])
            history.dev_loss = loss
        else:
            loss = history.mean_of_steps()
        if loss is not None and history.add_loss(loss, rise):
            keeps = self.settings.guard or self.settings.keep_best
            self.tensors = self.job.optimizer.tuned_state() if keeps else None

    def note_last(self) -> None:
        """Notes the last state, where its dev rows have not been evaluated: a run may end between two evaluations."""
        if self.history.every and self.history.dev_loss is None:
            self.note(last=True)

    def logged(self) -> Decision:
        """Returns the decision that the log has after so many steps, as far as it is still to be applied."""
        made = self._resumed.rollbacks.get(self.history.steps)
        return CONTINUE if made is None or made in self.history.rollbacks else made

    def decision(self) -> Decision:
        """Returns the decision of the log, where one was made after so many steps, and else `decide(history)`."""
        steps = self.history.steps
        was_made = steps < len(self._resumed.steps) or steps in self._resumed.rollbacks
        return self.logged() if was_made else decide(self.history)

    def roll_back(self, rollback: Rollback) -> None:
        """Goes back to the best state, and logs and reports that.

        Raises:
            RunError: the rollback, which is one of the log, is to another state.
        """
        assert self.history.best is not None and self.tensors is not None
        best, _ = self.history.best
        if best != rollback.to:
            raise RunError(
                f"{self.folder.path}: {LOG} returns to step {rollback.to}, and the lowest dev loss is that of step "
                f"{best}; put an intact copy in its place, or start the run again."
            )
        self.job.optimizer.roll_back(self.tensors, best)
        if self.job.held_out is not None:
            self.job.held_out.forget()
        self.history.add_rollback(rollback)
        self.folder.append_rollback(rollback)
        for listener in self.listeners:
            listener.rolled_back(rollback)

    def restore(self) -> None:
        """Puts the state that is kept into the optimizer."""
        if self.kept is not None and self.tensors is not None and self.kept[0] != self.history.steps:
            self.job.optimizer.load_tuned_state(self.tensors, self.kept[0])

    def saved(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Returns (tensors, values that JSON can represent) for a checkpoint."""
        history = self.history
        state: dict[str, Any] = {"best": None, "rollbacks": len(history.rollbacks), "losses": history.losses}
        state["gain"] = history.gain
        if history.best is None:
            return {}, state
        step, loss = history.best
        state["best"] = {"step": step, "loss": loss, "kept": self.tensors is not None}
        return self.tensors or {}, state

    def load(self, tensors: dict[str, Tensor], state: Mapping[str, Any], steps: int) -> int:
        """Restores the result of `saved` after `steps` steps; returns the step after which moments were last dropped.

        Checkpoints of earlier versions have the values of "best" alone.
        """
        history = self.history
        made = sorted(self._resumed.rollbacks)[: int(state.get("rollbacks", 0))]
        for taken in range(steps + 1):
            if taken in made:
                history.add_rollback(self._resumed.rollbacks[taken])
            if taken < steps:
                history.add_step(self._resumed.steps[taken])
        history.losses = [float(loss) for loss in state.get("losses", [])]
        if (gain := state.get("gain")) is not None:
            history.gain = int(gain[0]), float(gain[1])
        if (best := state["best"]) is not None:
            history.best = int(best["step"]), float(best["loss"])
            # the state of the base has no tensors, which is another thing than no state
            self.tensors = tensors if best["kept"] else None
        return history.rollbacks[-1].step if history.rollbacks else 0
