"""A run folder: what each file is for, and who writes it.

config.yaml          resolved: `tezo train config.yaml` is the same run
plan.json            every parameter: shape, kind, rank, whether it is trained, and how
steps.log            every finished step and evaluation, see `tezo.runs.step_log`
basis-<step>.safetensors   factors that a data-dependent basis computed at that step
feedback-<step>.safetensors   what a feedback step measured
metrics.jsonl        one line every `log_every` steps, and one for each evaluation
checkpoint-<step>/   until the run has ended, see `tezo.runs.checkpoints`
adapter/             or model/: the result
answers.json         answers to test rows before and after: counts for each label, and a few rows with their text
summary.json         before, after, time, memory, versions
manifest.json        size and SHA-256 of all of these once the run has ended, see `tezo.runs.files`
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.checkpoints import Checkpoint, newest, remove_checkpoints, save_checkpoint
from tezo.runs.files import MANIFEST, FactorFiles, check_manifest, write_manifest
from tezo.runs.metrics_log import MetricsLog
from tezo.runs.step_log import End, LogContents, Rollback, StepLog, read_header, read_log
from tezo.system.errors import RequestError
from tezo.system.files import NEW, check_free, new_folder, open_plain, own_object, remove, write_file
from tezo.tasks.evaluation import Metrics

CONFIG, LOG, METRICS, SUMMARY, PLAN = "config.yaml", "steps.log", "metrics.jsonl", "summary.json", "plan.json"
ANSWERS = "answers.json"
ADAPTER, MODEL = "adapter", "model"
FILES = (CONFIG, PLAN, LOG, METRICS, ANSWERS, SUMMARY, ADAPTER, MODEL)
"""Files and folders of a run that has ended, in its manifest; its log has the digests of the others."""


def lost(folder: Path, name: str) -> RequestError:
    """Of a run folder without a file that every run has."""
    return RequestError(f"{folder} is a run folder that has lost its {name}; put it back, or give another folder.")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run; None if the run has not ended, which is when it gets its manifest.

    Raises:
        RequestError: it is damaged, or is not the one that the run wrote.
    """
    if not os.path.lexists(folder / MANIFEST):
        return None
    check_manifest(folder, [SUMMARY])
    return own_object(folder / SUMMARY, f"delete {MANIFEST} to go on with the run")


