"""The tables of a report, and the losses and settings of a run in words."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tezo.methods import defaults_by
from tezo.models.kinds import ModelConfig
from tezo.report.curves import OUTLIER_RMS, dev_losses, group_parameters, kappa_statistics, kappas
from tezo.runs.reader import LabelCounts, RecordedRun
from tezo.runs.words import (
    OPTIONS_LOSS,
    TEXT_LOSS,
    change_text,
    count_text,
    least_text,
    measured_rows_text,
    metric_text,
    minus,
    work_of,
)
from tezo.system.errors import RequestError
from tezo.system.progress import duration_text
from tezo.tasks.row_files import DataConfig
from tezo.tasks.scoring import REWARD
from tezo.training.settings import Config, TrainConfig, parse_config, to_tree

MISSING = "\N{EN DASH}"
ARROW = "\N{NO-BREAK SPACE}\N{RIGHTWARDS ARROW} "
"""Between a value before and the one after it."""
MOST_LABELS = MOST_ROUNDS = 100
"""Labels, and rounds, on the page; a stranger's file can name thousands."""


MOST_CONFUSED = 20
"""Labels of a table with a column for each; of more labels as many mistakes are listed."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: the text that is shown.
        value: that it stands for; None: the text is all there is.
        bar: shares before and after from 0 to 1, shown as a bar beside the text; None: nothing is.
    """

    text: str = MISSING
    value: Any = None
    bar: tuple[float, float] | None = None


Row = tuple[str, Sequence[Cell]]


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Row]


def cell(value: Any, text: Callable[[Any], str] | None = None) -> Cell:
    """Returns a cell of a value: by default a count with its thousands apart, or anything else with four digits."""
    if value is None:
        return Cell()
    if text is not None:
        return Cell(text(value), value)
    if isinstance(value, int):
        return Cell(count_text(value), value)
    return Cell(f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}", value)


def _bytes_text(value: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value} bytes"


def _setting_cell(value: Any) -> Cell:
    return Cell("none" if value is None else str(value))


# The records of a run about itself


def run_config(run: RecordedRun) -> Config:
    """Returns the configuration in a run's config.yaml.

    Raises:
        RequestError: it has an unknown key or a value that does not fit; folder, file and key are named.
    """
    try:
        return parse_config(run.config)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0].rstrip(".")[:200]
        raise RequestError(
            f"{run.folder}: config.yaml is no configuration ({reason}); "
            "put a sound copy in its place, or leave this run out."
        ) from None


def row_loss(run: RecordedRun) -> str:
    """Returns a description of the loss of dev and test rows; runs with the same description share a chart."""
    names = {name for evaluation in run.evaluations for name in evaluation.metrics}
    if said := _said(run, "rows"):
        return said
    if REWARD in names:
        return minus(REWARD)
    if "token_accuracy" in names:
        return TEXT_LOSS
    return OPTIONS_LOSS if "accuracy" in names else "loss"


def step_loss(run: RecordedRun) -> str:
    """Returns a description of the loss of a step on its batch."""
    settings = run_config(run).train
    return _said(run, "steps") or (row_loss(run) if settings.minimises_loss else minus(settings.objective))


def _said(run: RecordedRun, part: str) -> str | None:
    """Returns the description of a loss in the summary; None if there is none, or one of an earlier version."""
    said = (run.summary or {}).get("losses", {}).get(part)
    return said if isinstance(said, str) else None


def shown_path(name: str) -> str:
    """Returns a name, and only the last part of an absolute path, to show it to others."""
    path = Path(name)
    return path.name if path.is_absolute() else name


def trained_share(run: RecordedRun) -> str:
    """Returns how many numbers are trained, in words."""
    found = group_parameters(run.plan)
    trained, total = sum(group.numbers for group in found if group.moved), sum(group.numbers for group in found)
    return f"{count_text(trained)} of {count_text(total)} numbers" if total else MISSING


