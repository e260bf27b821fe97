"""The page of a report: charts and tables of runs, in a template that escapes whatever it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tezo.report import charts, tables
from tezo.report.tables import ARROW, MISSING, Cell, Row, Table, costs, metric_rows, run_config, shown_path
from tezo.runs.reader import OUTCOMES, KeptAnswers, RecordedRun, ScoredAnswer, read_run
from tezo.runs.resuming import in_folder
from tezo.runs.words import BETTER, HARDLY, NO_BETTER, count_text, measured_rows_text, work_text
from tezo.system.errors import RequestError, RunError
from tezo.system.files import write_file
from tezo.system.progress import DRAWING, current
from tezo.training.stopping import in_words

CHOSEN_ON = "The step that was kept had the lowest loss on these very rows: new rows may do a little worse."
MAX_RUNS = len(charts.COLOURS)
MOST_EXTREME, MOST_TEXT = 3, 600
"""Answers of a reward run that are shown as its best, and as its worst; characters of each."""
MOST_SHOWN = 12
"""Rows with their answers on the page; a stranger's file can name thousands."""


def save(folders: Sequence[Path], output: Path) -> None:
    """Writes a page about run folders; a file at `output` is replaced.

    Raises:
        RequestError: a run can't be read, or the file can't be written; then nothing is written.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise RequestError(f"output is {output}; give a file that ends in .html.")
    if output.is_dir():
        raise RequestError(f"output: {output} is a folder; give a file.")
    if not output.parent.is_dir():
        raise RequestError(f"output: {output.parent} is no folder; make it first, or give another place.")
    if not 0 < len(folders) <= MAX_RUNS:
        raise RequestError(f"{len(folders)} runs are given; give 1 to {MAX_RUNS}.")
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise RequestError(f"{folder} is given more than once; give each run once.")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    with current().phase(DRAWING):
        text = page([run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs])
    try:
        write_file(output, text.encode("utf-8", "backslashreplace"))
    except RunError as error:
        reason = str(error.__cause__.strerror) if isinstance(error.__cause__, OSError) else "no room"
        raise RequestError(f"output: {output} cannot be written ({reason}); give another.") from None


def page(runs: Sequence[RecordedRun]) -> str:
    """Returns the page about runs.

    Raises:
        RequestError: jinja2 or matplotlib is not installed, or a configuration is damaged.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise RequestError(f"tezo report writes its page with jinja2 ({error}); pip install jinja2.") from None
    source = files("tezo.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        title=", ".join(run.name for run in runs),
        several=len(runs) > 1,
        results=_measuredtable(runs),
        comparison=tables.comparison(runs),
        differences=tables.differences(runs),
        losses=charts.loss_charts(runs),
        metric_charts=charts.metric_charts(runs),
        histogram=charts.kappa_histogram(runs),
        svg=charts.chart_svg,
        sections=[_section(index, run) for index, run in enumerate(runs)],
    )


@dataclass(frozen=True)
class _Result:
    """The result of a run: the metric that counts and the loss, as `metric_rows` gives them, and texts beside them."""

    state: str
    headlines: list[Row]
    rows: str
    work: str
    caution: str = ""
    advice: str = ""


def _result(run: RecordedRun) -> _Result:
    """Returns the result of a run, or its state so far."""
    summary = run.summary
    if summary is None:
        split = "dev" if run.metrics("dev", last=False) else "test"
        done = f"{len(run.records)} of {run_config(run).train.steps} steps"
        return _Result(
            state="unfinished",
            headlines=_headlines(run.metrics(split, last=False), run.metrics(split, last=True)),
            rows=f"{split} rows so far",
            work=f"{done}, {work_text({'num_forward_passes': run.passes[-1]})} so far.",
        )
    verdict = in_folder(str(summary.get("verdict", "")), run.folder)
    found, _, why = verdict.partition(": ")
    known = found in (BETTER, HARDLY, NO_BETTER)
    return _Result(
        state=found.lower() if known else "finished",
        headlines=_headlines(summary["before"], summary["after"]),
        rows=measured_rows_text(summary),
        work=f"{work_text(summary)}." if work_text(summary) else "",
        caution=CHOSEN_ON if summary.get("test_rows_chose") is True else "",
        advice=why[:1].upper() + why[1:] if known else verdict,
    )


