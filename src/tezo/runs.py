"""A run folder, and the listeners that follow a run.

config.yaml     resolved: `tezo train config.yaml` is the same run
plan.json       every parameter: shape, kind, rank, trained or not, and how
metrics.jsonl   a line every `log_every` steps, and one for each evaluation
adapter/        or model/: the result
summary.json    before, after, time, memory, versions
"""

import json
import math
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tezo.config import dump_config
from tezo.errors import RequestError, RunError
from tezo.evaluate import Metrics
from tezo.job import Job
from tezo.methods import Tuner
from tezo.objectives import Encoded
from tezo.spsa import StepRecord


@dataclass(frozen=True)
class Progress:
    """A finished step: its record, seconds since the first, bytes of memory at the peak."""

    record: StepRecord
    seconds: float
    memory: int


class Listener:
    """Follows a run; a subclass overrides what it wants to hear of. Calls come in the order of what they report."""

    def started(self, job: Job) -> None:
        """All is ready; nothing has been evaluated yet."""

    def stepping(self, step: int) -> None:
        """Step number `step`, from 0, is about to be taken."""

    def stepped(self, progress: Progress) -> None:
        """A step is finished."""

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        """`split` ("dev" or "test") was evaluated after `step` steps."""

    def finished(self, summary: dict[str, Any]) -> None:
        """The result is saved."""

    def closed(self) -> None:
        """The run is over, finished or not; the last call, and the only one that always comes."""

    @property
    def wants_stop(self) -> bool:
        """Whether the run should end after this step."""
        return False


@dataclass
class RunFolder(Listener):
    """Writes a run's files. The folder is made when the run starts, not before."""

    path: Path
    _log_every: int = field(default=1, init=False)

    def check_free(self) -> None:
        """An error where the folder exists and is not empty."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RequestError(f"output: {self.path} is in use; give another --output, or delete it first.")

    def started(self, job: Job) -> None:
        self._log_every = job.config.train.log_every
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(dump_config(job.config), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"output: {self.path} cannot be written ({error.strerror}); give another.") from None
        self.write_json("plan.json", plan(job.model, job.optimizer))

    def stepped(self, progress: Progress) -> None:
        record = progress.record
        if (record.step + 1) % self._log_every == 0:
            self._append(
                step=record.step + 1,
                loss=record.loss,
                projected_grads=list(record.projected_grads),
                lr=record.lr,
                seconds=round(progress.seconds, 3),
                memory=progress.memory,
            )

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        self._append(step=step, split=split, **metrics)

    def finished(self, summary: dict[str, Any]) -> None:
        self.write_json("summary.json", summary)

    def write_json(self, name: str, value: Any) -> None:
        """Writes one JSON file of the folder."""
        (self.path / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _append(self, **line: Any) -> None:
        # JSON has no NaN: what could not be measured is null
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def plan(model: Any, optimizer: Tuner) -> list[dict[str, Any]]:
    """What happens to every parameter of the model: shape, kind, rank, trained or not, and how it is moved."""
    targets = {target.name: target for target in optimizer.targets}
    rows: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        row: dict[str, Any] = {"name": name, "shape": list(parameter.shape), "trained": name in targets}
        if name in targets:
            rank, manner = optimizer.manner(name)
            row |= {"kind": targets[name].kind, "rank": rank, "moved": manner}
            row["also"] = [site.name for site in targets[name].sites[1:]]
        rows.append(row)
    return rows


def peak_memory() -> int:
    """Bytes: the most reserved on the GPU, or on a CPU the peak resident set of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def memory_for(what: str, rows: Sequence[Encoded], key: str) -> Iterator[None]:
    """Turns an allocation that fails inside into an error that says what to lower.

    Args:
        what: is being done, in words.
        rows: it is done with.
        key: the setting that decides how many at once.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refused = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not refused:
            raise
        longest = max((encoded.length for encoded in rows), default=0)
        raise RunError(
            f"out of memory at {what}, with {len(rows)} rows of up to {longest} tokens. "
            f"Lower {key} or data.max_length, or set model.dtype=bfloat16."
        ) from error


def versions(packages: Sequence[str] = ("tezo", "torch", "transformers", "peft", "numpy")) -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def hardware() -> str:
    """The processor or GPU, in words."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
