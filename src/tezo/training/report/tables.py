"""The configuration of a run that was read from its folder.

What the losses of a run are, in words: runs share a chart where their words are the same.

What a report says of a run's answers: counts for each label, and a few rows before and after.

The tables of a report: each cell is a text, with the value of the file beside it.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.models.kinds import ModelConfig
from tezo.optim.methods import method
from tezo.runs.reader import OUTCOMES, KeptAnswers, LabelCounts, RecordedRun, ShownAnswer
from tezo.runs.words import (
    OPTIONS_LOSS,
    REWARD,
    TEXT_LOSS,
    change_text,
    count_text,
    measured_rows_text,
    metric_text,
    minus,
    work_of,
)
from tezo.system.errors import RequestError
from tezo.system.progress import duration_text
from tezo.tasks.row_files import DataConfig
from tezo.training.config import parse_config, to_tree
from tezo.training.recipe import Config, TrainConfig
from tezo.training.report.curves import OUTLIER_RMS, group_parameters, kappa_statistics, kappas

MISSING = "\N{EN DASH}"
ARROW = "\N{NO-BREAK SPACE}\N{RIGHTWARDS ARROW} "
"""Between a value before and the one after it."""


@dataclass(frozen=True)
class Cell:
    """A text of a table.

    Attributes:
        text: what is shown.
        value: that it stands for; None: the text is all there is.
        bar: shares before and after from 0 to 1, drawn beside the text; None: nothing is.
    """

    text: str
    value: Any = None
    bar: tuple[float, float] | None = None


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def shown_path(name: str) -> str:
    """A name; of a whole path the last part, for what is shown to others."""
    path = Path(name)
    return path.name if path.is_absolute() else name


def run_config(run: RecordedRun) -> Config:
    """The configuration in a run's config.yaml.

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


UNKNOWN = "loss"
"""Of a run that has ended without saying it, and has no metric that tells."""


def row_loss(run: RecordedRun) -> str:
    """The loss of dev and test rows."""
    said = _said(run, "rows")
    names = {name for evaluation in run.evaluations for name in evaluation.metrics}
    if said is not None:
        return said
    if REWARD in names:
        return minus(REWARD)
    if "token_accuracy" in names:
        return TEXT_LOSS
    return OPTIONS_LOSS if "accuracy" in names else UNKNOWN


def step_loss(run: RecordedRun) -> str:
    """The loss of a step on its batch."""
    settings = run_config(run).train
    return _said(run, "steps") or (row_loss(run) if settings.minimises_loss else minus(settings.objective))


def _said(run: RecordedRun, part: str) -> str | None:
    """What the summary says; None: there is none, or one of an earlier version."""
    said = (run.summary or {}).get("losses", {}).get(part)
    return said if isinstance(said, str) else None


def dev_losses(run: RecordedRun) -> list[tuple[int, float]]:
    """(steps, loss on the dev rows), in the order of steps.

    A run without test rows of its own evaluates its dev rows as "test" before the first step, and not again as "dev".
    """
    of = {
        split: [(e.step, e.metrics["loss"]) for e in run.evaluations if e.split == split and "loss" in e.metrics]
        for split in ("dev", "test")
    }
    if not of["dev"] or of["dev"][0][0] == 0:
        return of["dev"]
    return [*(point for point in of["test"][:1] if point[0] == 0), *of["dev"]]


MOST_LABELS = 100
MOST_SHOWN = 12
"""Labels and rows on the page; a stranger's file can name thousands."""
_KNOWN = {words: outcome for outcome, words in OUTCOMES.items()}


@dataclass(frozen=True)
class AnsweredRows:
    """Rows with their answers, as the page shows them.

    Attributes:
        counted: which of the test rows were counted, where it is not all; else empty.
        outcomes: in words -> how many rows, with their thousands apart.
        labels: a line for each label; None where rows share none.
        shown: a few rows, each with whether it was right before and is right after; None for free text.
    """

    counted: str
    outcomes: Mapping[str, str]
    labels: Table | None
    shown: Sequence[tuple[ShownAnswer, tuple[bool, bool] | None]]


