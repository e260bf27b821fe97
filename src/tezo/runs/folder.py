"""A run folder: the purpose of each file, and its writers.

config.yaml          resolved: `tezo train config.yaml` is the same run
plan.json            every parameter: shape, kind, rank, whether it is trained, and how
steps.log            every finished step and evaluation, see `tezo.runs.step_log`
basis-<step>.safetensors   factors that a data-dependent basis computed at that step
feedback-<step>.safetensors   the measurements of a feedback step
metrics.jsonl        one line every `log_every` steps, and one for each evaluation
checkpoint-<step>/   until the run has ended, see `tezo.runs.checkpoints`
adapter/             or model/: the result
answers.json         answers to test rows before and after: counts for each label, and a few rows with their text
summary.json         before, after, time, memory, versions
manifest.json        size and SHA-256 of all of these once the run has ended, see `tezo.runs.files`
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.checkpoints import Checkpoint, newest, remove_checkpoints, save_checkpoint
from tezo.runs.files import LOG as LOG
from tezo.runs.files import MANIFEST, FactorFiles, check_manifest, write_manifest
from tezo.runs.step_log import End, LogContents, NewTotal, Rollback, ScorerChange, StepLog, read_log
from tezo.runs.text_logs import MetricsLog, ScoredLog
from tezo.system.errors import RequestError
from tezo.system.files import (
    NEW,
    check_free,
    new_folder,
    open_plain,
    own_object,
    remove,
    storing,
    sync,
    write_file,
)
from tezo.tasks.evaluation import Metrics

CONFIG, METRICS, SUMMARY, PLAN = "config.yaml", "metrics.jsonl", "summary.json", "plan.json"
ANSWERS, SCORED = "answers.json", "scored.jsonl"
ADAPTER, MODEL = "adapter", "model"
FILES = (CONFIG, PLAN, LOG, METRICS, ANSWERS, SCORED, SUMMARY, ADAPTER, MODEL)
"""Files and folders of a run that has ended, in its manifest; its log has the digests of the others."""


def lost(folder: Path, name: str) -> RequestError:
    """Returns the error of a run folder without a file that every run has."""
    return RequestError(f"{folder} is a run folder that has lost its {name}; put it back, or give another folder.")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Reads the summary of a run; None if the run has not ended, which is when it gets its manifest, or is a replay.

    Raises:
        RequestError: it is damaged, or is not the one that the run wrote.
    """
    if not os.path.lexists(folder / MANIFEST):
        return None
    check_manifest(folder, [SUMMARY])
    if not os.path.lexists(folder / SUMMARY):
        return None
    return own_object(folder / SUMMARY, f"delete {MANIFEST} to go on with the run")


@dataclass
class ResumeState(LogContents):
    """The step log of a run, and the rest of its state for resuming.

    Attributes:
        begun: whether there was a run before.
        checkpoint: the newest that is whole; None: start from the base.
        seconds: spent on steps so far.
        elapsed: seconds that the starts of the run have taken so far, as far as metrics.jsonl says.
        passes: forward passes in them.
        notices: for the user.
        scorer_failed: whether the run ended because its scorer failed, and has not gone on since.
    """

    begun: bool = False
    checkpoint: Checkpoint | None = None
    seconds: float = 0.0
    elapsed: float = 0.0
    passes: float = 0.0
    notices: Sequence[str] = ()
    scorer_failed: bool = False


