"""answers.json of a run read back, with every value checked; `tezo.training.evaluations` makes it.

A run folder read back, with every file checked: it may be damaged, cut short or a stranger's.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.files import check_manifest
from tezo.runs.folder import ANSWERS, CONFIG, LOG, METRICS, PLAN, SUMMARY, lost
from tezo.runs.metrics_log import read_lines
from tezo.runs.step_log import Rollback, read_log
from tezo.system.errors import RequestError
from tezo.system.files import MOST_YAML, UntrustedError, parse_yaml, read_bytes, read_json, read_object, reading

MOST_ROWS = 1 << 30
OUTCOMES = {
    (False, True): "wrong before, right after",
    (True, False): "right before, wrong after",
    (False, False): "wrong before and after",
    (True, True): "right before and after",
}
"""(right before, right after) -> the words for it, in the order in which rows are shown."""


@dataclass(frozen=True)
class Counts:
    """How often a label was answered, and how often that was right."""

    answered: int
    right: int


@dataclass(frozen=True)
class LabelCounts:
    """Answers to the rows of one label.

    Attributes:
        label: its name.
        rows: number of rows whose right answer it is.
        before: answers with this label before the first step.
        after: those with the parameters that were kept.
    """

    label: str
    rows: int
    before: Counts
    after: Counts


@dataclass(frozen=True)
class ShownAnswer:
    """A row with its text, the right answer and the answers before and after.

    `right` is empty where there is none, as with a reward; `outcome` is empty for free text.
    """

    row: str
    text: str
    right: str
    before: str
    after: str
    outcome: str


@dataclass(frozen=True)
class KeptAnswers:
    """The content of answers.json.

    Attributes:
        rows: number of rows that were counted, the first ones of the test rows.
        of: number of test rows.
        outcomes: in words -> number of rows; empty for free text.
        labels: empty where rows do not share their options.
        shown: a few rows.
    """

    rows: int
    of: int
    outcomes: Mapping[str, int] = field(default_factory=dict)
    labels: Sequence[LabelCounts] = ()
    shown: Sequence[ShownAnswer] = ()


def read_answers(path: Path) -> KeptAnswers | None:
    """The file; None where there is none.

    Raises:
        UntrustedError: it is damaged.
    """
    if not os.path.lexists(path):
        return None
    tree = read_object(path)
    try:
        return KeptAnswers(
            rows=_count(tree["rows"]),
            of=_count(tree["of"]),
            outcomes={str(outcome): _count(number) for outcome, number in tree.get("outcomes", {}).items()},
            labels=[_label(entry) for entry in tree.get("labels", [])],
            shown=[_shown(entry) for entry in tree["shown"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UntrustedError(f"{path.name} has no counts of answers") from None


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_ROWS:
        raise ValueError
    return value


def _label(entry: Any) -> LabelCounts:
    counts = [Counts(_count(entry[when]["answered"]), _count(entry[when]["right"])) for when in ("before", "after")]
    rows = _count(entry["rows"])
    if any(one.right > min(rows, one.answered) for one in counts):
        raise ValueError
    return LabelCounts(_text(entry["label"]), rows, *counts)


def _shown(entry: Any) -> ShownAnswer:
    row, text, right, before, after = (_text(entry[key]) for key in ("row", "text", "right", "before", "after"))
    return ShownAnswer(row, text, right, before, after, _text(entry.get("outcome", "")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


MAX_LOG_BYTES = 1 << 28
MAX_NUMBER, MAX_DIMENSIONS = 1e15, 8
MIN_STEPS = 2

_SUMMARY_NUMBERS = {
    "steps", "kept_step", "num_forward_passes", "seconds_stepping", "peak_memory", "model_bytes", "ranks", "bytes_sent",
    "exchanges",
}  # fmt: skip
_SUMMARY_TYPES = {
    "notices": list, "hardware": str, "versions": dict, "rows": dict, "parameters": dict, "result": dict,
    "losses": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the rows of `split` after `step` steps."""

    split: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class PlanRow:
    """A parameter in plan.json."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    rank: int | None
    moved: str


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    Attributes:
        folder: as it was given.
        name: of the folder.
        config: the nested mappings of config.yaml, bounded in size and depth; their keys are not checked.
        header: of steps.log.
        records: finished steps, from 0 on.
        evaluations: in the order of their steps.
        rollbacks: returns to earlier steps, likewise.
        times: (finished steps, seconds spent on them) in metrics.jsonl; both rise.
        memory: last peak in metrics.jsonl, in bytes; None: there is none yet.
        plan: plan.json.
        summary: summary.json; None: the run has not ended.
        answers: answers.json; None: the run has not ended, or has kept none.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    header: dict[str, Any]
    records: Sequence[StepRecord]
    evaluations: Sequence[Evaluation]
    rollbacks: Sequence[Rollback]
    times: Sequence[tuple[int, float]]
    memory: int | None
    plan: Sequence[PlanRow]
    summary: dict[str, Any] | None
    answers: KeptAnswers | None

    @cached_property
    def passes(self) -> list[int]:
        """Forward passes after 0, 1, 2, ... steps."""
        return [0, *accumulate(record.forward_passes for record in self.records)]

    def metrics(self, split: str, *, last: bool) -> dict[str, float]:
        """Metrics of the first or last evaluation of `split`; empty where there is none."""
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
        raise no_run(folder)
    way_out = "put a sound copy in its place, or leave this run out"
    try:
        with reading(f"{folder}: a file of this run cannot be read", way_out, but=UntrustedError):
            run = _read_files(folder)
    except UntrustedError as error:
        raise RequestError(f"{folder}: {error}; {way_out}.") from None
    if len(run.records) < MIN_STEPS:
        raise RequestError(
            f"{folder}: {LOG} has {len(run.records)} finished steps, and a curve needs {MIN_STEPS}; "
            "go on with tezo train --resume, or leave this run out."
        )
    return run


def no_run(folder: Path) -> RequestError:
    """Of a folder that lacks what every run has; what is missing is named."""
    missing = [name for name in (CONFIG, LOG) if not (folder / name).is_file()]
    if len(missing) == 1:
        return lost(folder, missing[0])
    return RequestError(f"{folder} is no run folder (no {CONFIG} and {LOG}); give one that tezo train has written.")


def _read_files(folder: Path) -> Run:
    ended = os.path.lexists(folder / SUMMARY)
    check_manifest(folder, [CONFIG, PLAN, LOG, METRICS, ANSWERS, SUMMARY], required=ended)
    read_bytes(folder / LOG, MAX_LOG_BYTES)
    log = read_log(folder / LOG)
    times, memory = _read_metrics(folder / METRICS)
    evaluations = {key: _finite_metrics(metrics) for key, metrics in log.evaluations.items()}
    return Run(
        folder=folder,
        name=folder.resolve().name or str(folder),
        config=_read_config(folder / CONFIG),
        header=log.header,
        records=log.steps,
        evaluations=[
            Evaluation(split, step, metrics)
            for (split, step), metrics in sorted(evaluations.items(), key=lambda item: item[0][1])
            if step <= len(log.steps)
        ],
        rollbacks=[log.rollbacks[step] for step in sorted(log.rollbacks)],
        times=[(step, seconds) for step, seconds in times if step <= len(log.steps)],
        memory=memory,
        plan=_read_plan(folder / PLAN),
        summary=_read_summary(folder / SUMMARY),
        answers=read_answers(folder / ANSWERS),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(read_bytes(path, MOST_YAML))
    except UntrustedError as error:
        raise UntrustedError(f"{path.name} {error}") from None
    if not isinstance(tree, dict):
        raise UntrustedError(f"{path.name} is no configuration")
    return tree


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _finite_metrics(value: Any) -> dict[str, float]:
    """The metrics that are numbers; `null` and NaN stand for what could not be measured."""
    if not isinstance(value, dict) or any(isinstance(v, str | list | dict | bool) for v in value.values()):
        raise ValueError
    return {str(key): float(v) for key, v in value.items() if v is not None and _is_number(v)}


def _read_metrics(path: Path) -> tuple[list[tuple[int, float]], int | None]:
    """Times and memory. A killed process may leave an unfinished last line, which is not read."""
    times: dict[int, float] = {}
    memory = None
    for number, line in enumerate(read_lines(read_bytes(path, MAX_LOG_BYTES) if os.path.lexists(path) else b""), 1):
        step, split = line.pop("step", None), line.pop("split", None)
        try:
            if split is not None:
                _finite_metrics(line)
            elif step is not None and _is_number(line["seconds"]) and _is_count(line["memory"]):
                times[step], memory = float(line["seconds"]), line["memory"]
            else:
                raise ValueError
        except (ValueError, KeyError):
            raise UntrustedError(f"{path.name} is damaged at line {number}") from None
    return _rising(times), memory


def _rising(times: dict[int, float]) -> list[tuple[int, float]]:
    """(steps, seconds) in the order of steps, without those whose seconds fall."""
    kept = [(0, 0.0)]
    for step, seconds in sorted(times.items()):
        if step > kept[-1][0] and seconds >= kept[-1][1]:
            kept.append((step, seconds))
    return kept[1:]


def _read_plan(path: Path) -> list[PlanRow]:
    if not os.path.lexists(path):  # the process was killed before it wrote one
        return []
    rows = read_json(path)
    try:
        return [_plan_row(row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UntrustedError(f"{path.name} is no list of parameters") from None


def _plan_row(row: Any) -> PlanRow:
    shape, rank = row["shape"], row.get("rank")
    if len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)) or not (rank is None or _is_count(rank)):
        raise ValueError
    return PlanRow(str(row["name"]), tuple(shape), bool(row["trained"]), rank, str(row.get("moved", "")))


def _is_spent(value: Any) -> bool:
    """Whether it is what a phase of a run has taken."""
    return isinstance(value, dict) and all(_is_number(value.get(key)) for key in ("seconds", "passes"))


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    summary = read_object(path)
    for key, value in summary.items():
        fits = _is_number(value) if key in _SUMMARY_NUMBERS else isinstance(value, _SUMMARY_TYPES.get(key, object))
        if not fits:
            raise UntrustedError(f"{path.name}: {key} is {str(value)[:40]!r}")
    phases = summary.get("phases", {})
    if not isinstance(phases, dict) or not all(map(_is_spent, phases.values())):
        raise UntrustedError(f"{path.name}: phases is {str(phases)[:40]!r}")
    for key in ("before", "after"):
        try:
            summary[key] = _finite_metrics(summary.get(key, {}))
        except ValueError:
            raise UntrustedError(f"{path.name}: {key} is {str(summary[key])[:40]!r}") from None
    return summary