def answered_rows(answers: KeptAnswers) -> AnsweredRows:
    """What the page shows of answers."""
    part = answers.rows < answers.of and bool(answers.outcomes)
    return AnsweredRows(
        counted=f"The first {count_text(answers.rows)} of {count_text(answers.of)} rows are counted." if part else "",
        outcomes={outcome: count_text(number) for outcome, number in [*answers.outcomes.items()][:MOST_SHOWN]},
        labels=labels_table(answers.labels) if answers.labels else None,
        shown=[(row, _KNOWN.get(row.outcome)) for row in answers.shown[:MOST_SHOWN]],
    )


def labels_table(labels: Sequence[LabelCounts]) -> Table:
    """Rows, right answers, recall and precision of each label before and after, and of all labels together."""
    rows = [(one.label, _label_cells(one)) for one in labels[:MOST_LABELS]]
    left_out = len(labels) - len(rows)
    before, after = sum(one.before.right for one in labels), sum(one.after.right for one in labels)
    total = sum(one.rows for one in labels)
    all_cells = [Cell(count_text(total), total), _counts(before, after), _shares(before, after, total, total)]
    rows.append(("all labels", [*all_cells, Cell(MISSING)]))
    caption = "Answers by label" + (f", {count_text(left_out)} of the labels left out" if left_out else "")
    return Table(caption, ("label", "rows", "right", "recall", "precision"), rows)


def _label_cells(one: LabelCounts) -> list[Cell]:
    return [
        Cell(count_text(one.rows), one.rows),
        _counts(one.before.right, one.after.right),
        _shares(one.before.right, one.after.right, one.rows, one.rows),
        _shares(one.before.right, one.after.right, one.before.answered, one.after.answered),
    ]


def _counts(before: int, after: int) -> Cell:
    return Cell(f"{count_text(before)}{ARROW}{count_text(after)}".replace(" ", "\N{NO-BREAK SPACE}"))


def _shares(before: int, after: int, of_before: int, of_after: int) -> Cell:
    bar = (before / of_before, after / of_after) if of_before and of_after else None
    return Cell(f"{_share(before, of_before)}{ARROW}{_share(after, of_after)}", bar=bar)


def _share(part: int, whole: int) -> str:
    """A whole percentage; a dash for a share of nothing."""
    return f"{100 * part / whole:.0f}\N{NO-BREAK SPACE}%" if whole else MISSING


def metric_cell(name: str, value: float | None) -> Cell:
    """Of an evaluation: a loss with four digits, anything else as a share."""
    if value is None:
        return Cell(MISSING)
    return Cell(metric_text(name, value), value)


def number_cell(value: float | None) -> Cell:
    """A count with its thousands apart, anything else with four digits."""
    if value is None:
        return Cell(MISSING)
    if isinstance(value, int):
        return Cell(count_text(value), value)
    return Cell(f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}", value)


def bytes_cell(value: float | None) -> Cell:
    """Bytes."""
    if value is None:
        return Cell(MISSING)
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return Cell(f"{value / factor:.2f} {unit}", value)
    return Cell(f"{value} bytes", value)


