"""The evaluations of a run: made once, logged, and told to its listeners."""

import math
from collections.abc import Sequence

from tezo.errors import NonFiniteModelError
from tezo.runs.environment import memory_for
from tezo.runs.folder import RunFolder
from tezo.tasks.evaluation import Metrics, evaluate_and_answer
from tezo.tasks.objectives import Encoded
from tezo.tasks.rewards import EVALUATION
from tezo.training.execution.kept_answers import answers_to_keep
from tezo.training.execution.listeners import Listener
from tezo.training.preparation.job import Job


class Evaluations:
    """Evaluates the rows of a job.

    Args:
        job: what is evaluated.
        folder: gets the metrics.
        listeners: told of them after the folder has them.

    Attributes:
        known: (split, step) -> metrics of the evaluations so far, those in the log of a run that goes on among them.
        answers: (split, step) -> answers to the first rows, of evaluations of the test rows.
    """

    def __init__(self, job: Job, folder: RunFolder, listeners: Sequence[Listener]) -> None:
        self.job = job
        self.folder = folder
        self.listeners = listeners
        self.known: dict[tuple[str, int], Metrics] = {}
        self.answers: dict[tuple[str, int], Sequence[str]] = {}

    def loss(self, split: str, step: int) -> float | None:
        """The loss of an evaluation that was made; None: there was none."""
        metrics = self.known.get((split, step))
        return None if metrics is None else metrics["loss"]

    def of(self, split: str, step: int) -> Metrics:
        """Metrics of the "dev" or "test" rows after `step` steps."""
        encoded = self.job.test if split == "test" else self.job.dev
        longest = sorted(encoded, key=lambda row: row.length)[-self.job.config.train.eval_batch_size :]
        metrics = self.known.get((split, step))
        if metrics is None:
            with memory_for(f"the evaluation before step {step}", longest, "train.eval_batch_size"):
                metrics, answers = self._measured(encoded, written=split == "test")
                if step == 0 and not math.isfinite(metrics["loss"]):
                    dtype = self.job.model.dtype
                    raise NonFiniteModelError(f"the untuned model's loss of the {split} rows", metrics["loss"], dtype)
                if split == "test":
                    self.answers[split, step] = answers_to_keep(self.job, answers)
        self.known[split, step] = metrics
        self.folder.append_evaluation(split, step, metrics, self.answers.get((split, step), ()))
        for listener in self.listeners:
            listener.evaluated(split, step, metrics)
        return metrics

    def metrics(self, encoded: Sequence[Encoded], *, written: bool, step: int = EVALUATION) -> Metrics:
        """Metrics of the model on some rows.

        Args:
            encoded: the rows.
            written: whether answers are generated and measured, which takes a pass for each token.
            step: whose random numbers a reward samples with.
        """
        return self._measured(encoded, written=written, step=step)[0]

    def _measured(
        self, encoded: Sequence[Encoded], *, written: bool, step: int = EVALUATION
    ) -> tuple[Metrics, list[str]]:
        """(metrics, answers to the rows)."""
        job, form = self.job, self.job.format
        measures = form.measures if written else ()
        new = form.max_new_tokens or 0
        size = job.config.train.eval_batch_size
        return evaluate_and_answer(
            job.model,
            job.objective,
            encoded,
            size,
            measures=measures,
            max_new_tokens=new,
            reward=job.reward,
            step=step,
        )
