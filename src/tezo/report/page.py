"""The page of a report: charts and tables of runs, in a template that escapes whatever it is given."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tezo.errors import RequestError, RunError
from tezo.files import write_file
from tezo.report import charts
from tezo.report import report_tables as tables
from tezo.report.answer_tables import answered_rows
from tezo.report.chart_svg import LARGE, chart_svg
from tezo.report.result_block import compared, result
from tezo.report.run_config import run_config
from tezo.runs.reader import Run, read_run
from tezo.training.execution.rollbacks import in_words

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


def with_unique_names(runs: Sequence[Run]) -> list[Run]:
    """The runs, with their paths for names where folders have the same."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def page(runs: Sequence[Run]) -> str:
    """The page about runs.

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


def section(index: int, run: Run) -> dict[str, Any]:
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
