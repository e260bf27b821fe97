"""The best state of a run: noted at its evaluations, returned to where the loss has risen, kept at the end."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tezo.distributed import Ranks
from tezo.errors import RunError
from tezo.progress.meter import BETWEEN, current
from tezo.runs.folder import LOG, ResumeState, RunFolder
from tezo.runs.step_log import Rollback
from tezo.tasks.evaluation import Metrics
from tezo.training.execution.evaluations import Evaluations
from tezo.training.execution.listeners import Listener
from tezo.training.execution.rollbacks import NOT_FINITE, GoodState, Rollbacks
from tezo.training.preparation.feedback_schedule import judged_feedback
from tezo.training.preparation.job import Job
from tezo.training.preparation.schedule import evaluation_steps, interval


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
