"""What a run folder says, checked: the files may be damaged, cut short or a stranger's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.estimators.estimate import StepRecord
from tezo.files import UntrustedError, read_bytes, read_json, read_object
from tezo.runs.folder import CONFIG, LOG, METRICS, SUMMARY
from tezo.runs.metrics_log import MOST_LINE
from tezo.runs.step_log import read_log
from tezo.training.config import read_config
from tezo.training.recipe import Config

MOST_CONFIG, MOST_LOG, MOST_NUMBER, MOST_SIZES = 1 << 20, 1 << 28, 1e15, 8
"""Bounds on bytes of files, on numbers, and on the sizes of a shape."""
LEAST_STEPS = 2

_NUMBERS = {
    "steps", "kept_step", "num_forward_passes", "seconds_stepping", "peak_memory", "model_bytes", "ranks", "bytes_sent",
    "exchanges",
}  # fmt: skip
_KINDS = {"notices": list, "hardware": str, "versions": dict, "rows": dict, "parameters": dict, "result": dict}


@dataclass(frozen=True)
class Evaluation:
    """Metrics of `split` after `step` steps."""

    split: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class PlanRow:
    """A parameter, of plan.json."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    rank: int | None
    moved: str


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        folder: as it was given.
        name: of the folder.
        config: config.yaml.
        header: of steps.log.
        records: finished steps, from 0 on.
        evaluations: in the order of their steps.
        times: (steps, seconds spent on them), of metrics.jsonl; rising.
        memory: bytes at the peak, as last said; None: not said yet.
        plan: plan.json.
        summary: summary.json; None where the run has not ended.
    """

    folder: Path
    name: str
    config: Config
    header: dict[str, Any]
    records: Sequence[StepRecord]
    evaluations: Sequence[Evaluation]
    times: Sequence[tuple[int, float]]
    memory: int | None
    plan: Sequence[PlanRow]
    summary: dict[str, Any] | None

    @cached_property
    def passes(self) -> list[int]:
        """Forward passes after 0, 1, 2, ... steps."""
        return [0, *accumulate(record.forward_passes for record in self.records)]

    def metrics(self, split: str, *, last: bool) -> dict[str, float]:
        """Of the first or last evaluation of `split`; empty where there is none."""
        found = [evaluation.metrics for evaluation in self.evaluations if evaluation.split == split]
        return found[-1 if last else 0] if found else {}


def read_run(folder: Path) -> Run:
    """Reads a run folder, finished or not.

    Raises:
        RequestError: there is none, a file is damaged, or it has fewer than two steps; the file and fault are named.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder}: there is no such run folder; check the path.")
    if not all((folder / name).is_file() for name in (CONFIG, LOG)):
        raise RequestError(f"{folder} is no run folder (no {CONFIG} and {LOG}); give one that tezo train has written.")
    try:
        read_bytes(folder / LOG, MOST_LOG)
        contents = read_log(folder / LOG)
        evaluations, times, memory = _read_metrics(folder / METRICS)
        run = Run(
            folder=folder,
            name=folder.resolve().name or str(folder),
            config=_read_config(folder / CONFIG),
            header=contents.header,
            records=[step.record for step in contents.steps],
            evaluations=evaluations,
            times=times,
            memory=memory,
            plan=_read_plan(folder / "plan.json"),
            summary=_read_summary(folder / SUMMARY),
        )
    except UntrustedError as error:
        raise RequestError(f"{folder}: {error}; put a sound copy in its place, or leave this run out.") from None
    if len(run.records) < LEAST_STEPS:
        raise RequestError(
            f"{folder}: {LOG} has {len(run.records)} finished steps, and a curve needs {LEAST_STEPS}; "
            "go on with tezo train --resume, or leave this run out."
        )
    return run


def _read_config(path: Path) -> Config:
    read_bytes(path, MOST_CONFIG)
    try:
        return read_config(path, [])
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0].rstrip(".")
        raise UntrustedError(f"{path.name} is no configuration ({reason})") from None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_NUMBER


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value) and value >= 0


def _metrics_of(value: Any) -> dict[str, float]:
    """The metrics that are numbers; `null` and NaN stand for what could not be measured."""
    if not isinstance(value, dict) or any(isinstance(v, str | list | dict | bool) for v in value.values()):
        raise ValueError
    return {str(key): float(v) for key, v in value.items() if v is not None and _number(v)}


def _read_metrics(path: Path) -> tuple[list[Evaluation], list[tuple[int, float]], int | None]:
    """Evaluations, times and memory; an unfinished last line is what a killed process leaves, and left out."""
    found: dict[tuple[str, int], Evaluation] = {}
    times: dict[int, float] = {}
    memory = None
    data = read_bytes(path, MOST_LOG) if path.exists() else b""
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line: dict[str, Any] = json.loads(text[: MOST_LINE + 1])
            step = line.pop("step")
            if not _count(step):
                raise ValueError
            if "split" in line:
                split = str(line.pop("split"))
                found[split, step] = Evaluation(split, step, _metrics_of(line))
            elif _number(line["seconds"]) and _count(line["memory"]):
                times[step], memory = float(line["seconds"]), line["memory"]
            else:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UntrustedError(f"{path.name} is damaged at line {number}") from None
    return sorted(found.values(), key=lambda evaluation: evaluation.step), _rising(times), memory


def _rising(times: dict[int, float]) -> list[tuple[int, float]]:
    """Those in the order of steps that take no time back."""
    kept = [(0, 0.0)]
    for step, seconds in sorted(times.items()):
        if step > kept[-1][0] and seconds >= kept[-1][1]:
            kept.append((step, seconds))
    return kept[1:]


def _read_plan(path: Path) -> list[PlanRow]:
    if not path.exists():  # the process was killed before it
        return []
    rows = read_json(path)
    try:
        return [_plan_row(row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UntrustedError(f"{path.name} is no list of parameters") from None


def _plan_row(row: Any) -> PlanRow:
    shape, rank = row["shape"], row.get("rank")
    if len(shape) > MOST_SIZES or not all(_count(size) for size in shape) or not (rank is None or _count(rank)):
        raise ValueError
    return PlanRow(str(row["name"]), tuple(shape), bool(row["trained"]), rank, str(row.get("moved", "")))


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    summary = read_object(path)
    for key, value in summary.items():
        sound = _number(value) if key in _NUMBERS else isinstance(value, _KINDS.get(key, object))
        if not sound:
            raise UntrustedError(f"{path.name}: {key} is {str(value)[:40]!r}")
    for key in ("before", "after"):
        try:
            summary[key] = _metrics_of(summary.get(key, {}))
        except ValueError:
            raise UntrustedError(f"{path.name}: {key} is {str(summary[key])[:40]!r}") from None
    return summary