class RunFolder:
    """The files of one run. One process writes them; the others of the run read them, and their writes do nothing.

    Calls come in this order: `open`, `describe`, steps and evaluations, `append_end`, `finish`; and always `close`.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes
        self._log: StepLog | None = None  # stays None in a process that only reads
        self._digests: Mapping[str, str] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to go on with."""
        return os.path.lexists(self.path / LOG)

    def log(self) -> LogContents | None:
        """Reads the step log; None if there is none, or its process died while it wrote its header."""
        try:
            return read_log(self.path / LOG) if self.has_begun else None
        except RequestError:
            return None  # `open` reports the damage

    def check_free(self, *, resume: bool = False) -> None:
        """Raises a `RequestError` if the folder exists and is not empty; one with a run may be resumed."""
        if self._writes and not (resume and self.has_begun):
            if not self.has_begun and os.path.lexists(self.path / CONFIG):
                raise lost(self.path, LOG)
            check_free(self.path, "give another --output, go on with --resume, or delete it first")

    def open(self, header: dict[str, Any]) -> ResumeState:
        """Begins a run with this header of its step log, or reads the one that is there.

        Raises:
            RequestError: the folder cannot be written, or another process writes it.
        """
        begun = self.has_begun
        if self._writes:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                probe = self.path / ".writable"
                remove(probe)
                os.close(open_plain(probe, NEW))
                probe.unlink()
            except OSError as error:
                raise RequestError(f"output: {self.path} cannot be written ({error.strerror}); give another.") from None
            self._log = StepLog(self.path / LOG, header)
        log = read_log(self.path / LOG) if self._log is None else self._log.contents
        metrics = self._metrics = MetricsLog(self.path / METRICS, log)
        scored = self._scored = ScoredLog(self.path / SCORED, log)
        self._digests = _of_tensors(log)
        if self._writes:
            self.factor_files.check()
        checkpoint, notices = newest(self.path, len(log.steps))
        if log.size > log.valid:
            notices.append(f"an unfinished record of {log.size - log.valid} bytes was cut from {LOG}.")
        for lines in (metrics, scored):
            if lines.unfinished:
                notices.append(f"an unfinished line of {lines.unfinished} bytes was cut from {lines.path.name}.")
        if begun:
            at = "the base" if checkpoint is None else f"checkpoint-{checkpoint.step}"
            notices.append(f"going on after step {len(log.steps)}, from {at} and {LOG}.")
            notices.append(f"counts include the work of earlier starts up to their last line in {METRICS}.")
        return ResumeState(
            **vars(log),
            begun=begun,
            checkpoint=checkpoint,
            seconds=metrics.seconds,
            elapsed=metrics.elapsed,
            passes=metrics.passes,
            notices=notices if self._writes else (),  # one process says them
            scorer_failed=self._scored.has_failed,
        )

    @property
    def factor_files(self) -> FactorFiles:
        """The files of tensors that depend on data; to be called after `open`."""
        saved = None if self._log is None else self._log.append_file
        return FactorFiles(self.path, writes=self._writes, digests=self._digests, saved=saved)

    def describe(self, config: str, plan: Sequence[Mapping[str, Any]]) -> None:
        """Writes config.yaml and plan.json, and their digests into the log."""
        if self._log is not None:
            for name, data in ((CONFIG, config.encode()), (PLAN, _json(plan))):
                write_file(self.path / name, data)
                self._log.append_file(name, hashlib.sha256(data).hexdigest())
            self._metrics.cut_tail()
            self._scored.cut_tail()

    def append_step(self, record: StepRecord) -> None:
        """Adds a step to the log, if it is not there already."""
        if self._log is not None and record.step >= self._log.count:
            self._log.append(record)

    def append_scored(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds the scored answers of a step to scored.jsonl, before the step is in the log."""
        if self._writes:
            self._scored.add(lines)

    def scored(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of scored.jsonl that belong to the steps in the log, in order; to be called after `open`."""
        return self._scored.kept()

    def append_failed(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds answers that could not be scored to scored.jsonl, as of the next step, where a run is open."""
        if self._log is not None:
            self._scored.add_failed([{"step": self._log.count + 1, **line} for line in lines])

    def append_scorer(self, change: ScorerChange) -> None:
        """Adds a change of the scorer to the log."""
        if self._log is not None:
            self._log.append_scorer(change)

    def append_metrics(self, step: int, line: Mapping[str, Any]) -> None:
        """Adds the line of a step to metrics.jsonl, if it is not there already."""
        if self._writes:
            self._metrics.step(step, **line)

    def append_evaluation(
        self,
        split: str,
        step: int,
        metrics: Metrics,
        answers: Sequence[str] = (),
        row_losses: Sequence[float] = (),
    ) -> None:
        """Adds an evaluation to the log and to metrics.jsonl, where it is not there already.

        Answers and losses of rows are added to the log alone.
        """
        if self._log is not None:
            self._log.append_evaluation(split, step, metrics, answers, row_losses)
            self._metrics.evaluation(split, step, metrics)

    def append_rollback(self, rollback: Rollback) -> None:
        """Adds a return to earlier parameters to the log, if it is not there already."""
        if self._log is not None:
            self._log.append_rollback(rollback)

    def append_total(self, total: NewTotal) -> None:
        """Gives the run another number of steps. One that has ended goes on; its result stays until it has another."""
        if self._log is not None:
            with storing(self.path):
                for name in (MANIFEST, SUMMARY, ANSWERS):  # the manifest first: without it the run has not ended
                    remove(self.path / name)
                sync(self.path)
            self._log.append_total(total)

    def append_end(self, end: End) -> None:
        """Adds the end of the run to the log, if it is not there already."""
        if self._log is not None:
            self._log.append_end(end)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint, after the log is on disk, and removes old ones."""
        if self._log is not None:
            self._log.sync()
            save_checkpoint(self.path, checkpoint)

    @contextmanager
    def result(self, name: str) -> Iterator[Path]:
        """Yields a folder for the result, which appears under that name when it is whole."""
        if self._writes:
            with new_folder(self.path / name) as folder:
                yield folder
        else:  # beside the real one: a temporary folder of the system may be on a disk without room
            with storing(self.path / name), TemporaryDirectory(".partial", f".{name}-", self.path) as temporary:
                yield Path(temporary)

    def finish(self, summary: Mapping[str, Any], answers: Mapping[str, Any] | None = None) -> None:
        """Writes answers.json, where there are any, summary.json and manifest.json, and removes the checkpoints."""
        if self._log is not None:
            self._log.sync()
            if answers is not None:
                write_file(self.path / ANSWERS, _json(answers))
            write_file(self.path / SUMMARY, _json(summary))
            write_manifest(self.path, FILES)
            remove_checkpoints(self.path)

    def check_ended(self) -> None:
        """Checks all files of a run that has ended, and removes checkpoints that its process left when it was killed.

        Raises:
            RequestError: a file is not the one that the run wrote; the file is named.
        """
        if self._writes:
            check_manifest(self.path, FILES)
            FactorFiles(self.path, writes=False, digests=_of_tensors(read_log(self.path / LOG))).check()
            remove_checkpoints(self.path)

    def close(self) -> None:
        """Closes the log; the last call, whether the run has finished or not."""
        if self._log is not None:
            self._log.close()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _of_tensors(log: LogContents) -> dict[str, str]:
    """Returns the digests of the files that steps depend on, by name."""
    return {name: digest for name, digest in log.files.items() if name not in (CONFIG, PLAN)}
