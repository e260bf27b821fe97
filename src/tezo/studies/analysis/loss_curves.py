"""The figure of loss curves: batch losses of runs over steps, forward passes and time."""

from dataclasses import dataclass
from typing import Any

from tezo.errors import RequestError
from tezo.runs.reader import read_run
from tezo.studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo.studies.analysis.gradients import rounded
from tezo.studies.report.curves import half_life, seconds_at, smooth


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of `loss`."""

    half_life: int | None = None
    """Half-life in steps of a loss in the smoothed curve. Default: a fifteenth of the longest run."""


def measure_loss(options: LossOptions, given: Given) -> Numbers:
    """Smoothed losses of runs over steps, forward passes and time."""
    if options.half_life is not None and options.half_life < 1:
        raise RequestError(f"half_life is {options.half_life}; it must be at least 1.")
    runs = [read_run(path) for path in given.paths]
    half = options.half_life or half_life(max(len(run.records) for run in runs))
    return {
        "half_life": half,
        "runs": [
            {
                "name": run.name,
                "method": run.config.method.name,
                "model": run.config.model.name,
                "rows": run.config.data.task or run.config.data.train,
                "losses": rounded([record.loss for record in run.records]),
                "smoothed": rounded(smooth([record.loss for record in run.records], half)),
                "forward_passes": run.passes[1:],
                "seconds": seconds_at(run),
            }
            for run in runs
        ],
    }


def draw_loss(numbers: Numbers, figure: Any) -> None:
    """Draws the same curves in three panels; the first also has the raw losses, faint."""
    figure.set_size_inches(9.0, 3.4)
    places = figure.subplots(1, 3, sharey=True)
    for run, colour in zip(numbers["runs"], COLOURS * len(numbers["runs"]), strict=False):
        steps = list(range(1, len(run["smoothed"]) + 1))
        known = {int(step): seconds for step, seconds in run["seconds"].items()}
        timed = [step for step in steps if step in known]
        places[0].plot(steps, run["losses"], color=colour, alpha=0.2, linewidth=0.8)
        places[0].plot(steps, run["smoothed"], color=colour, label=f"{run['name']} ({run['method']})")
        places[1].plot(run["forward_passes"], run["smoothed"], color=colour)
        places[2].plot([known[s] for s in timed], [run["smoothed"][s - 1] for s in timed], color=colour)
    for place, label in zip(places, ("steps", "forward passes", "seconds of steps"), strict=True):
        place.set_xlabel(label)
    places[0].set_ylabel("batch loss")
    figure.legend(fontsize=7, loc="outside lower center", ncols=4)


def caption_loss(numbers: Numbers) -> str:
    """The caption of the figure."""
    models = ", ".join(dict.fromkeys(f"{run['model']} on {run['rows']}" for run in numbers["runs"]))
    return (
        f"Batch losses of {len(numbers['runs'])} runs ({models}), averaged with a half-life of {numbers['half_life']} "
        "steps; seconds are those of steps alone, evaluations left out."
    )


LOSS_CURVES = Analysis(
    name="loss",
    paper="the figure of loss curves",
    needs="runs",
    options=LossOptions,
    measure=measure_loss,
    draw=draw_loss,
    caption=caption_loss,
)
