"""The charts of a report: which curves each has, and what it says in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tezo.runs.reader import Run
from tezo.studies.report.curves import (
    Points,
    half_life,
    histogram,
    kappa_statistics,
    kappas,
    seconds_at,
    smooth,
    subsample,
)

MAX_VALUE = 1e150
"""Larger values are left out: the span of an axis could overflow."""
MAX_METRICS = 20
"""Metrics with a chart; a stranger's file can name thousands, and each chart takes a fifth of a second."""


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        run: name of the run, for the legend.
        label: what of the run it shows, in a word.
        colour: number of the run.
        style: how it is drawn, see `tezo.studies.report.chart_svg`.
        points: (x, y) with x rising.
    """

    run: str
    label: str
    colour: int
    style: Literal["dots", "line", "dev", "test", "steps", "rule"]
    points: Points

    def describe(self) -> str:
        """Its ends, or its highest step, in words."""
        name = f"{self.run}, {self.label}" if self.label else self.run
        if not self.points:
            return f"{name}: none."
        if self.style == "steps":
            x, y = max(self.points, key=lambda point: point[1])
            return f"{name}: highest at {x:.6g}, with {y:.3g}."
        (first, start), (last, end) = self.points[0], self.points[-1]
        return f"{name}: {start:.4g} at {first:.6g}, {end:.4g} at {last:.6g}."


@dataclass(frozen=True)
class Chart:
    """A chart: title, name and unit of each axis, curves in the order of drawing, caption below."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    caption: str

    @property
    def legend(self) -> dict[str, int]:
        """Name of a run -> its colour."""
        return {one.run: one.colour for one in self.series}

    @property
    def description(self) -> str:
        """What it shows, in words, for those who don't see it."""
        told = [one for one in self.series if one.style not in ("dots", "rule")] or self.series[:1]
        return f"{self.title}: {self.y} over {self.x}. " + " ".join(one.describe() for one in told)


def loss_charts(runs: Sequence[Run]) -> list[Chart]:
    """Loss over steps, over forward passes, and over time where it is known."""
    half = half_life(max(len(run.records) for run in runs))
    unit, size = _time_unit(max(max(seconds_at(run).values(), default=0.0) for run in runs))
    axes: list[tuple[str, str, Callable[[Run], dict[int, float]]]] = [
        ("Loss over steps", "steps", lambda run: {step: float(step) for step in range(len(run.passes))}),
        ("Loss over forward passes", "forward passes", lambda run: dict(enumerate(map(float, run.passes)))),
        ("Loss over time", f"{unit} spent on steps",
         lambda run: {step: seconds / size for step, seconds in {0: 0.0, **seconds_at(run)}.items()}),
    ]  # fmt: skip
    caption = (
        f"Line: exponential average of the step loss with bias correction, half-life {half} steps. "
        "Dots: the step losses as they are. Round marks: dev rows."
    )
    charts = []
    for title, x, positions in axes:
        series = [one for i, run in enumerate(runs) for one in _loss_series(i, run, positions(run), half)]
        if any(one.style == "line" and len(one.points) > 1 for one in series):
            shown, outside = _without_far_dots(series)
            note = f" {outside} points lie beyond the axis." if outside else ""
            charts.append(Chart(title, x, "loss", shown, caption + note))
    return charts


def _time_unit(longest: float) -> tuple[str, float]:
    """(unit, its seconds) in which the time of the longest run is a number of some size."""
    if longest >= 2 * 3600:
        return "hours", 3600
    return ("minutes", 60) if longest >= 2 * 60 else ("seconds", 1)


def _loss_series(colour: int, run: Run, positions: dict[int, float], half: int) -> list[Series]:
    """Dots, smoothed line and dev losses of a run; `positions`: finished steps -> x, where it is known."""
    finite = [(record.step + 1, record.loss) for record in run.records if abs(record.loss) < MAX_VALUE]
    averages = smooth([loss for _, loss in finite], half)
    line = [(step, mean) for (step, _), mean in zip(finite, averages, strict=True)]
    dev = [(e.step, e.metrics["loss"]) for e in run.evaluations if e.split == "dev" and "loss" in e.metrics]

    def points(values: Sequence[tuple[int, float]]) -> Points:
        return subsample([(positions[step], y) for step, y in values if step in positions])

    dots = Series(run.name, "a step", colour, "dots", points(finite))
    curve = Series(run.name, "smoothed", colour, "line", points(line))
    return [dots, curve, *([Series(run.name, "dev rows", colour, "dev", points(dev))] if dev else [])]


def _without_far_dots(series: Sequence[Series]) -> tuple[list[Series], int]:
    """(the series without the dots far above or below the curves and the other dots, how many were left out)."""
    ys = [y for one in series if one.style != "dots" for _, y in one.points]
    for one in series:
        if one.style == "dots" and one.points:
            dots = sorted(y for _, y in one.points)
            ys += [dots[len(dots) // 100], dots[-1 - len(dots) // 100]]
    margin = (max(ys) - min(ys)) / 20 or 1.0
    low, high = min(ys) - margin, max(ys) + margin
    kept = [replace(one, points=[point for point in one.points if low <= point[1] <= high]) for one in series]
    return kept, sum(len(one.points) for one in series) - sum(len(one.points) for one in kept)


def metric_charts(runs: Sequence[Run]) -> list[Chart]:
    """A chart for each of the first metrics of the evaluations but the loss, where a run has at least two."""
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.metrics if name != "loss")
    caption = "Round marks: dev rows. Square marks: test rows, at the end with the parameters that were kept."
    charts = []
    for name in [*names][:MAX_METRICS]:
        series = [one for i, run in enumerate(runs) for one in _metric_series(i, run, name)]
        if any(len(one.points) > 1 for one in series):
            charts.append(Chart(f"{name} at evaluations", "steps", name, series, caption))
    return charts


def _metric_series(colour: int, run: Run, name: str) -> list[Series]:
    splits: dict[str, Points] = {}
    for e in run.evaluations:
        if name in e.metrics:
            splits.setdefault(e.split, []).append((float(e.step), e.metrics[name]))
    return [
        Series(run.name, split, colour, "test" if split == "test" else "dev", subsample(points))
        for split, points in splits.items()
    ]


def kappa_histogram(runs: Sequence[Run]) -> Chart | None:
    """Each run's kappas in units of their rms; None where there are none."""
    series = []
    for i, run in enumerate(runs):
        values = [kappa for _, kappa in kappas(run)]
        found = kappa_statistics(values)
        if found is not None and found.rms > 0:
            series.append(Series(run.name, "", i, "steps", histogram([value / found.rms for value in values])))
    if not series:
        return None
    caption = "Each run in units of its own rms; the outermost bins hold what lies beyond."
    return Chart("Projected gradients", "kappa / rms", "share of kappas", series, caption)


def kappa_chart(index: int, run: Run) -> Chart | None:
    """Kappa over steps, with lines at three rms; None where there are none."""
    points = kappas(run)
    found = kappa_statistics([kappa for _, kappa in points])
    if found is None or found.rms >= MAX_VALUE:
        return None
    first, last = points[0][0], points[-1][0]
    rules = [
        Series(run.name, "", index, "rule", [(x, y) for x in (first, last)]) for y in (3 * found.rms, -3 * found.rms)
    ]
    caption = "Kappa = (loss plus - loss minus) / (2 rho), of each direction of each step. Dotted lines: 3 rms."
    dots = Series(run.name, "kappa", index, "dots", subsample(points))
    return Chart("Projected gradient over steps", "steps", "kappa", [dots, *rules], caption)