def _headlines(before: Mapping[str, float], after: Mapping[str, float]) -> list[Row]:
    rows = [(name.replace("_", " "), cells) for name, cells in metric_rows(before, after)]
    return [row for row in rows if row[0] != "loss"][:1] + [row for row in rows if row[0] == "loss"]


def _measuredtable(runs: Sequence[RecordedRun]) -> Table:
    """Returns the results of runs below each other: a line for each."""
    results = [(run, _result(run)) for run in runs]
    names = list(dict.fromkeys(name for _, result in results for name, _ in result.headlines))
    names.sort(key=lambda name: name == "loss")
    facts = ("forward passes", "time", "peak memory")
    rows = []
    for run, result in results:
        config, work = run_config(run), costs(run)
        ends = {name: Cell(before.text + ARROW + after.text) for name, (before, after, _) in result.headlines}
        measured = [Cell(result.state), Cell(result.rows or MISSING), *(ends.get(name, Cell()) for name in names)]
        made = [Cell(config.method.name), Cell(shown_path(config.model.name))]
        rows.append((run.name, [*measured, *(work[fact] for fact in facts), *made]))
    return Table("Results", ("run", "result", "measured on", *names, *facts, "method", "model"), rows)


def _section(index: int, run: RecordedRun) -> dict[str, Any]:
    """Returns the values for run number `index`, by their names in the template."""
    config = run_config(run)
    every, changed = tables.settings(run)
    return {
        "run": run,
        "config": config,
        "model": shown_path(config.model.name),
        "trained": tables.trained_share(run),
        "costs": costs(run),
        "result": _result(run),
        "answers": None if run.answers is None else _answers(run.answers),
        "rollbacks": [f"After step {rollback.step} {in_words(rollback)}." for rollback in run.rollbacks],
        "notices": [*run.notices, *(str(notice) for notice in (run.summary or {}).get("notices", []))],
        "metrics": tables.metrics_table(run),
        "extremes": _extremes(run),
        "reliability": charts.reliability_chart(index, run),
        "rounds": tables.rounds_table(run),
        "signal": charts.signal_chart(index, run),
        "kappa": charts.kappa_chart(index, run),
        "kappa_table": tables.kappa_table(run),
        "command": tables.command(run),
        "changed": tables.settings_table(changed, "Settings that differ from the defaults"),
        "settings": tables.settings_table(every, "All settings"),
        "plan": tables.plan_table(run),
        "hardware_and_versions": tables.hardware_and_versions(run),
    }


def _extremes(run: RecordedRun) -> list[tuple[str, list[ScoredAnswer]]]:
    """Returns ("Best" and "Worst", answers of the last step by their scores); empty where nothing was scored."""
    by_score = sorted(run.scored, key=lambda answer: answer.score)
    count = min(MOST_EXTREME, len(by_score) // 2)
    parts = [("Best", by_score[::-1][:count]), ("Worst", by_score[:count])] if count else []
    return [(name, [replace(each, completion=each.completion[:MOST_TEXT]) for each in part]) for name, part in parts]


def _answers(answers: KeptAnswers) -> dict[str, Any]:
    """Returns the answers that the page shows, each with whether it was correct before and after."""
    known = {words: outcome for outcome, words in OUTCOMES.items()}
    part = answers.rows < answers.of and bool(answers.outcomes)
    return {
        "counted": f"The first {count_text(answers.rows)} of {count_text(answers.of)} rows are counted."
        if part
        else "",
        "outcomes": {words: count_text(number) for words, number in [*answers.outcomes.items()][:MOST_SHOWN]},
        "labels": tables.labels_table(answers.labels) if answers.labels else None,
        "confusion": tables.confusion_table(answers.labels, answers.confusion) if answers.confusion else None,
        "shown": [(row, known.get(row.outcome)) for row in answers.shown[:MOST_SHOWN]],
    }