def settings(run: RecordedRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """(all settings of a run, those of them that differ from the defaults), by dotted key."""
    config = run_config(run)
    tree = to_tree(config)
    known = {"model": ModelConfig(name=""), "data": DataConfig(), "train": TrainConfig()}
    defaults = {f"{name}.{key}": value for name, section in known.items() for key, value in vars(section).items()}
    own = method(config.method.name).defaults()
    defaults |= {"method.name": None, **{f"method.{key}": value for key, value in own.items()}}
    given = {f"{section}.{key}": value for section, values in tree.items() for key, value in values.items()}
    every = _flatten({**defaults, **given})
    changed = {key: value for key, value in every.items() if value != defaults.get(key)}
    return every, changed


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings by dotted key too, as `--set` takes them."""
    parts = [(key, value if isinstance(value, dict) else {"": value}) for key, value in values.items()]
    return {f"{key}.{name}" if name else key: inner for key, value in parts for name, inner in value.items()}


def settings_table(values: Mapping[str, Any], caption: str) -> Table:
    """A line a setting."""
    rows = [(key, [Cell(_setting_text(value))]) for key, value in sorted(values.items())]
    return Table(caption, ("key", "value"), rows)


def _setting_text(value: Any) -> str:
    return "none" if value is None else str(value)


def metrics_table(run: RecordedRun) -> Table:
    """Before and after of a run that has ended; else first and last evaluation of each split."""
    if run.summary is not None:
        pairs = [(run.summary["before"], run.summary["after"], "")]
    else:
        splits = dict.fromkeys(evaluation.split for evaluation in run.evaluations)
        pairs = [(run.metrics(s, last=False), run.metrics(s, last=True), f"{s} ") for s in splits]
    rows = []
    for before, after, prefix in pairs:
        for name in dict.fromkeys([*before, *after]):
            start, end = before.get(name), after.get(name)
            change = Cell(MISSING)
            if start is not None and end is not None:
                change = Cell(change_text(name, start, end), end - start)
            rows.append((prefix + name, [metric_cell(name, start), metric_cell(name, end), change]))
    if run.summary is not None:
        of = measured_rows_text(run.summary)
        return Table(f"Before and after{f' on {of}' if of else ''}", ("metric", "before", "after", "change"), rows)
    return Table("First and last evaluation so far", ("metric", "first", "last", "change"), rows)


def _duration_cell(seconds: float | None) -> Cell:
    return Cell(MISSING) if seconds is None else Cell(duration_text(seconds), seconds)


def costs(run: RecordedRun) -> list[tuple[str, Cell]]:
    """Memory, time and work of a run."""
    summary, steps = run.summary or {}, len(run.records)
    seconds = summary.get("seconds_stepping", run.times[-1][1] if run.times else None)
    timed = steps if "seconds_stepping" in summary else (run.times[-1][0] if run.times else 0)
    passes = max(1, run.passes[min(timed, steps)])
    all_passes, all_seconds = work_of(summary)
    all_passes = run.passes[-1] if all_passes is None else round(all_passes)
    all_seconds = seconds if all_seconds is None else all_seconds
    found = [
        ("steps", Cell(f"{steps} of {run_config(run).train.steps}", steps)),
        ("forward passes", number_cell(all_passes)),
        ("time", _duration_cell(all_seconds)),
        *(
            (f"of it {name}", Cell(f"{duration_text(spent['seconds'])}, {spent['passes']:,.0f} passes"))
            for name, spent in summary.get("phases", {}).items()
        ),
        ("time spent on steps", _duration_cell(seconds)),
        ("seconds a step", number_cell(seconds / timed if seconds is not None and timed else None)),
        ("seconds a forward pass", number_cell(seconds / passes if seconds is not None and timed else None)),
        ("peak memory", bytes_cell(summary.get("peak_memory", run.memory))),
    ]
    if "model_bytes" in summary:
        found.append(("of it the model", bytes_cell(summary["model_bytes"])))
    if "kept_step" in summary:
        found.insert(1, ("step kept", number_cell(summary["kept_step"])))
    if summary.get("ranks", 1) > 1:
        found.append(("processes", number_cell(summary["ranks"])))
        found.append(("bytes exchanged by each", bytes_cell(summary.get("bytes_sent"))))
        found.append(("exchanges", number_cell(summary.get("exchanges"))))
    return found


def hardware_and_versions(run: RecordedRun) -> list[tuple[str, Cell]]:
    """Hardware and versions."""
    header = run.header.get("versions")
    versions = (run.summary or {}).get("versions", header if isinstance(header, dict) else {})
    place = (run.summary or {}).get("hardware", run.header.get("device"))
    found = [("hardware", Cell(_setting_text(place)))]
    return found + [(str(package), Cell(_setting_text(version))) for package, version in versions.items()]


def kappa_table(run: RecordedRun) -> Table | None:
    """Statistics of the projected gradients; None where there are none."""
    found = kappa_statistics([kappa for _, kappa in kappas(run)])
    if found is None:
        return None
    rows = [
        ("kappas", [number_cell(found.count)]),
        ("mean", [number_cell(found.mean)]),
        ("rms", [number_cell(found.rms)]),
        ("largest, absolute", [number_cell(found.largest)]),
        (f"share beyond {OUTLIER_RMS} rms", [metric_cell("", found.outliers)]),
    ]
    return Table("Projected gradients", ("", "kappa"), rows)


def plan_table(run: RecordedRun) -> Table:
    """A line for every group of trained parameters, and one for all the others."""
    found = group_parameters(run.plan)
    rows = []
    for group in (group for group in found if group.moved):
        shape = " \N{MULTIPLICATION SIGN} ".join(map(str, group.shape)) or "one number"
        rank = Cell("dense") if group.rank is None else Cell(str(group.rank), group.rank)
        cells = [Cell(group.layers or MISSING), number_cell(group.tensors), Cell(shape), rank]
        rows.append((group.name, [*cells, number_cell(group.numbers), Cell(group.moved)]))
    idle = [group for group in found if not group.moved]
    if idle:
        tensors, numbers = sum(group.tensors for group in idle), sum(group.numbers for group in idle)
        rest = [Cell(MISSING), number_cell(tensors), Cell(MISSING), Cell(MISSING), number_cell(numbers), Cell(MISSING)]
        rows.append(("all others: not trained", rest))
    return Table("Parameters", ("name", "layers", "tensors", "shape", "rank", "numbers", "moved"), rows)


def model_text(config: Config) -> str:
    """The model's name; of a folder by its whole path the last part."""
    return shown_path(config.model.name)


def trained_share(run: RecordedRun) -> str:
    """How many numbers are trained, in words."""
    found = group_parameters(run.plan)
    trained = sum(group.numbers for group in found if group.moved)
    total = sum(group.numbers for group in found)
    return f"{number_cell(trained).text} of {number_cell(total).text} numbers" if total else MISSING


def comparison(runs: Sequence[RecordedRun]) -> Table:
    """Results and work of runs beside each other."""
    configs = [run_config(run) for run in runs]
    rows: list[tuple[str, list[Cell]]] = [
        ("state", [Cell("finished" if run.summary is not None else "unfinished") for run in runs]),
        ("method", [Cell(config.method.name) for config in configs]),
        ("model", [Cell(model_text(config)) for config in configs]),
        ("measured on", [Cell(measured_rows_text(run.summary or {}) or MISSING) for run in runs]),
        ("loss of these rows", [Cell(row_loss(run)) for run in runs]),
    ]
    ends = [_before_and_after(run) for run in runs]
    for name in dict.fromkeys(name for end in ends for name in end):
        for place, when in enumerate(("before", "after")):
            rows.append((f"{name} {when}", [end.get(name, (Cell(MISSING),) * 2)[place] for end in ends]))
    works = [dict(costs(run)) for run in runs]
    for name in dict.fromkeys(name for work in works for name in work):
        rows.append((name, [work.get(name, Cell(MISSING)) for work in works]))
    rows.append(("trained", [Cell(trained_share(run)) for run in runs]))
    return Table("All figures side by side", ("", *(run.name for run in runs)), rows)


def differences(runs: Sequence[RecordedRun]) -> Table:
    """The settings in which runs differ."""
    every = [settings(run)[0] for run in runs]
    rows = []
    for key in sorted(dict.fromkeys(key for one in every for key in one)):
        if any(one.get(key) != every[0].get(key) for one in every):
            rows.append((key, [Cell(_setting_text(one[key])) if key in one else Cell(MISSING) for one in every]))
    return Table("Settings that differ", ("key", *(run.name for run in runs)), rows)


def _before_and_after(run: RecordedRun) -> dict[str, tuple[Cell, Cell]]:
    summary = run.summary or {"before": run.metrics("test", last=False), "after": {}}
    before, after = summary["before"], summary["after"]
    return {n: (metric_cell(n, before.get(n)), metric_cell(n, after.get(n))) for n in dict.fromkeys([*before, *after])}


def command(run: RecordedRun) -> str:
    """The line that makes the run again in a new folder, from where it was made."""
    config, name = run.folder / "config.yaml", f"{run.name}-again"
    again = run.folder.parent / name if run.folder.name == run.name else Path("..") / name
    ranks = int((run.summary or {}).get("ranks", 1))
    program = f"torchrun --standalone --nproc-per-node {ranks} -m tezo" if ranks > 1 else "tezo"
    return f"{program} train {shlex.quote(_as_argument(config))} --output {shlex.quote(_as_argument(again))}"


def _as_argument(path: Path) -> str:
    """A path that no program takes for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)
