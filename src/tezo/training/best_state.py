"""When a run returns to an earlier state and goes on at a lower rate, and when it ends because that no longer helps.

A run keeps the parameters with the lowest dev loss. It returns to them, drops the moments, and multiplies its learning
rate by `LOWERED`, for one of the `REASONS`. It ends if it stagnates again after a return for stagnation. Without dev
rows the state to return to is that with the lowest mean loss of a tenth of the steps.

Feedback steps are biased. If the dev loss after those at the start is above the lowest one, the run returns at the same
learning rate: it was not the rate that was wrong.

Decisions depend on nothing but losses that are in the step log, and are written there themselves.

A sequential test of whether a run's loss has risen: it asks nothing but the losses that the steps measure anyway.

Let x_1, x_2, ... be the losses of the steps. Under the hypothesis that the run is sound they are a mean that does not
rise plus independent noise of variance sigma^2, because batches differ. sigma^2 is estimated from differences of
successive losses, which a slow change of the mean hardly enlarges:

    s^2 = mean of (x_{t+1} - x_t)^2 / 2.

For windows of n = 8, 16, 32, ... steps, at every multiple of n, the mean of the last n losses is compared with the
lowest mean of n losses of an earlier window (since the last return, where dev rows chose its state),

    z = (mean of the last n - lowest mean of n) / (s sqrt(2 / n)).

Each comparison with one earlier window exceeds its quantile with probability at most `FALSE_ALARM_RATE` / C if the
hypothesis is true and the noise normal, where C is the number of pairs of windows of a whole run. Hence a whole run
raises a false alarm with probability at most `FALSE_ALARM_RATE`. The quantile is Student's, for s is estimated;
successive differences are worth 2/3 of their number in degrees of freedom.

The best state of a run: noted at its evaluations, returned to where the loss has risen, kept at the end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from torch import Tensor

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.folder import LOG, ResumeState, RunFolder
from tezo.runs.step_log import Rollback
from tezo.system.errors import RunError
from tezo.system.progress import BETWEEN, current
from tezo.system.ranks import Ranks
from tezo.tasks.evaluation import Metrics
from tezo.training.evaluations import Evaluations
from tezo.training.job import Job
from tezo.training.listeners import Listener
from tezo.training.schedule import evaluation_steps, interval, judged_feedback

LOWERED = 1 / 3
"""Factor of the learning rate at a rollback. Not searched."""
PATIENCE = 3
"""Evaluations in a row without a lower dev loss, over `PATIENT_SHARE` of the steps and `PATIENT_STEPS` at least."""
PATIENT_SHARE, PATIENT_STEPS = 0.3, 24
MOST_ROLLBACKS = 8
"""Rollbacks of a run. After as many the rate is below a thousandth of the first, and the run ends."""

STEPS_ROSE, DEV_ROSE, STAGNATED, NOT_FINITE = "steps rose", "dev rose", "stagnated", "not finite"
FEEDBACK_ROSE = "feedback rose"
REASONS = {
    STEPS_ROSE: "the losses of the steps have risen",
    DEV_ROSE: "the dev loss has risen",
    STAGNATED: "the dev loss was no lower for long",
    NOT_FINITE: "the loss was not finite",
    FEEDBACK_ROSE: "the feedback steps raised the dev loss",
}
"""Reason for a rollback, as in the step log -> in words."""


def in_words(rollback: Rollback) -> str:
    """A sentence on a rollback, without its end."""
    reason = REASONS.get(rollback.reason, rollback.reason)
    share = "" if rollback.lr_scale == 1 else f"{rollback.lr_scale:.3g} of "
    return f"{reason}: back to step {rollback.to}, with {share}the first learning rate"


@dataclass
class GoodState:
    """The state with the lowest loss so far.

    Attributes:
        step: number of steps after which the run had it.
        loss: on the dev rows; without these the mean loss of the steps before.
        state: the parameters, see `BaseOptimizer.tuned_state`; None: they are not kept.
        since: evaluations since.
    """

    step: int
    loss: float
    state: Mapping[str, Tensor] | None
    since: int = 0


class Rollbacks:
    """The rollbacks of one run.

    Args:
        steps: number of steps of the run.
        rows_ratio: rows of a step over dev rows.
        every: steps between evaluations.
        by_dev_loss: whether the dev loss chooses the state to return to, and is what the steps minimise.
        judged_feedback: number of feedback steps at the start that are undone if the dev loss is above the lowest one.
    """

    def __init__(
        self, steps: int, rows_ratio: float, every: int, *, by_dev_loss: bool, judged_feedback: int = 0
    ) -> None:
        self.done: list[Rollback] = []
        self._steps = steps
        self._guard = Guard(steps)
        self._rows_ratio = rows_ratio
        self._every = every
        self._by_dev_loss = by_dev_loss
        self._judged_feedback = judged_feedback
        self._have_risen = False

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate."""
        return self.done[-1].lr_scale if self.done else 1.0

    def stepped(self, loss: float) -> None:
        """Takes in the loss of a step."""
        self._have_risen = self._guard.add(loss)

    def reason(self, steps: int, best: GoodState, dev_loss: float | None) -> str | None:
        """Why the run should return to the best state now; None: it should go on.

        Args:
            steps: number of steps taken.
            best: the state to return to.
            dev_loss: loss on the dev rows after these steps; None: it was not measured, or is not what is minimised.
        """
        if best.step == steps:
            return None
        if dev_loss is not None and not math.isfinite(dev_loss):
            return NOT_FINITE
        if dev_loss is not None and steps == self._judged_feedback:
            return FEEDBACK_ROSE
        if self._have_risen:
            return STEPS_ROSE
        if dev_loss is None:
            return None
        if self._guard.is_above(dev_loss - best.loss, self._rows_ratio):
            return DEV_ROSE
        return STAGNATED if self._stagnates(steps, best) else None

    def _stagnates(self, steps: int, best: GoodState) -> bool:
        start = max([best.step, *(rollback.step for rollback in self.done)])
        evaluations = steps // self._every - start // self._every
        return evaluations >= PATIENCE and steps - start >= max(PATIENT_SHARE * self._steps, PATIENT_STEPS)

    def planned(self, steps: int, best: GoodState, reason: str) -> Rollback | None:
        """The rollback to the best state for a reason; None: the run should end instead."""
        last = self.done[-1] if self.done else None
        again = last is not None and (last.reason, last.to) == (STAGNATED, best.step)
        if len(self.done) == MOST_ROLLBACKS or (reason == STAGNATED and again):
            return None
        lowered = 1.0 if reason == FEEDBACK_ROSE else LOWERED
        return Rollback(steps, best.step, self.lr_scale * lowered, reason)

    def add(self, rollback: Rollback) -> None:
        """Takes in a rollback that was made."""
        self.done.append(rollback)
        self._guard.restart(keep_lowest=not self._by_dev_loss)
        self._have_risen = False

    def load(self, records: Sequence[StepRecord], done: Mapping[int, Rollback], count: int) -> None:
        """Restores the state after all these steps and the first `count` of the rollbacks of the run."""
        made = sorted(done)[:count]
        for steps in range(len(records) + 1):
            if steps in made:
                self.add(done[steps])
            if steps < len(records):
                self.stepped(records[steps].loss)


