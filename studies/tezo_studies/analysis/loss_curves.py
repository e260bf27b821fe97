"""The figure of loss curves: batch losses of runs over steps, forward passes and time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tezo.report.curves import half_life, seconds_at, smooth
from tezo.report.tables import run_config, shown_path
from tezo.runs.reader import read_run
from tezo.system.errors import RequestError
from tezo_studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo_studies.analysis.gradients import rounded


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of `loss`."""

    half_life: int | None = None
    """Half-life in steps of a loss in our smoothed curve. Default: a fifteenth of the longest run."""
    sigma: float = 30.0
    """Standard deviation in steps of the Gaussian average, the paper's smoothing. The paper uses 30."""


def measure_loss(options: LossOptions, given: Given) -> Numbers:
    """Losses of runs over steps, forward passes and time, smoothed our way and over steps as in the paper.

    `smoothed` is an average over past steps (`tezo.report.curves.smooth`); `gaussian` is the paper's, over
    past and coming steps (`gaussian_smooth`).

    Raises:
        RequestError: an option is out of range, or a path is no run folder.
    """
    if options.half_life is not None and options.half_life < 1:
        raise RequestError(f"half_life is {options.half_life}; it must be at least 1.")
    if not 0 < options.sigma <= 10_000:
        raise RequestError(f"sigma is {options.sigma}; it must be above 0 and at most 10000.")
    runs = [read_run(path) for path in given.paths]
    configs = [run_config(run) for run in runs]
    half = options.half_life or half_life(max(len(run.records) for run in runs))
    return {
        "half_life": half,
        "sigma": options.sigma,
        "runs": [
            {
                "name": run.name,
                "method": config.method.name,
                "model": shown_path(config.model.name),
                "rows": config.data.task or shown_path(str(config.data.train)),
                "losses": rounded([record.loss for record in run.records]),
                "smoothed": rounded(smooth([record.loss for record in run.records], half)),
                "gaussian": rounded(gaussian_smooth([record.loss for record in run.records], options.sigma)),
                "forward_passes": run.passes[1:],
                "seconds": seconds_at(run),
            }
            for run, config in zip(runs, configs, strict=True)
        ],
    }


def gaussian_smooth(values: Sequence[float], sigma: float) -> list[float]:
    """The paper's smoothing, `gaussian_filter1d` of scipy with its default settings.

        out_i = sum_k w_k x_(i+k) / sum_k w_k,   w_k = exp(-k^2 / (2 sigma^2)),   |k| <= int(4 sigma + 1/2),

    with the values mirrored at both ends (x_(-1) = x_0, x_(-2) = x_1, ...), again and again where they are few.
    """
    if not values:
        return []
    radius = int(4 * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    mirrored = np.pad(np.asarray(values, dtype=float), radius, mode="symmetric")
    smoothed: list[float] = np.convolve(mirrored, weights / weights.sum(), mode="valid").tolist()
    return smoothed


def draw_loss(numbers: Numbers, figure: Any) -> None:
    """Draws our curves over steps, passes and time; the first two panels also have the raw losses, faint."""
    figure.set_size_inches(12.0, 3.6)
    ours, papers, passes, times = figure.subplots(1, 4, sharey=True)
    for run, colour in zip(numbers["runs"], COLOURS * len(numbers["runs"]), strict=False):
        steps = list(range(1, len(run["smoothed"]) + 1))
        known = {int(step): seconds for step, seconds in run["seconds"].items()}
        timed = [step for step in steps if step in known]
        for place, curve in ((ours, "smoothed"), (papers, "gaussian")):
            place.plot(steps, run["losses"], color=colour, alpha=0.2, linewidth=0.8)
            place.plot(steps, run[curve], color=colour)
        passes.plot(run["forward_passes"], run["smoothed"], color=colour)
        times.plot([known[s] for s in timed], [run["smoothed"][s - 1] for s in timed], color=colour)
        ours.lines[-1].set_label(f"{run['name']} ({run['method']})")
    for place, label in ((ours, "steps"), (papers, "steps"), (passes, "forward passes"), (times, "seconds of steps")):
        place.set_xlabel(label)
    papers.set_title(f"as in the paper: Gaussian, sigma {numbers['sigma']:g} steps", fontsize=8)
    for place in (ours, passes, times):
        place.set_title(f"average of the past, half-life {numbers['half_life']} steps", fontsize=8)
    ours.set_ylabel("batch loss")
    figure.legend(fontsize=7, loc="outside lower center", ncols=4)


def caption_loss(numbers: Numbers) -> str:
    """The caption of the figure."""
    models = ", ".join(dict.fromkeys(f"{run['model']} on {run['rows']}" for run in numbers["runs"]))
    return (
        f"Batch losses of {len(numbers['runs'])} runs ({models}), averaged with a half-life of {numbers['half_life']} "
        f"steps, and in the second panel with the paper's Gaussian of {numbers['sigma']:g} steps, which looks ahead; "
        "seconds are those of steps alone, evaluations left out."
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
