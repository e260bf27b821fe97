"""A run folder read back, with every value checked: it may be damaged, cut short or a stranger's."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tezo.optim.estimators.estimate import StepRecord
from tezo.runs.files import check_manifest
from tezo.runs.folder import ANSWERS, CONFIG, LOG, METRICS, PLAN, SCORED, SUMMARY, lost
from tezo.runs.step_log import LogContents, Rollback, read_log
from tezo.runs.text_logs import MOST_SCORED, read_lines, unfinished, value_of
from tezo.runs.words import left_out_text
from tezo.system.errors import RequestError
from tezo.system.files import (
    MOST_JSON,
    MOST_YAML,
    UntrustedError,
    parse_yaml,
    read_bytes,
    read_json,
    read_object,
    reading,
)

MOST_ROWS, MAX_LOG_BYTES, MAX_NUMBER, MAX_DIMENSIONS = 1 << 30, 1 << 28, 1e15, 8
MOST_BINS = 100
ROUND = ("own", "promised", "real", "taken")
"""Figures of a round in metrics.jsonl."""
OUTCOMES = {
    (False, True): "wrong before, right after",
    (True, False): "right before, wrong after",
    (False, False): "wrong before and after",
    (True, True): "right before and after",
}
"""(right before, right after) -> the words for it, in the order in which rows are shown."""

_SUMMARY_NUMBERS = {
    "steps", "kept_step", "num_forward_passes", "seconds_stepping", "peak_memory", "model_bytes", "ranks", "bytes_sent",
    "exchanges", "batch_size",
}  # fmt: skip
_SUMMARY_TYPES = {
    "notices": list, "hardware": str, "versions": dict, "rows": dict, "parameters": dict, "result": dict,
    "losses": dict, "phases": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """How often a label was answered, and how often that was right."""

    answered: int
    right: int


@dataclass(frozen=True)
class LabelCounts:
    """How many rows have a label as their right answer, and the answers before the first step and at the end."""

    label: str
    rows: int
    before: Counts
    after: Counts


@dataclass(frozen=True)
class ShownAnswer:
    """A row and its answers. `right` is empty where there is none, as with a reward, `outcome` for free text."""

    row: str
    text: str
    right: str
    before: str
    after: str
    outcome: str


@dataclass(frozen=True)
class KeptAnswers:
    """The content of answers.json: of the first `rows` of all `of` test rows.

    `outcomes` has numbers of rows and is empty for free text; `labels` is empty where rows do not share their options.
    `confusion` has triples: the numbers of a label and of an answer in `labels`, and how often it was given at the end.
    """

    rows: int
    of: int
    outcomes: Mapping[str, int] = field(default_factory=dict)
    labels: Sequence[LabelCounts] = ()
    confusion: Sequence[tuple[int, int, int]] = ()
    shown: Sequence[ShownAnswer] = ()


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the rows of `split` after `step` steps."""

    split: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Round:
    """Measurements of a step that keeps the outputs of rows, in metrics.jsonl; losses are of the rows of the step.

    Attributes:
        step: its number, from 1.
        own: loss before it.
        promised: loss after the whole step, by the model of the loss.
        real: the same as measured.
        taken: part of the step that was taken; 0: none.
        signal: parameter name -> correlation of the errors predicted from its inputs with those of rows it was not
            fitted to.
    """

    step: int
    own: float
    promised: float
    real: float
    taken: float
    signal: Mapping[str, float]


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer of a reward run in scored.jsonl: of model number `member` to a row, in step number `step` from 1."""

    step: int
    member: int
    row: str
    completion: str
    score: float


@dataclass(frozen=True)
class PlanRow:
    """A parameter in plan.json."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    rank: int | None
    moved: str


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run folder.

    Attributes:
        config: the nested mappings of config.yaml, bounded in size and depth; their keys are not checked.
        records: finished steps, from 0 on.
        evaluations: in the order of their steps.
        times: (finished steps, seconds spent on them) in metrics.jsonl; both rise.
        memory: last peak in metrics.jsonl, in bytes; None: there is none yet.
        rounds: of a method that keeps the outputs of rows, in the order of their steps.
        scored: the answers of the last step in scored.jsonl that have a score.
        summary: None: the run has not ended.
        answers: None: the run has not ended, or has kept none.
        notices: on parts that were left out, for the user.
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
    rounds: Sequence[Round]
    scored: Sequence[ScoredAnswer]
    plan: Sequence[PlanRow]
    summary: dict[str, Any] | None
    answers: KeptAnswers | None
    notices: Sequence[str]

    @cached_property
    def passes(self) -> list[int]:
        """Forward passes after 0, 1, 2, ... steps."""
        return [0, *accumulate(record.forward_passes for record in self.records)]

    def metrics(self, split: str, *, last: bool) -> dict[str, float]:
        """Returns the metrics of the first or last evaluation of `split`; empty where there is none, or no later."""
        found = [evaluation.metrics for evaluation in self.evaluations if evaluation.split == split]
        found = found[1:][-1:] if last else found[:1]
        return found[0] if found else {}


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder, finished or not.

    Raises:
        RequestError: there is none, a file is damaged, or it has no step; the file and fault are named.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder}: there is no such run folder; check the path.")
    missing = [name for name in (CONFIG, LOG) if not (folder / name).is_file()]
    if len(missing) == 1:
        raise lost(folder, missing[0])
    if missing:
        raise RequestError(f"{folder} is no run folder (no {CONFIG} and {LOG}); give one that tezo train has written.")
    way_out = "put a sound copy in its place, or leave this run out"
    try:
        with reading(f"{folder}: a file of this run cannot be read", way_out, but=UntrustedError):
            run = _read_files(folder)
    except UntrustedError as error:
        raise RequestError(f"{folder}: {error}; {way_out}.") from None
    if not run.records:
        raise RequestError(
            f"{folder}: {LOG} has no finished step; go on by its command with --resume, or leave this run out."
        )
    return run


