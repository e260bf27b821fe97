"""When a run goes on, goes back to its best state, or ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from torch import Tensor

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.folder import LOG, ResumeState, RunFolder
from tezo.runs.step_log import Rollback
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
class GoodState:
    """The state with the lowest loss so far.

    Attributes:
        step: number of steps after which the run had it.
        loss: on the dev rows; without these the mean loss of the steps before.
        state: the parameters, see `BaseOptimizer.tuned_state`; None: they are not kept.
    """

    step: int
    loss: float
    state: Mapping[str, Tensor] | None


class BestState:
    """The best state of one run, and the returns to it; of ranks that share the run the first one's dev loss counts.

    Attributes:
        best: the state with the lowest loss so far; None before the first evaluation.
        dev_loss: loss on the dev rows after the newest step; None if they were not evaluated then.
        rollbacks: the returns so far.
        stopped: reason why the run should end; None if there is none.
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
        self.best: GoodState | None = None
        self.dev_loss: float | None = None
        self.rollbacks: list[Rollback] = []
        self.stopped: str | None = None
        self._every = interval(self.settings.eval_every, self.settings) if job.dev else 0
        self._guard = Guard(self.settings.num_steps)
        self._have_risen = False
        self._idle = 0
        self._gain: tuple[int, float] | None = None  # the step of the last fall by `IDLE_GAIN`, and the loss there
        self._losses: list[float] = []
        self._resumed = ResumeState()

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate."""
        return self.rollbacks[-1].lr_scale if self.rollbacks else 1.0

    @property
    def kept(self) -> GoodState | None:
        """The state that the run keeps; None: the last one."""
        return self.best if self.settings.keep_best and self._every else None

    def begin(self, resumed: ResumeState) -> None:
        """Takes in what there is of the run, before its first step here."""
        self._resumed = resumed

    def stepped(self, record: StepRecord) -> None:
        """Takes in a step."""
        if self.settings.guard:
            self._add_step(record)
            self._losses.append(record.loss)

    def _add_step(self, record: StepRecord) -> None:
        self._have_risen = self._guard.add(record.loss)
        self._idle = self._idle + 1 if record.is_idle else 0

    def _settings_at(self, steps: int) -> TrainConfig:
        """Returns the settings that held when the run took so many steps: their number may have changed since."""
        later = next((total for total in self._resumed.totals if steps <= total.step), None)
        return self.settings if later is None else replace(self.settings, steps=later.before)

    def _is_due(self, steps: int, *, last: bool) -> bool:
        """Whether the dev rows are evaluated after so many steps, or were."""
        if not self.job.dev or not self._every:
            return False
        return last or evaluates(steps, self._settings_at(steps)) or ("dev", steps) in self._resumed.evaluations

    @property
    def _patient_from(self) -> int:
        """After how many steps the user asked a run that had ended to go on: it has its patience from there."""
        return max((total.step for total in self._resumed.totals if total.ended), default=0)

    def _is_idle(self, steps: int) -> bool:
        most, since = self.job.optimizer.idle_steps, self._patient_from
        if most is None:
            return False
        judged = self._every and self.settings.chooses_by_dev_rows
        in_vain = steps // self._every - max(self._gain[0], since) // self._every if judged and self._gain else 0
        return max(min(self._idle, steps - since), in_vain) >= most

    def note(self, steps: int, before: Metrics | None = None, *, last: bool = False) -> None:
        """Evaluates the dev rows, where it is time, and notes the state if it is the best so far.

        Args:
            steps: number of steps taken.
            before: metrics of the test rows, where that is before the first step.
            last: whether no step follows.
        """
        self.dev_loss = None
        if self._is_due(steps, last=last):
            if before is not None and self.job.dev is self.job.test:
                loss = before["loss"]
            else:
                with current().phase(BETWEEN):
                    loss = self.evaluations.of("dev", steps)["loss"]
            (loss,) = self.processes.first([loss])
            self.dev_loss = loss
        elif self.settings.guard and not self._every and steps % interval(None, self._settings_at(steps)) == 0:
            loss = sum(self._losses) / len(self._losses) if self._losses else math.inf
            self._losses = []
        else:
            return
        if math.isfinite(loss) and (self._gain is None or loss < (1 - IDLE_GAIN) * self._gain[1]):
            self._gain = steps, loss
        if self.best is None or loss < self.best.loss:
            kept = self.settings.guard or self.settings.keep_best
            self.best = GoodState(steps, loss, self.job.optimizer.tuned_state() if kept else None)

    def note_last(self, steps: int) -> None:
        """Notes the last state, where its dev rows have not been evaluated: a run may end between two evaluations."""
        if self._every and self.dev_loss is None:
            self.note(steps, last=True)

    def ends_run(self, steps: int, *, again: bool = False) -> bool:
        """Goes back to the best state where that may help; returns whether the run should end after these steps.

        `again`: the log says that it did end after them, and not why, which `stopped` then does.
        """
        decided = steps < len(self._resumed.steps) or steps in self._resumed.rollbacks
        if not self.settings.guard or (decided and not again):
            return False  # a decision that was made before is in the log
        reason = IDLE if self._is_idle(steps) else self.reason(steps)
        if reason is None:
            return False
        planned = None if reason == IDLE else self.planned(steps, reason)
        if planned is None:
            asked = any(steps == total.step for total in self._resumed.totals)  # to go on from here
            self.stopped = None if asked else reason
            return not asked
        if not again:
            self.roll_back(planned)
        return False

    def reason(self, steps: int) -> str | None:
        """Returns why the run should return to the best state after these steps; None if it should go on."""
        assert self.best is not None
        if self.best.step == steps:
            return None
        dev_loss = self.dev_loss if self.settings.chooses_by_dev_rows else None
        if dev_loss is not None and not math.isfinite(dev_loss):
            return NOT_FINITE
        if dev_loss is not None and steps == judged_feedback(self.settings):
            return FEEDBACK_ROSE
        if self._have_risen:
            return STEPS_ROSE
        if dev_loss is None:
            return None
        if self._guard.is_above(dev_loss - self.best.loss, self.settings.rows_per_step / len(self.job.dev)):
            return DEV_ROSE
        start = max([self.best.step, self._patient_from, *(rollback.step for rollback in self.rollbacks)])
        every = self._every or 1
        long = steps - start >= max(PATIENT_SHARE * self.settings.num_steps, PATIENT_STEPS)
        return STAGNATED if long and steps // every - start // every >= PATIENCE else None

    def planned(self, steps: int, reason: str) -> Rollback | None:
        """Returns the rollback to the best state for a reason; None if the run should end instead."""
        assert self.best is not None
        last = self.rollbacks[-1] if self.rollbacks else None
        again = last is not None and (last.reason, last.to) == (STAGNATED, self.best.step)
        if len(self.rollbacks) == MOST_ROLLBACKS or (reason == STAGNATED and again):
            return None
        lowered = 1.0 if reason == FEEDBACK_ROSE else LOWERED
        return Rollback(steps, self.best.step, self.lr_scale * lowered, reason)

    def repeat_rollback(self, step: int) -> None:
        """Goes back before a step where the log says that the run did."""
        made = self._resumed.rollbacks.get(step)
        if made is not None and made not in self.rollbacks:
            self.roll_back(made)

    def roll_back_after_failure(self, step: int) -> bool:
        """Goes back because a loss of this step was not finite; False: the parameters are the best already."""
        since = max([0, *(rollback.step for rollback in self.rollbacks)])
        if not self.settings.guard or self.best is None or step in (self.best.step, since):
            return False
        planned = self.planned(step, NOT_FINITE)
        if planned is not None:
            self.roll_back(planned)
        return planned is not None

    def roll_back(self, rollback: Rollback) -> None:
        """Goes back to the best state, logs that, and tells the listeners.

        Raises:
            RunError: the rollback, which is one of the log, is to another state.
        """
        assert self.best is not None and self.best.state is not None
        if self.best.step != rollback.to:
            raise RunError(
                f"{self.folder.path}: {LOG} returns to step {rollback.to}, and the lowest dev loss is that of step "
                f"{self.best.step}; put an intact copy in its place, or start the run again."
            )
        self.job.optimizer.roll_back(self.best.state, self.best.step)
        if self.job.held_out is not None:
            self.job.held_out.forget()
        self._add(rollback)
        self._losses = []
        self.folder.append_rollback(rollback)
        for listener in self.listeners:
            listener.rolled_back(rollback)

    def _add(self, rollback: Rollback) -> None:
        self.rollbacks.append(rollback)
        self._guard.restart(keep_lowest=not (self._every and self.settings.chooses_by_dev_rows))
        self._have_risen = False

    def restore(self, steps: int) -> None:
        """Puts the state that is kept into the optimizer, which has taken so many steps."""
        if self.kept is not None and self.kept.state is not None and self.kept.step != steps:
            self.job.optimizer.load_tuned_state(self.kept.state, self.kept.step)

    def saved(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Returns (tensors, values that JSON can represent) for a checkpoint."""
        state: dict[str, Any] = {"best": None, "rollbacks": len(self.rollbacks), "losses": self._losses}
        state["gain"] = self._gain
        if self.best is None:
            return {}, state
        state["best"] = {"step": self.best.step, "loss": self.best.loss, "kept": self.best.state is not None}
        return self.best.state or {}, state

    def load(self, tensors: dict[str, Tensor], state: Mapping[str, Any], steps: int) -> int:
        """Restores the result of `saved` after `steps` steps; returns the step after which moments were last dropped.

        Checkpoints of earlier versions have the values of "best" alone.
        """
        made = sorted(self._resumed.rollbacks)[: int(state.get("rollbacks", 0))]
        for taken in range(steps + 1):
            if taken in made:
                self._add(self._resumed.rollbacks[taken])
            if taken < steps:
                self._add_step(self._resumed.steps[taken])
        self._losses = [float(loss) for loss in state.get("losses", [])]
        if (gain := state.get("gain")) is not None:
            self._gain = int(gain[0]), float(gain[1])
        if (best := state["best"]) is not None:
            # the state of the base has no tensors, which must be told from no state
            self.best = GoodState(int(best["step"]), float(best["loss"]), tensors if best["kept"] else None)
        return self.rollbacks[-1].step if self.rollbacks else 0
