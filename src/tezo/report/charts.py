"""The charts of a report: which curves each has, and what it says in words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tezo.report.curves import (
    Points,
    half_life,
    histogram,
    kappa_statistics,
    kappas,
    seconds_at,
    smooth,
    subsample,
)
from tezo.report.losses import dev_losses, row_loss, step_loss
from tezo.runs.reader import Run
from tezo.runs.result_words import minus

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
        style: how it is drawn, see `tezo.report.chart_svg`.
        points: (x, y) with x rising.
    """

    run: str
    label: str
    colour: int
    style: Literal["dots", "line", "dev", "kept", "test", "steps", "rule"]
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
        told = [one for one in self.series if one.style not in ("dots", "kept", "rule")] or self.series[:1]
        return f"{self.title}: {self.y} over {self.x}. " + " ".join(one.describe() for one in told)


@dataclass(frozen=True)
class LossCharts:
    """One kind of loss over several axes, of the runs that have it.

    Attributes:
        kind: of the loss, in words.
        axes: name of an axis, in a word or two -> the chart over it.
    """

    kind: str
    axes: Mapping[str, Chart]

    @property
    def legend(self) -> dict[str, int]:
        """Name of a run -> its colour."""
        return next(iter(self.axes.values())).legend


def loss_charts(runs: Sequence[Run]) -> list[LossCharts]:
    """The losses of runs, each kind by itself: over forward passes, over steps, and over time where it is known."""
    kinds = dict.fromkeys(kind for run in runs for kind in (step_loss(run), row_loss(run)))
    found = [LossCharts(kind, _over_each_axis(kind, runs)) for kind in kinds]
    return [one for one in found if one.axes]


def _over_each_axis(kind: str, runs: Sequence[Run]) -> dict[str, Chart]:
    half = half_life(max(len(run.records) for run in runs))
    unit, size = _time_unit(max(max(seconds_at(run).values(), default=0.0) for run in runs))
    axes: list[tuple[str, str, Callable[[Run], dict[int, float]]]] = [
        ("forward passes", "forward passes", lambda run: dict(enumerate(map(float, run.passes)))),
        ("steps", "steps", lambda run: {step: float(step) for step in range(len(run.passes))}),
        (unit, f"{unit} spent on steps",
         lambda run: {step: seconds / size for step, seconds in {0: 0.0, **seconds_at(run)}.items()}),
    ]  # fmt: skip
    charts = {}
    for name, x, positions in axes:
        series = [one for i, run in enumerate(runs) for one in _loss_series(i, run, kind, positions(run), half)]
        if any(one.style in ("line", "dev") and len(one.points) > 1 for one in series):
            shown, outside = _without_far_dots(series)
            y = kind if kind.startswith(minus("")) else "loss"
            charts[name] = Chart(f"Loss over {name}", x, y, shown, _loss_caption(shown, half, outside))
    return charts


def _loss_caption(series: Sequence[Series], half: int, outside: int) -> str:
    """What the marks are, of the styles that there are."""
    styles = {one.style for one in series}
    parts = [
        ("dots", "Dots: the loss of each step, on its batch."),
        ("line", f"Line: their exponential average with bias correction, half-life {half} steps."),
        ("dev", "Rings: dev rows."),
        ("kept", "Filled ring: the step that was kept."),
    ]
    note = f" {outside} points lie beyond the axis." if outside else ""
    return " ".join(text for style, text in parts if style in styles) + note


def _time_unit(longest: float) -> tuple[str, float]:
    """(unit, its seconds) in which the time of the longest run is a number of some size."""
    if longest >= 2 * 3600:
        return "hours", 3600
    return ("minutes", 60) if longest >= 2 * 60 else ("seconds", 1)


def _loss_series(colour: int, run: Run, kind: str, positions: dict[int, float], half: int) -> list[Series]:
    """Those of a run's losses that are of a kind; `positions`: finished steps -> x, where it is known."""
    finite = [(record.step + 1, record.loss) for record in run.records if abs(record.loss) < MAX_VALUE]
    averages = smooth([loss for _, loss in finite], half)
    line = [(step, mean) for (step, _), mean in zip(finite, averages, strict=True)]
    dev = dev_losses(run)
    kept = [(step, loss) for step, loss in dev if step == (run.summary or {}).get("kept_step")]

    def series(label: str, style: Any, values: Sequence[tuple[int, float]]) -> Series:
        points = subsample([(positions[step], y) for step, y in values if step in positions])
        return Series(run.name, label, colour, style, points)

    found = []
    if step_loss(run) == kind:
        found += [series("a step", "dots", finite), series("smoothed", "line", line)]
    if row_loss(run) == kind:
        found += [series("dev rows", "dev", dev)] if dev else []
        found += [series("the step kept", "kept", kept)] if kept else []
    return found


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
    caption = "Rings: dev rows. Squares: test rows, at the end with the parameters that were kept."
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
