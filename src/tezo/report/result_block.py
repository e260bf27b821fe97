"""The result of a run at the top of its section: the metrics that count, on which rows, after how much work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tezo.report.report_tables import ARROW, MISSING, Cell, Table, costs, model_text
from tezo.report.run_config import run_config
from tezo.runs.reader import Run
from tezo.runs.result_words import (
    BETTER,
    HARDLY,
    NO_BETTER,
    change_text,
    measured_rows_text,
    metric_text,
    work_text,
)

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


def result(run: Run) -> Result:
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


def _so_far(run: Run) -> Result:
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


def compared(runs: Sequence[Run]) -> Table:
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