def command(run: RecordedRun) -> str:
    """Returns the line that makes the run again in a new folder, from where the page is made."""
    name = f"{run.name}-again"
    again = run.folder.parent / name if run.folder.name == run.name else Path("..") / name
    ranks = int((run.summary or {}).get("ranks", 1))
    program = f"torchrun --standalone --nproc-per-node {ranks} -m tezo" if ranks > 1 else "tezo"
    # ./ so that no program takes a path for an option
    config, output = (
        shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
        for path in (run.folder / "config.yaml", again)
    )
    return f"{program} train {config} --output {output}"


def settings(run: RecordedRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (all settings of a run, those of them that differ from the defaults), by dotted key."""
    config = run_config(run)
    known = {"model": ModelConfig(name=""), "data": DataConfig(), "train": TrainConfig()}
    defaults = {f"{name}.{key}": value for name, section in known.items() for key, value in vars(section).items()}
    options = defaults_by(config.method.name)
    defaults |= {"method.name": None, **{f"method.{key}": value for key, value in options.items()}}
    given = {f"{section}.{key}": value for section, values in to_tree(config).items() for key, value in values.items()}
    every: dict[str, Any] = {}
    for key, value in {**defaults, **given}.items():
        every |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return every, {key: value for key, value in every.items() if value != defaults.get(key)}


# Tables of one run


def settings_table(values: Mapping[str, Any], caption: str) -> Table:
    """Returns a table with a line for each setting."""
    return Table(caption, ("key", "value"), [(key, [_setting_cell(value)]) for key, value in sorted(values.items())])


def metric_rows(before: Mapping[str, float], after: Mapping[str, float]) -> list[Row]:
    """Returns a row for each metric: before, after, and the change between them."""
    rows: list[Row] = []
    for name in dict.fromkeys([*before, *after]):
        start, end, change = before.get(name), after.get(name), Cell()
        if start is not None and end is not None:
            change = Cell(change_text(name, start, end), end - start)
        rows.append((name, [cell(value, partial(metric_text, name)) for value in (start, end)] + [change]))
    return rows


def metrics_table(run: RecordedRun) -> Table:
    """Returns metrics before and after of a run that has ended; else the first and last evaluation of each split."""
    if run.summary is not None:
        of = measured_rows_text(run.summary)
        rows = metric_rows(run.summary["before"], run.summary["after"])
        return Table(f"Before and after{f' on {of}' if of else ''}", ("metric", "before", "after", "change"), rows)
    rows = [
        (f"{split} {name}", cells)
        for split in dict.fromkeys(evaluation.split for evaluation in run.evaluations)
        for name, cells in metric_rows(run.metrics(split, last=False), run.metrics(split, last=True))
    ]
    return Table("First and last evaluation so far", ("metric", "first", "last", "change"), rows)


def costs(run: RecordedRun) -> dict[str, Cell]:
    """Returns memory, time and work of a run."""
    summary, steps = run.summary or {}, len(run.records)
    seconds = summary.get("seconds_stepping", run.times[-1][1] if run.times else None)
    timed = steps if "seconds_stepping" in summary else (run.times[-1][0] if run.times else 0)
    passes = max(1, run.passes[min(timed, steps)])
    known = seconds if timed else None
    all_passes, all_seconds = work_of(summary)
    found = {"steps": Cell(f"{steps} of {run_config(run).train.steps}", steps)}
    if "kept_step" in summary:
        found["step kept"] = cell(summary["kept_step"])
    least = least_text(summary)
    of_all = run.passes[-1] if all_passes is None else round(all_passes)
    found["forward passes"] = cell(of_all, lambda count: least + count_text(count))
    found["time"] = cell(seconds if all_seconds is None else all_seconds, lambda value: least + duration_text(value))
    for name, spent in summary.get("phases", {}).items():
        found[f"of it {name}"] = Cell(f"{duration_text(spent['seconds'])}, {spent['passes']:,.0f} passes")
    found["time spent on steps"] = cell(seconds, duration_text)
    found["seconds a step"] = cell(None if known is None else known / timed)
    counted = "an evaluation of the reward" if run_config(run).train.objective == REWARD else "a forward pass"
    found[f"seconds {counted}"] = cell(None if known is None else known / passes)
    found["peak memory"] = cell(summary.get("peak_memory", run.memory), _bytes_text)
    if "model_bytes" in summary:
        found["of it the model"] = cell(summary["model_bytes"], _bytes_text)
    if summary.get("ranks", 1) > 1:
        found["processes"] = cell(summary["ranks"])
        found["bytes exchanged by each"] = cell(summary.get("bytes_sent"), _bytes_text)
        found["exchanges"] = cell(summary.get("exchanges"))
    return found


def hardware_and_versions(run: RecordedRun) -> dict[str, Cell]:
    """Returns hardware and versions."""
    header, summary = run.header.get("versions"), run.summary or {}
    versions = summary.get("versions", header if isinstance(header, dict) else {})
    place = summary.get("hardware", run.header.get("device"))
    return {name: _setting_cell(value) for name, value in {"hardware": place, **versions}.items()}


def rounds_table(run: RecordedRun) -> Table | None:
    """Returns a line for each step that kept the outputs of rows; None where there is none."""
    dev = dict(dev_losses(run))
    rows = []
    for step in run.rounds[:MOST_ROUNDS]:
        best = max(step.signal.items(), key=lambda found: found[1], default=None)
        losses = [cell(step.own), cell(step.promised), cell(step.real), cell(step.taken, "{:.0%}".format)]
        found = [Cell(), Cell()] if best is None else [cell(best[1], "{:.2f}".format), Cell(best[0])]
        rows.append((str(step.step), [*losses, cell(dev.get(step.step)), *found]))
    head = ("round", "loss before", "promised", "measured", "taken", "dev loss after", "best signal", "of")
    return Table("Rounds", head, rows) if rows else None


def kappa_table(run: RecordedRun) -> Table | None:
    """Returns statistics of the projected gradients; None where there are none."""
    found = kappa_statistics([kappa for _, kappa in kappas(run)])
    if found is None:
        return None
    figures = {"kappas": found.count, "mean": found.mean, "rms": found.rms, "largest, absolute": found.largest}
    rows = [(name, [cell(value)]) for name, value in figures.items()]
    rows.append((f"share beyond {OUTLIER_RMS} rms", [cell(found.outliers, partial(metric_text, ""))]))
    return Table("Projected gradients", ("", "kappa"), rows)


def plan_table(run: RecordedRun) -> Table:
    """Returns a line for every group of trained parameters, and one for all the others."""
    found = group_parameters(run.plan)
    rows = []
    for group in (group for group in found if group.moved):
        shape = " \N{MULTIPLICATION SIGN} ".join(map(str, group.shape)) or "one number"
        rank = Cell("dense") if group.rank is None else Cell(str(group.rank), group.rank)
        cells = [Cell(group.layers or MISSING), cell(group.tensors), Cell(shape), rank]
        rows.append((group.name, [*cells, cell(group.numbers), Cell(group.moved)]))
    idle = [group for group in found if not group.moved]
    if idle:
        tensors, numbers = (cell(sum(getattr(g, key) for g in idle)) for key in ("tensors", "numbers"))
        rows.append(("all others: not trained", [Cell(), tensors, Cell(), Cell(), numbers, Cell()]))
    return Table("Parameters", ("name", "layers", "tensors", "shape", "rank", "numbers", "moved"), rows)


def labels_table(labels: Sequence[LabelCounts]) -> Table:
    """Returns rows, right answers, recall and precision of each label before and after, and of all labels together."""
    rows = [
        (one.label, [*_right(one.rows, one.before.right, one.after.right),
                     _shares(one.before.right, one.after.right, one.before.answered, one.after.answered)])
        for one in labels[:MOST_LABELS]
    ]  # fmt: skip
    total, before, after = (
        sum(counts) for counts in zip(*((one.rows, one.before.right, one.after.right) for one in labels), strict=True)
    )
    rows.append(("all labels", [*_right(total, before, after), Cell()]))
    left_out = len(labels) - MOST_LABELS
    caption = "Answers by label" + (f", {count_text(left_out)} of the labels left out" if left_out > 0 else "")
    return Table(caption, ("label", "rows", "right", "recall", "precision"), rows)


def confusion_table(labels: Sequence[LabelCounts], confusion: Sequence[tuple[int, int, int]]) -> Table:
    """Returns how often each label was answered to rows of each label; of many labels the most frequent mistakes."""
    names = [one.label for one in labels]
    if len(names) <= MOST_CONFUSED:
        counts = {(label, answer): count for label, answer, count in confusion}
        numbers = range(len(names))
        rows = [(names[i], [cell(counts.get((i, j), 0)) for j in numbers]) for i in numbers]
        return Table("Answers at the end (columns) to the rows of each label", ("label", *names), rows)
    mistakes = sorted((one for one in confusion if one[0] != one[1]), key=lambda one: -one[2])[:MOST_CONFUSED]
    shown = [(names[label], [Cell(names[answer]), cell(count)]) for label, answer, count in mistakes]
    return Table("Most frequent wrong answers at the end", ("label", "answer", "rows"), shown)


def _right(rows: int, before: int, after: int) -> list[Cell]:
    """Returns how many rows there are, and how many were right before and after, as counts and as shares."""
    counts = f"{count_text(before)}{ARROW}{count_text(after)}".replace(" ", "\N{NO-BREAK SPACE}")
    return [cell(rows), Cell(counts), _shares(before, after, rows, rows)]


def _shares(before: int, after: int, of_before: int, of_after: int) -> Cell:
    """Returns whole percentages before and after; a dash for a share of nothing."""
    start, end = (
        f"{100 * part / whole:.0f}\N{NO-BREAK SPACE}%" if whole else MISSING
        for part, whole in ((before, of_before), (after, of_after))
    )
    bar = (before / of_before, after / of_after) if of_before and of_after else None
    return Cell(f"{start}{ARROW}{end}", bar=bar)


# Tables of several runs


def comparison(runs: Sequence[RecordedRun]) -> Table:
    """Returns results and work of runs beside each other."""
    configs = [run_config(run) for run in runs]
    rows: list[Row] = [
        ("state", [Cell("finished" if run.summary is not None else "unfinished") for run in runs]),
        ("method", [Cell(config.method.name) for config in configs]),
        ("model", [Cell(shown_path(config.model.name)) for config in configs]),
        ("measured on", [Cell(measured_rows_text(run.summary or {}) or MISSING) for run in runs]),
        ("loss of these rows", [Cell(row_loss(run)) for run in runs]),
    ]
    summaries = [run.summary or {"before": run.metrics("test", last=False), "after": {}} for run in runs]
    ends = [dict(metric_rows(summary["before"], summary["after"])) for summary in summaries]
    for name in dict.fromkeys(name for end in ends for name in end):
        for place, when in enumerate(("before", "after")):
            rows.append((f"{name} {when}", [end[name][place] if name in end else Cell() for end in ends]))
    works = [costs(run) for run in runs]
    for name in dict.fromkeys(name for work in works for name in work):
        rows.append((name, [work.get(name, Cell()) for work in works]))
    rows.append(("trained", [Cell(trained_share(run)) for run in runs]))
    return Table("All figures side by side", ("", *(run.name for run in runs)), rows)


def differences(runs: Sequence[RecordedRun]) -> Table:
    """Returns the settings in which runs differ."""
    every = [settings(run)[0] for run in runs]
    rows = [
        (key, [_setting_cell(one[key]) if key in one else Cell() for one in every])
        for key in sorted({key for one in every for key in one})
        if any(one.get(key) != every[0].get(key) for one in every)
    ]
    return Table("Settings that differ", ("key", *(run.name for run in runs)), rows)
