"""The result of a run at the top of its section: the metrics that count, on which rows, after how much work.

The page of a report: charts and tables of runs, in a template that escapes whatever it is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tezo.runs.reader import RecordedRun, read_run
from tezo.runs.words import BETTER, HARDLY, NO_BETTER, change_text, measured_rows_text, metric_text, work_text
from tezo.system.errors import RequestError, RunError
from tezo.system.files import write_file
from tezo.training.best_state import in_words
from tezo.training.report import charts, tables
from tezo.training.report.charts import LARGE, chart_svg
from tezo.training.report.tables import ARROW, MISSING, Cell, Table, answered_rows, costs, model_text, run_config

CHOSEN_ON = "The step that was kept had the lowest loss on these very rows: new rows may do a little worse."


@dataclass(frozen=True)
class Headline:
    """A metric before and after, in words; `change` is empty where one of the two is unknown."""

    name: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        state: "better", "hardly better", "no better", "finished" or "unfinished".
        headlines: the metric that counts and the loss; the loss alone where there is no other.
        rows: that were measured.
        caution: on what these rows can't say; empty: there is nothing.
        work: steps, passes and time.
        advice: what the run says of itself.
    """

    state: str
    headlines: list[Headline]
    rows: str
    caution: str
    work: str
    advice: str


def result(run: RecordedRun) -> Result:
    """The result of a run, or what there is of it so far."""
    if run.summary is None:
        return _so_far(run)
    summary = run.summary
    verdict = str(summary.get("verdict", ""))
    found, _, why = verdict.partition(": ")
    known = found in (BETTER, HARDLY, NO_BETTER)
    return Result(
        state=found.lower() if known else "finished",
        headlines=_headlines(summary["before"], summary["after"]),
        rows=measured_rows_text(summary),
        caution=CHOSEN_ON if summary.get("test_rows_chose") is True else "",
        work=f"{work_text(summary)}." if work_text(summary) else "",
        advice=why[:1].upper() + why[1:] if known else verdict,
    )


def _so_far(run: RecordedRun) -> Result:
    split = "dev" if run.metrics("dev", last=True) else "test"
    done, planned = len(run.records), run_config(run).train.steps
    return Result(
        state="unfinished",
        headlines=_headlines(run.metrics(split, last=False), run.metrics(split, last=True)),
        rows=f"{split} rows so far",
        caution="",
        work=f"{done} of {planned} steps, {work_text({'num_forward_passes': run.passes[-1]})} so far.",
        advice="",
    )


def _headlines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Headline]:
    names = [name for name in dict.fromkeys([*before, *after]) if name != "loss"][:1]
    return [
        _headline(name, before.get(name), after.get(name)) for name in (*names, "loss") if {name} & {*before, *after}
    ]


def _headline(name: str, before: float | None, after: float | None) -> Headline:
    start, end = ("unknown" if value is None else metric_text(name, value) for value in (before, after))
    change = "" if before is None or after is None else change_text(name, before, after)
    return Headline(name.replace("_", " "), start, end, change)


def compared(runs: Sequence[RecordedRun]) -> Table:
    """The results of runs below each other: a line for each."""
    results = [result(run) for run in runs]
    names = list(dict.fromkeys(headline.name for one in results for headline in one.headlines))
    names.sort(key=lambda name: name == "loss")
    facts = ("forward passes", "time", "peak memory")
    rows = []
    for run, one in zip(runs, results, strict=True):
        config, known = run_config(run), {headline.name: headline for headline in one.headlines}
        told = [Cell(one.state), Cell(one.rows or MISSING)]
        ends = [Cell(_ends(known[name]) if name in known else MISSING) for name in names]
        work = dict(costs(run))
        made = [Cell(config.method.name), Cell(model_text(config))]
        rows.append((run.name, [*told, *ends, *(work[fact] for fact in facts), *made]))
    return Table("Results", ("run", "result", "measured on", *names, *facts, "method", "model"), rows)


def _ends(headline: Headline) -> str:
    return f"{headline.before}{ARROW}{headline.after}"


MAX_RUNS = 8
"""As many as there are colours."""


def save(folders: Sequence[Path], output: Path) -> None:
    """Writes a page about run folders; what was at `output` is replaced.

    Raises:
        RequestError: a run can't be read, or the file can't be written; nothing has been.
    """
    _check_output(output)
    if not 0 < len(folders) <= MAX_RUNS:
        raise RequestError(f"{len(folders)} runs are given; give 1 to {MAX_RUNS}.")
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise RequestError(f"{folder} is given more than once; give each run once.")
    text = page(with_unique_names([read_run(folder) for folder in folders]))
    try:
        write_file(output, text.encode("utf-8", "backslashreplace"))
    except RunError as error:
        reason = str(error.__cause__.strerror) if isinstance(error.__cause__, OSError) else "no room"
        raise RequestError(f"output: {output} cannot be written ({reason}); give another.") from None


def _check_output(output: Path) -> None:
    if output.suffix.lower() not in (".html", ".htm"):
        raise RequestError(f"output is {output}; give a file that ends in .html.")
    if output.is_dir():
        raise RequestError(f"output: {output} is a folder; give a file.")
    if not output.parent.is_dir():
        raise RequestError(f"output: {output.parent} is no folder; make it first, or give another place.")


def with_unique_names(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The runs, with their paths for names where folders have the same."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def page(runs: Sequence[RecordedRun]) -> str:
    """The page about runs.

    Raises:
        RequestError: jinja2 or matplotlib is not installed, or a configuration is damaged.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise RequestError(f"tezo report writes its page with jinja2 ({error}); pip install jinja2.") from None
    source = files("tezo.training.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        title=", ".join(run.name for run in runs),
        several=len(runs) > 1,
        results=compared(runs),
        comparison=tables.comparison(runs),
        differences=tables.differences(runs),
        losses=charts.loss_charts(runs),
        metric_charts=charts.metric_charts(runs),
        histogram=charts.kappa_histogram(runs),
        svg=chart_svg,
        large=LARGE,
        sections=[section(index, run) for index, run in enumerate(runs)],
    )


def section(index: int, run: RecordedRun) -> dict[str, Any]:
    """What the template says of run number `index`, by the names that it has there."""
    config = run_config(run)
    every, changed = tables.settings(run)
    return {
        "name": run.name,
        "finished": run.summary is not None,
        "steps": len(run.records),
        "planned_steps": config.train.steps,
        "method": config.method.name,
        "model": tables.model_text(config),
        "trained": tables.trained_share(run),
        "costs": tables.costs(run),
        "result": result(run),
        "answers": None if run.answers is None else answered_rows(run.answers),
        "rollbacks": [f"After step {rollback.step} {in_words(rollback)}." for rollback in run.rollbacks],
        "notices": [str(notice) for notice in (run.summary or {}).get("notices", [])],
        "metrics": tables.metrics_table(run),
        "kappa": charts.kappa_chart(index, run),
        "kappa_table": tables.kappa_table(run),
        "command": tables.command(run),
        "changed": tables.settings_table(changed, "Settings that differ from the defaults"),
        "settings": tables.settings_table(every, "All settings"),
        "plan": tables.plan_table(run),
        "hardware_and_versions": tables.hardware_and_versions(run),
    }