def _read_files(folder: Path) -> RecordedRun:
    ended = os.path.lexists(folder / SUMMARY)
    check_manifest(folder, [CONFIG, PLAN, LOG, METRICS, ANSWERS, SCORED, SUMMARY], required=ended)
    read_bytes(folder / LOG, MAX_LOG_BYTES)
    log = read_log(folder / LOG)
    if not ended:
        _check_described(folder, log)
    metrics, scored = (
        read_bytes(folder / name, most) if os.path.lexists(folder / name) else b""
        for name, most in ((METRICS, MAX_LOG_BYTES), (SCORED, 2 * MOST_SCORED))
    )
    times, memory, rounds = _read_metrics(metrics, checked=log.has_checksums)
    text = read_bytes(folder / CONFIG, MOST_YAML)
    try:
        config = parse_yaml(text)
    except UntrustedError as error:
        raise UntrustedError(f"{CONFIG} {error}") from None
    if not isinstance(config, dict):
        raise UntrustedError(f"{CONFIG} is no configuration")
    evaluations = [Evaluation(split, step, _finite(metrics)) for (split, step), metrics in log.evaluations.items()]
    return RecordedRun(
        folder=folder,
        name=folder.resolve().name or str(folder),
        config=config,
        header=log.header,
        records=log.steps,
        evaluations=sorted((e for e in evaluations if e.step <= len(log.steps)), key=lambda e: e.step),
        rollbacks=[log.rollbacks[step] for step in sorted(log.rollbacks)],
        times=[(step, seconds) for step, seconds in times if step <= len(log.steps)],
        memory=memory,
        rounds=[each for each in rounds if each.step <= len(log.steps)],
        scored=_read_scored(scored, checked=log.has_checksums),
        plan=_read_plan(folder / PLAN),
        summary=_read_summary(folder / SUMMARY),
        answers=_read_answers(folder / ANSWERS),
        notices=[
            left_out_text(name, count)
            for name, count in (
                (LOG, log.size - log.valid),
                (METRICS, unfinished(metrics)),
                (SCORED, unfinished(scored)),
            )
            if count
        ],
    )


def _check_described(folder: Path, log: LogContents) -> None:
    """Raises an `UntrustedError` if a file from the start of a run does not match the digest in its log."""
    for name in (CONFIG, PLAN):
        if name in log.files and hashlib.sha256(read_bytes(folder / name, MOST_JSON)).hexdigest() != log.files[name]:
            raise UntrustedError(f"{name} is not the file that was saved")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _finite(metrics: Any) -> dict[str, float]:
    """Returns the metrics that are numbers; `null` and NaN stand for missing measurements."""
    if not isinstance(metrics, dict) or any(isinstance(v, str | list | dict | bool) for v in metrics.values()):
        raise ValueError
    return {str(key): float(v) for key, v in metrics.items() if v is not None and _is_number(v)}