FALSE_ALARM_RATE = 0.01
"""Largest probability of an alarm in a whole run whose loss does not rise and has normal noise."""
SHORTEST_WINDOW = 8
"""Steps of the shortest window: means of fewer losses are too far from normal where a batch has few rows."""
FEWEST_DIFFERENCES = 15
"""Differences that the noise is estimated from, at least: those of the first two windows."""


class Guard:
    """The test of one run.

    Args:
        steps: number of steps of the run.
    """

    def __init__(self, steps: int) -> None:
        self._windows = []
        size = SHORTEST_WINDOW
        while 2 * size <= steps:
            self._windows.append(_Window(size))
            size *= 2
        pairs = sum(math.comb(steps // window.size, 2) for window in self._windows)
        self._alpha = FALSE_ALARM_RATE / max(1, pairs)
        self._last: float | None = None
        self._squares, self._differences = 0.0, 0

    def add(self, loss: float) -> bool:
        """Takes in the loss of the next step; whether the losses have risen."""
        if self._last is not None:
            self._squares += (loss - self._last) ** 2 / 2
            self._differences += 1
        self._last = loss
        rises = [rise for window in self._windows if (rise := window.add(loss)) is not None]
        return any(self._is_large(rise) for rise in rises)

    def is_above(self, rise: float, ratio: float) -> bool:
        """Whether a rise of the loss on other rows is larger than the noise allows.

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
        for window in self._windows:
            window.restart()
            if not keep_lowest:
                window.lowest = math.inf

    def _is_large(self, rise: float) -> bool:
        """Whether a difference of two means, scaled to the variance of one loss, is above its quantile."""
        if self._differences < FEWEST_DIFFERENCES:
            return False
        noise = math.sqrt(self._squares / self._differences)
        return rise > noise * student_quantile(1 - self._alpha, 2 / 3 * self._differences)


class _Window:
    """Means of windows of `size` losses, one after the other.

    Attributes:
        lowest: the lowest of them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sum, self._count = 0.0, 0
        self.lowest = math.inf

    def add(self, loss: float) -> float | None:
        """At the end of a window, how far its mean is above the lowest, times sqrt(size / 2); otherwise None."""
        self._sum += loss
        self._count += 1
        if self._count < self.size:
            return None
        mean = self._sum / self.size
        rise = (mean - self.lowest) * math.sqrt(self.size / 2)
        self.lowest = min(self.lowest, mean)
        self.restart()
        return rise

    def restart(self) -> None:
        self._sum, self._count = 0.0, 0


def student_quantile(p: float, freedom: float) -> float:
    """Quantile of Student's distribution with `freedom` degrees of freedom, by its expansion about the normal one.

    The next term of the expansion is below 1 % of the quantile for p <= 1 - 1e-7 and freedom >= 10.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))


class BestState:
    """The best state of one run.

    Args:
        job: that runs.
        folder: gets the rollbacks.
        evaluations: of the run.
        listeners: told of rollbacks.
        ranks: that share the run; the first one's dev loss counts.

    Attributes:
        best: the state with the lowest dev loss so far; None before the first evaluation.
        dev_loss: loss on the dev rows after the newest step; None: they were not evaluated then.
        stopped: reason why the run should end; None: there is none.
    """

    def __init__(
        self, job: Job, folder: RunFolder, evaluations: Evaluations, listeners: Sequence[Listener], ranks: Ranks
    ) -> None:
        self.job = job
        self.settings = job.config.train
        self.folder = folder
        self.evaluations = evaluations
        self.listeners = listeners
        self.ranks = ranks
        self.best: GoodState | None = None
        self.dev_loss: float | None = None
        self.stopped: str | None = None
        self._every = interval(self.settings.eval_every, self.settings) if job.dev else 0
        self._evaluation_steps = evaluation_steps(self.settings) if job.dev else frozenset[int]()
        self._rollbacks = Rollbacks(
            self.settings.num_steps,
            self.settings.batch_size / max(1, len(job.dev)),
            self._every or 1,
            by_dev_loss=self._every > 0 and self.settings.minimises_loss,
            judged_feedback=judged_feedback(self.settings),
        )
        self._losses: list[float] = []
        self._resumed = ResumeState()

    @property
    def rollbacks(self) -> Sequence[Rollback]:
        """The returns so far."""
        return self._rollbacks.done

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate."""
        return self._rollbacks.lr_scale

    @property
    def kept(self) -> GoodState | None:
        """The state that the run keeps; None: the last one."""
        return self.best if self.settings.keep_best and self._every else None

    def begin(self, resumed: ResumeState) -> None:
        """Takes in what there is of the run, before its first step here."""
        self._resumed = resumed

    def stepped(self, loss: float) -> None:
        """Takes in the loss of a step."""
        if self.settings.guard:
            self._rollbacks.stepped(loss)
            self._losses.append(loss)

    def note(self, steps: int, before: Metrics | None = None, *, last: bool = False) -> None:
        """Evaluates the dev rows, where it is time, and notes the state if it is the best so far.

        Args:
            steps: number of steps taken.
            before: metrics of the test rows before the first step.
            last: whether no step follows.
        """
        self.dev_loss = None
        if steps in self._evaluation_steps or (self._every and last):
            same = before is not None and self.job.dev is self.job.test
            loss = before["loss"] if same and before is not None else self._evaluated(steps)
            (self.dev_loss,) = self.ranks.first([loss])
            self._compare(steps, self.dev_loss)
        elif self.settings.guard and not self._every and steps % interval(None, self.settings) == 0:
            self._compare(steps, sum(self._losses) / len(self._losses) if self._losses else math.inf)
            self._losses = []

    def _evaluated(self, steps: int) -> float:
        with current().phase(BETWEEN):
            return self.evaluations.of("dev", steps)["loss"]

    def _compare(self, steps: int, loss: float) -> None:
        if self.best is None or loss < self.best.loss:
            kept = self.settings.guard or self.settings.keep_best
            self.best = GoodState(steps, loss, self.job.optimizer.tuned_state() if kept else None)
        else:
            self.best.since += 1

    def ends_run(self, steps: int) -> bool:
        """Whether the run should end after these steps; goes back to the best state first, if that may still help."""
        patience = self.settings.patience
        if patience is not None and self.best is not None and self.best.since >= patience:
            return True
        if not self.settings.guard or steps < len(self._resumed.steps) or steps in self._resumed.rollbacks:
            return False  # a decision that was made before is in the log
        assert self.best is not None
        dev_loss = self.dev_loss if self.settings.minimises_loss else None
        reason = self._rollbacks.reason(steps, self.best, dev_loss)
        if reason is None:
            return False
        planned = self._rollbacks.planned(steps, self.best, reason)
        if planned is None:
            self.stopped = reason
            return True
        self._roll_back(planned)
        return False

    def repeat_rollback(self, step: int) -> None:
        """Goes back before a step where the log says that the run did."""
        made = self._resumed.rollbacks.get(step)
        if made is not None and made not in self._rollbacks.done:
            self._roll_back(made)

    def roll_back_after_failure(self, step: int) -> bool:
        """Goes back because a loss of this step was not finite; False: the parameters are the best already."""
        since = max([0, *(rollback.step for rollback in self._rollbacks.done)])
        if not self.settings.guard or self.best is None or step in (self.best.step, since):
            return False
        planned = self._rollbacks.planned(step, self.best, NOT_FINITE)
        if planned is None:
            return False
        self._roll_back(planned)
        return True

    def _roll_back(self, rollback: Rollback) -> None:
        assert self.best is not None and self.best.state is not None
        if self.best.step != rollback.to:
            raise RunError(
                f"{self.folder.path}: {LOG} returns to step {rollback.to}, and the lowest dev loss is that of step "
                f"{self.best.step}; put an intact copy in its place, or start the run again."
            )
        self.job.optimizer.roll_back(self.best.state, self.best.step)
        self._rollbacks.add(rollback)
        self._losses = []
        self.folder.append_rollback(rollback)
        for listener in self.listeners:
            listener.rolled_back(rollback)

    def restore(self, steps: int) -> None:
        """Puts the state that is kept into the optimizer, which has taken so many steps."""
        if self.kept is not None and self.kept.state is not None and self.kept.step != steps:
            self.job.optimizer.load_tuned_state(self.kept.state, self.kept.step)

    def saved(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """(tensors, values that JSON can represent) for a checkpoint."""
        state: dict[str, Any] = {"best": None, "rollbacks": len(self._rollbacks.done), "losses": self._losses}
        if self.best is None:
            return {}, state
        figures = {"step": self.best.step, "loss": self.best.loss, "since": self.best.since}
        state["best"] = {**figures, "kept": self.best.state is not None}
        return self.best.state or {}, state

    def load(self, tensors: dict[str, Tensor], state: Mapping[str, Any], steps: int) -> int:
        """Restores the result of `saved`; the number of steps after which the moments were last dropped.

        Args:
            tensors: the tensors.
            state: the values. Checkpoints of earlier versions have those of "best" alone.
            steps: number of steps when they were saved.
        """
        done, count = self._resumed.rollbacks, int(state.get("rollbacks", 0))
        self._rollbacks.load(self._resumed.steps[:steps], done, count)
        self._losses = [float(loss) for loss in state.get("losses", [])]
        best = state["best"]
        if best is not None:
            # the state of the base has no tensors, which must be told from no state
            kept = tensors if best["kept"] else None
            self.best = GoodState(int(best["step"]), float(best["loss"]), kept, int(best["since"]))
        return self._rollbacks.done[-1].step if self._rollbacks.done else 0