@dataclass(frozen=True)
class ResumeState:
    """What a run folder has of a run that was begun.

    Attributes:
        header: of its step log.
        begun: whether there was a run before.
        checkpoint: the newest that is whole; None: start from the base.
        steps: all that were finished, from 0 on.
        evaluations: (split, step) -> metrics, of those that were made.
        answers: (split, step) -> answers to the first rows, of those that have kept them.
        rollbacks: number of steps -> the return to earlier parameters after them.
        end: of the run, where its process was killed before the manifest; None: it has not ended.
        seconds: spent on steps so far.
        elapsed: seconds that the starts of the run have taken so far, as far as metrics.jsonl says.
        passes: forward passes in them.
        notices: what the user should know.
    """

    header: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    begun: bool = False
    checkpoint: Checkpoint | None = None
    steps: Sequence[StepRecord] = ()
    evaluations: Mapping[tuple[str, int], Metrics] = field(default_factory=lambda: MappingProxyType({}))
    answers: Mapping[tuple[str, int], Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    rollbacks: Mapping[int, Rollback] = field(default_factory=lambda: MappingProxyType({}))
    end: End | None = None
    seconds: float = 0.0
    elapsed: float = 0.0
    passes: float = 0.0
    notices: tuple[str, ...] = ()


def _resume_state(
    log: LogContents, begun: bool, checkpoint: Checkpoint | None, metrics: MetricsLog, notices: Sequence[str]
) -> ResumeState:
    return ResumeState(
        log.header,
        begun,
        checkpoint,
        log.steps,
        log.evaluations,
        log.answers,
        log.rollbacks,
        log.end,
        metrics.seconds,
        metrics.elapsed,
        metrics.passes,
        tuple(notices),
    )


class RunFolder(ABC):
    """The files of one run: one process writes them, others of the same run read them.

    Calls come in this order: `open`, `describe`, steps and evaluations, `append_end`, `finish`; and `close` in any
    case.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    _digests: Mapping[str, str] | None = None
    """File name -> SHA-256 in the step log, once it has been read."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to go on with."""
        return os.path.lexists(self.path / LOG)

    def header(self) -> dict[str, Any] | None:
        """Header of the step log; None if there is none, or its process died while it wrote it."""
        try:
            return read_header(self.path / LOG) if self.has_begun else None
        except RequestError:
            return None  # what it is is said when the log is opened

    def summary(self) -> dict[str, Any] | None:
        """Of the run, if it has ended."""
        return read_summary(self.path)

    @property
    def factor_files(self) -> FactorFiles:
        """Where tensors that depend on data are kept; to be called after `open`."""
        return FactorFiles(self.path, writes=False, digests=self._digests)

    @abstractmethod
    def open(self, header: dict[str, Any], sync_every: int = 10) -> ResumeState:
        """Begins a run, or reads the one that is there.

        Args:
            header: of the step log of a new run.
            sync_every: see `StepLog`.

        Raises:
            RequestError: the folder cannot be written, or another process writes it.
        """

    @abstractmethod
    def result(self, name: str) -> AbstractContextManager[Path]:
        """A folder for the result, which appears under that name when it is whole."""

    # What follows has no effect in a process that only reads.

    def check_free(self) -> None:
        """An error where the folder exists and is not empty."""
        return

    def describe(self, config: str, plan: Sequence[Mapping[str, Any]]) -> None:
        """Writes config.yaml and plan.json."""
        del config, plan

    def append_step(self, record: StepRecord) -> None:
        """Adds a step to the log, if it is not there already."""
        del record

    def append_metrics(self, step: int, line: Mapping[str, Any]) -> None:
        """Adds the line of a step to metrics.jsonl."""
        del step, line

    def append_evaluation(self, split: str, step: int, metrics: Metrics, answers: Sequence[str] = ()) -> None:
        """Adds an evaluation to the log and to metrics.jsonl, where it is not there already; answers to the log."""
        del split, step, metrics, answers

    def append_rollback(self, rollback: Rollback) -> None:
        """Adds a return to earlier parameters to the log, if it is not there already."""
        del rollback

    def append_end(self, end: End) -> None:
        """Adds the end of the run to the log, if it is not there already."""
        del end

    def save_checkpoint(self, checkpoint: Checkpoint, keep: int = 2) -> None:
        """Writes a checkpoint, after the log is on disk, and removes all but the newest `keep`."""
        del checkpoint, keep

    def finish(self, summary: Mapping[str, Any], answers: Mapping[str, Any] | None = None) -> None:
        """Writes answers.json, where there are any, summary.json and manifest.json, and removes the checkpoints."""
        del summary, answers

    def check_ended(self) -> None:
        """Checks all files of a run that has ended, and removes checkpoints that its process left when it was killed.

        Raises:
            RequestError: a file is not the one that the run wrote; the file is named.
        """
        return

    def close(self) -> None:
        """Closes the log; the last call, whether the run has finished or not."""
        return


class WritableRunFolder(RunFolder):
    """The folder of a run that this process alone writes; it is made when the run starts, not before."""

    _steps: StepLog | None = None

    @property
    def factor_files(self) -> FactorFiles:
        return FactorFiles(self.path, writes=True, digests=self._digests, saved=self._log.append_file)

    def check_free(self) -> None:
        if not self.has_begun and os.path.lexists(self.path / CONFIG):
            raise lost(self.path, LOG)
        check_free(self.path, "give another --output, go on with --resume, or delete it first")

    def open(self, header: dict[str, Any], sync_every: int = 10) -> ResumeState:
        begun = self.has_begun
        self._check_writable()
        log = self._steps = StepLog(self.path / LOG, header, sync_every)
        self._metrics = MetricsLog(self.path / METRICS, log.contents)
        contents = log.contents
        self._digests = contents.files
        self.factor_files.check()
        checkpoint, notices = newest(self.path, len(contents.steps))
        if contents.size > contents.valid:
            notices.append(f"an unfinished record of {contents.size - contents.valid} bytes was cut from {LOG}.")
        if begun:
            at = "the base" if checkpoint is None else f"checkpoint-{checkpoint.step}"
            notices.append(f"going on after step {len(contents.steps)}, from {at} and {LOG}.")
            notices.append(f"what earlier starts did after their last line of a step in {METRICS} is in no count.")
        return _resume_state(contents, begun, checkpoint, self._metrics, notices)

    def _check_writable(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            remove(probe)
            os.close(open_plain(probe, NEW))
            probe.unlink()
        except OSError as error:
            raise RequestError(f"output: {self.path} cannot be written ({error.strerror}); give another.") from None

    def describe(self, config: str, plan: Sequence[Mapping[str, Any]]) -> None:
        write_file(self.path / CONFIG, config.encode())
        self._metrics.cut_tail()
        self._write_json(PLAN, plan)

    def append_step(self, record: StepRecord) -> None:
        if record.step >= self._log.count:
            self._log.append(record)

    def append_metrics(self, step: int, line: Mapping[str, Any]) -> None:
        self._metrics.step(step, **line)

    def append_evaluation(self, split: str, step: int, metrics: Metrics, answers: Sequence[str] = ()) -> None:
        self._log.append_evaluation(split, step, metrics, answers)
        self._metrics.evaluation(split, step, metrics)

    def append_rollback(self, rollback: Rollback) -> None:
        self._log.append_rollback(rollback)

    def append_end(self, end: End) -> None:
        self._log.append_end(end)

    def save_checkpoint(self, checkpoint: Checkpoint, keep: int = 2) -> None:
        self._log.sync()
        save_checkpoint(self.path, checkpoint, keep)

    @contextmanager
    def result(self, name: str) -> Iterator[Path]:
        with new_folder(self.path / name) as folder:
            yield folder

    def finish(self, summary: Mapping[str, Any], answers: Mapping[str, Any] | None = None) -> None:
        self._log.sync()
        if answers is not None:
            self._write_json(ANSWERS, answers)
        self._write_json(SUMMARY, summary)
        write_manifest(self.path, FILES)
        remove_checkpoints(self.path)

    def check_ended(self) -> None:
        check_manifest(self.path, FILES)
        FactorFiles(self.path, writes=False, digests=read_log(self.path / LOG).files).check()
        remove_checkpoints(self.path)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    @property
    def _log(self) -> StepLog:
        assert self._steps is not None, "open() comes first"
        return self._steps

    def _write_json(self, name: str, value: Any) -> None:
        write_file(self.path / name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


class ReadOnlyRunFolder(RunFolder):
    """The folder of a run that another process writes: this one reads what that one has begun."""

    def open(self, header: dict[str, Any], sync_every: int = 10) -> ResumeState:
        del header, sync_every
        contents = read_log(self.path / LOG)
        metrics = MetricsLog(self.path / METRICS, contents)
        self._digests = contents.files
        checkpoint, _ = newest(self.path, len(contents.steps))
        return _resume_state(contents, True, checkpoint, metrics, [])

    @contextmanager
    def result(self, name: str) -> Iterator[Path]:
        # beside the real one: a temporary folder of the system may be on a disk without room
        with TemporaryDirectory(dir=self.path, prefix=f".{name}-", suffix=".partial") as folder:
            yield Path(folder)