def _read_metrics(data: bytes, *, checked: bool) -> tuple[list[tuple[int, float]], int | None, list[Round]]:
    """Returns (steps, seconds), both rising, the last peak of memory, and rounds. A cut last line is not read."""
    times: dict[int, float] = {}
    rounds: dict[int, Round] = {}
    memory = None
    for number, line in enumerate(read_lines(data, checked=checked), 1):
        step, split = line.pop("step", None), line.pop("split", None)
        try:
            if split is not None:
                _finite(line)
            elif step is not None and _is_number(line["seconds"]) and _is_count(line["memory"]):
                times[step], memory = float(line["seconds"]), line["memory"]
                if "round" in line:
                    figures, signal = (_finite(line.get(key, {})) for key in ("round", "signal"))
                    rounds[step] = Round(step, **{name: figures[name] for name in ROUND}, signal=signal)
            else:
                raise ValueError
        except (ValueError, KeyError):
            raise UntrustedError(f"{METRICS} is damaged at line {number}") from None
    rising = [(0, 0.0)]
    for step, seconds in sorted(times.items()):
        if step > rising[-1][0] and seconds >= rising[-1][1]:
            rising.append((step, seconds))
    return rising[1:], memory, [rounds[step] for step in sorted(rounds)]


def _read_scored(data: bytes, *, checked: bool) -> list[ScoredAnswer]:
    found: list[ScoredAnswer] = []
    for text in reversed(data[: len(data) - unfinished(data)].splitlines()):
        try:
            line = value_of(text, checked=checked)
            step = _count(line["step"])
            if found and step != found[0].step:
                break
            if line["score"] is not None:
                score = _finite({"score": line["score"]})["score"]
                words = line["row"], line["completion"]
                if not all(isinstance(word, str) for word in words):
                    raise ValueError
                found.append(ScoredAnswer(step, _count(line["member"]), *words, score))
        except (ValueError, KeyError):
            raise UntrustedError(f"{SCORED} is damaged in its last step") from None
    return found[::-1]


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


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    summary = read_object(path)

    def check(key: str, fits: bool) -> None:
        if not fits:
            raise UntrustedError(f"{path.name}: {key} is {str(summary[key])[:40]!r}")

    for key, value in summary.items():
        check(key, _is_number(value) if key in _SUMMARY_NUMBERS else isinstance(value, _SUMMARY_TYPES.get(key, object)))
    summary["calibration"] = found = summary.get("calibration")
    check("calibration", found is None or (isinstance(found, dict) and _is_calibration(found)))
    for spent in summary.get("phases", {}).values():
        check("phases", isinstance(spent, dict) and all(_is_number(spent.get(key)) for key in ("seconds", "passes")))
    for key in ("before", "after"):
        try:
            summary[key] = _finite(summary.get(key, {}))
        except ValueError:
            check(key, fits=False)
    return summary


def _is_calibration(found: Mapping[str, Any]) -> bool:
    bins, temperature = found.get("bins"), found.get("temperature")
    return (
        (temperature is None or (_is_number(temperature) and temperature > 0))
        and isinstance(bins, list)
        and len(bins) <= MOST_BINS
        and all(isinstance(one, dict) and _is_count(one.get("rows")) for one in bins)
        and all(_is_number(one.get(key)) and 0 <= one[key] <= 1 for one in bins for key in ("sure", "right"))
    )


def _read_answers(path: Path) -> KeptAnswers | None:
    if not os.path.lexists(path):
        return None
    tree = read_object(path)
    try:
        labels = [_label(entry) for entry in tree.get("labels", [])]
        return KeptAnswers(
            rows=_count(tree["rows"]),
            of=_count(tree["of"]),
            outcomes={str(outcome): _count(number) for outcome, number in tree.get("outcomes", {}).items()},
            labels=labels,
            confusion=_confusion(tree.get("confusion", []), labels),
            shown=[_shown(entry) for entry in tree["shown"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UntrustedError(f"{path.name} has no counts of answers") from None


def _count(value: Any) -> int:
    if not _is_count(value) or value >= MOST_ROWS:
        raise ValueError
    return int(value)


def _label(entry: Any) -> LabelCounts:
    counts = [Counts(_count(entry[when]["answered"]), _count(entry[when]["right"])) for when in ("before", "after")]
    rows = _count(entry["rows"])
    if any(one.right > min(rows, one.answered) for one in counts) or not isinstance(entry["label"], str):
        raise ValueError
    return LabelCounts(entry["label"], rows, *counts)


def _confusion(triples: Any, labels: Sequence[LabelCounts]) -> list[tuple[int, int, int]]:
    found = [(_count(label), _count(answer), _count(rows)) for label, answer, rows in triples]
    if any(max(label, answer) >= len(labels) for label, answer, _ in found):
        raise ValueError
    return found


def _shown(entry: Any) -> ShownAnswer:
    texts = [entry[key] for key in ("row", "text", "right", "before", "after")] + [entry.get("outcome", "")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    return ShownAnswer(*texts)
