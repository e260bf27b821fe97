"""The page: charts and tables of runs, put together by a template that escapes whatever it is given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from tezo.errors import RequestError, RunError
from tezo.files import write_file
from tezo.runs.reader import Run, read_run
from tezo.studies.report import charts
from tezo.studies.report import report_tables as tables
from tezo.studies.report.charts import Chart
from tezo.studies.report.report_tables import Cell, Table

MOST_RUNS = 8
"""As many as there are colours that can be told apart."""


@dataclass(frozen=True)
class Section:
    """What is said of one run."""

    name: str
    finished: bool
    steps: int
    asked: int
    method: str
    model: str
    notices: list[str]
    metrics: Table
    kappa: Chart | None
    kappa_table: Table | None
    plan: Table
    trained: str
    costs: list[tuple[str, Cell]]
    made_with: list[tuple[str, Cell]]
    changed: Table
    settings: Table
    command: str


def save(folders: Sequence[Path], output: Path) -> None:
    """Writes a page about run folders; what was at `output` is replaced.

    Raises:
        RequestError: a run can't be read, or the file can't be written; nothing has been.
    """
    _check_output(output)
    if not 0 < len(folders) <= MOST_RUNS:
        raise RequestError(f"{len(folders)} runs are given; give 1 to {MOST_RUNS}.")
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise RequestError(f"{folder} is given more than once; give each run once.")
    text = page(named_apart([read_run(folder) for folder in folders]))
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


def named_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs, with their paths for names where folders have the same."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs]


def page(runs: Sequence[Run]) -> str:
    """The page about runs.

    Raises:
        RequestError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise RequestError(f"tezo report writes its page with jinja2 ({error}); pip install jinja2.") from None
    source = files("tezo.studies.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    histogram = charts.kappa_histogram(runs)
    drawn = [*charts.loss_charts(runs), *charts.metric_charts(runs), *([histogram] if histogram else [])]
    return environment.from_string(source).render(
        title=", ".join(run.name for run in runs),
        comparison=tables.comparison(runs) if len(runs) > 1 else None,
        differences=tables.differences(runs),
        charts=drawn,
        sections=[section(index, run) for index, run in enumerate(runs)],
        width=charts.WIDTH,
        height=charts.HEIGHT,
        left=charts.LEFT,
        right=charts.WIDTH - charts.RIGHT,
        top=charts.TOP,
        bottom=charts.HEIGHT - charts.BOTTOM,
    )


def section(index: int, run: Run) -> Section:
    """What is said of run number `index`."""
    every, changed = tables.settings(run)
    return Section(
        name=run.name,
        finished=run.summary is not None,
        steps=len(run.records),
        asked=run.config.train.steps,
        method=run.config.method.name,
        model=run.config.model.name,
        notices=[str(notice) for notice in (run.summary or {}).get("notices", [])],
        metrics=tables.metrics_table(run),
        kappa=charts.kappa_chart(index, run),
        kappa_table=tables.kappa_table(run),
        plan=tables.plan_table(run),
        trained=tables.trained_share(run),
        costs=tables.costs(run),
        made_with=tables.made_with(run),
        changed=tables.settings_table(changed, "Settings that differ from the defaults"),
        settings=tables.settings_table(every, "All settings"),
        command=tables.command(run),
    )
