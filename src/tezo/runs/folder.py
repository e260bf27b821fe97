"""A run folder, and the listeners that follow a run.

config.yaml          resolved: `tezo train config.yaml` is the same run
plan.json            every parameter: shape, kind, rank, trained or not, and how
steps.log            every finished step, see `tezo.runs.step_log`
basis-<step>.safetensors   what a basis that sees the data saw there
feedback-<step>.safetensors   what a feedback step measured
metrics.jsonl        a line every `log_every` steps, and one for each evaluation
checkpoint-<step>/   until the run has ended, see `tezo.runs.checkpoints`
adapter/             or model/: the result
summary.json         before, after, time, memory, versions
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tezo.errors import RequestError
from tezo.files import new_folder, own_object, write_file
from tezo.runs.checkpoints import Checkpoint, newest, remove_checkpoints, save_checkpoint
from tezo.runs.factor_files import FactorFiles
from tezo.runs.fingerprint import check_same, log_header
from tezo.runs.metrics_log import MetricsLog
from tezo.runs.step_log import LoggedStep, StepLog
from tezo.tasks.evaluation import Metrics
from tezo.training.config import dump_config
from tezo.training.job import Job
from tezo.training.listeners import Listener, Progress
from tezo.training.plan import plan

CONFIG, LOG, METRICS, SUMMARY = "config.yaml", "steps.log", "metrics.jsonl", "summary.json"


@dataclass(frozen=True)
class ResumeState:
    """What a run folder knows of a run that goes on.

    Attributes:
        checkpoint: the newest that is whole; None: start from the base.
        steps: all that were finished, from 0 on.
        evaluations: (split, step) -> metrics, of those that were made.
        seconds: spent on steps so far.
        notices: what the user should know.
    """

    checkpoint: Checkpoint | None = None
    steps: Sequence[LoggedStep] = ()
    evaluations: Mapping[tuple[str, int], Metrics] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    notices: tuple[str, ...] = ()


class RunFolder(Listener):
    """The files of one run, which this process alone writes.

    Args:
        path: the folder; it is made when the run starts, not before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._job: Job
        self._steps: StepLog | None = None
        self._metrics: MetricsLog

    def check_free(self) -> None:
        """An error where the folder exists and is not empty."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            ways = "give another --output, go on with --resume, or delete it first"
            raise RequestError(f"output: {self.path} is in use; {ways}.")

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to go on with."""
        return (self.path / LOG).is_file()

    def summary(self) -> dict[str, Any] | None:
        """Of the run, if it has ended; what it needed until then is removed."""
        path = self.path / SUMMARY
        if not path.is_file():
            return None
        remove_checkpoints(self.path)
        return own_object(path, "delete it to go on with the run")

    def begin(self, job: Job) -> ResumeState:
        """Makes the folder, or takes up the run that is in it.

        Raises:
            RequestError: it cannot be written, another process writes it, or the run in it is another one.
        """
        self._job, own = job, log_header(job)
        resumed = self.has_begun
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RequestError(f"output: {self.path} cannot be written ({error.strerror}); give another.") from None
        self._steps = StepLog(self.path / LOG, own, job.config.train.sync_every)
        contents = self._steps.contents
        notices = check_same(contents.header, own, job.optimizer) if resumed else []
        write_file(self.path / CONFIG, dump_config(job.config).encode())
        self._metrics = MetricsLog(self.path / METRICS)
        job.optimizer.set_factor_store(FactorFiles(self.path, writes=True))
        self.write_json("plan.json", plan(job.model, job.optimizer))
        if contents.size > contents.valid:
            notices.append(f"an unfinished record of {contents.size - contents.valid} bytes was cut from {LOG}.")
        checkpoint, skipped = newest(self.path, len(contents.steps))
        if resumed:
            at = "the base" if checkpoint is None else f"checkpoint-{checkpoint.step}"
            notices.append(f"going on after step {len(contents.steps)}, from {at} and {LOG}.")
        return ResumeState(checkpoint, contents.steps, self._metrics.evaluations, self._metrics.seconds,
                    (*skipped, *notices))  # fmt: skip

    def stepped(self, progress: Progress) -> None:
        record, settings = progress.record, self._job.config.train
        assert self._steps is not None
        if record.step >= self._steps.count:
            self._steps.append(LoggedStep(record, settings.seed, (record.step + 1) * settings.batch_size))
        if (record.step + 1) % settings.log_every == 0:
            self._metrics.step(
                record.step + 1,
                loss=record.loss,
                projected_grads=list(record.projected_grads),
                lr=record.lr,
                seconds=round(progress.seconds, 3),
                memory=progress.memory,
            )

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        self._metrics.evaluation(split, step, metrics)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; the log is on disk before it."""
        assert self._steps is not None
        self._steps.sync()
        save_checkpoint(self.path, checkpoint, self._job.config.train.keep_checkpoints)

    @contextmanager
    def result(self, name: str) -> Iterator[Path]:
        """A folder for the result, which appears when it is whole."""
        with new_folder(self.path / name) as folder:
            yield folder

    def finished(self, summary: dict[str, Any]) -> None:
        assert self._steps is not None
        self._steps.sync()
        self.write_json(SUMMARY, summary)
        remove_checkpoints(self.path)

    def closed(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def write_json(self, name: str, value: Any) -> None:
        """Writes one JSON file of the folder."""
        write_file(self.path / name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
