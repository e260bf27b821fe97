"""How every figure looks, in analyses and in reports: one matplotlib style, and SVG whose text stays text.

A chart as an SVG element of the page: drawn by matplotlib, then cut down to shapes and text.

The page is about runs that a stranger may have made. What matplotlib writes is parsed, and only the elements and
attributes that draw are kept: no metadata, style sheet or link. Colours of runs are the page's, one for light and one
for dark.

The charts of a report: which curves each has, and what it says in words.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from xml.etree import ElementTree

from tezo.runs.reader import RecordedRun
from tezo.runs.words import minus
from tezo.system.errors import RequestError
from tezo.training.report.curves import (
    Points,
    half_life,
    histogram,
    kappa_statistics,
    kappas,
    seconds_at,
    smooth,
    subsample,
)
from tezo.training.report.tables import dev_losses, row_loss, step_loss

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's, which colour-blind people tell apart; the order keeps neighbours apart in grey too."""
COLOUR_MAP = "cividis"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "image.cmap": COLOUR_MAP,
    "svg.fonttype": "none",
    "svg.hashsalt": "tezo",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
}


@contextmanager
def figure_style(command: str, settings: Mapping[str, Any] | None = None) -> Iterator[type[Any]]:
    """The style of this library, in which figures are made, laid out and saved.

    Args:
        command: that draws, for the error.
        settings: of matplotlib, laid over the style.

    Yields:
        matplotlib's `Figure`.

    Raises:
        RequestError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(f"{command} draws with matplotlib ({error}); pip install matplotlib.") from None
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=COLOURS), **(settings or {})}):
        yield Figure


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
        style: how it is drawn, see `tezo.training.report.charts`.
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


def loss_charts(runs: Sequence[RecordedRun]) -> list[LossCharts]:
    """The losses of runs, each kind by itself: over forward passes, over steps, and over time where it is known."""
    kinds = dict.fromkeys(kind for run in runs for kind in (step_loss(run), row_loss(run)))
    found = [LossCharts(kind, _over_each_axis(kind, runs)) for kind in kinds]
    return [one for one in found if one.axes]


def _over_each_axis(kind: str, runs: Sequence[RecordedRun]) -> dict[str, Chart]:
    half = half_life(max(len(run.records) for run in runs))
    unit, size = _time_unit(max(max(seconds_at(run).values(), default=0.0) for run in runs))
    axes: list[tuple[str, str, Callable[[RecordedRun], dict[int, float]]]] = [
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


def _loss_series(colour: int, run: RecordedRun, kind: str, positions: dict[int, float], half: int) -> list[Series]:
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


def metric_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """A chart for each of the first metrics of the evaluations but the loss, where a run has at least two."""
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.metrics if name != "loss")
    caption = "Rings: dev rows. Squares: test rows, at the end with the parameters that were kept."
    charts = []
    for name in [*names][:MAX_METRICS]:
        series = [one for i, run in enumerate(runs) for one in _metric_series(i, run, name)]
        if any(len(one.points) > 1 for one in series):
            charts.append(Chart(f"{name} at evaluations", "steps", name, series, caption))
    return charts


def _metric_series(colour: int, run: RecordedRun, name: str) -> list[Series]:
    splits: dict[str, Points] = {}
    for e in run.evaluations:
        if name in e.metrics:
            splits.setdefault(e.split, []).append((float(e.step), e.metrics[name]))
    return [
        Series(run.name, split, colour, "test" if split == "test" else "dev", subsample(points))
        for split, points in splits.items()
    ]


def kappa_histogram(runs: Sequence[RecordedRun]) -> Chart | None:
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


def kappa_chart(index: int, run: RecordedRun) -> Chart | None:
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


SMALL, LARGE = (4.2, 2.8), (5.2, 2.7)
"""Inches of 72 units; a phone shows a unit as about a pixel. The page makes the text of large ones smaller where they
are shown larger."""
FONT = {SMALL: 10, LARGE: 13}
"""Size of text, in units."""
MAX_LABEL = 18
"""Characters of the y axis's name, which fit its height."""

_STYLES: Mapping[str, dict[str, Any]] = {
    "dots": {"linestyle": "none", "marker": "o", "markersize": 3, "markeredgewidth": 0, "alpha": 0.35},
    "line": {"linewidth": 1.5, "alpha": 0.6},
    "dev": {"linewidth": 2, "marker": "o", "markersize": 6, "markerfacecolor": "none", "markeredgewidth": 1.5},
    "kept": {"linestyle": "none", "marker": "o", "markersize": 8, "markeredgewidth": 0},
    "test": {"linewidth": 1, "linestyle": "--", "marker": "s", "markersize": 6},
    "steps": {"linewidth": 1.8, "drawstyle": "steps-post"},
    "rule": {"linewidth": 1.2, "linestyle": ":"},
}
_ELEMENTS = {"svg", "g", "defs", "clipPath", "path", "rect", "text", "use"}
_ATTRIBUTES = {"clip-path", "d", "height", "href", "id", "style", "transform", "width", "x", "y"}
_DIGITS = re.compile(r"(\.\d\d)\d+")


def draw(chart: Chart, figure: Any) -> None:
    """Draws a chart into an empty matplotlib figure."""
    axes = figure.subplots()
    for one in chart.series:
        if one.points:
            xs, ys = zip(*one.points, strict=True)
            axes.plot(xs, ys, color=COLOURS[one.colour], **_STYLES[one.style])
    axes.set_xlabel(chart.x)
    axes.set_ylabel(_axis_label(chart.y), parse_math=False)
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])


def _axis_label(text: str) -> str:
    """A metric's name, a stranger's perhaps, as XML can hold it and the axis has room for it."""
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"


def chart_svg(chart: Chart, size: tuple[float, float] = SMALL) -> str:
    """The <svg> element of a chart, with its description for those who don't see it.

    Args:
        chart: what is drawn.
        size: `SMALL` or `LARGE`.

    Raises:
        RequestError: matplotlib is not installed.
    """
    ids = {"svg.hashsalt": ascii(chart.description)}  # ids of one page differ, and are the same whenever it is written
    ticks = {"xtick.major.size": 0, "ytick.major.size": 0}
    written = io.StringIO()
    with figure_style("tezo report", {"font.size": FONT[size], "axes.edgecolor": "0.5"} | ids | ticks) as figure_type:
        figure = figure_type(figsize=size)
        draw(chart, figure)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the browser has fonts for what matplotlib's lacks
            figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    svg = _drawing(root)
    named = {"class": "chart large" if size == LARGE else "chart", "viewBox": root.attrib["viewBox"]}
    svg.attrib = {**named, "role": "img", "aria-label": chart.description}
    return ElementTree.tostring(svg, encoding="unicode")


def _drawing(element: ElementTree.Element) -> ElementTree.Element:
    """The element with only what draws, in the form that HTML has it: without namespaces."""
    tag = _local(element.tag)
    kept = ElementTree.Element(tag, _attributes(element))
    kept.text = element.text if tag == "text" else None
    kept.extend(_drawing(child) for child in element if _local(child.tag) in _ELEMENTS)
    markers = [child for child in kept if child.tag == "use"]
    if markers:  # all of a curve are alike: their style is said once
        kept.set("style", markers[0].get("style", ""))
        for marker in markers:
            marker.attrib.pop("style", None)
    return kept


def _attributes(element: ElementTree.Element) -> dict[str, str]:
    found = {_local(name): value for name, value in element.attrib.items()}
    kept = {name: value for name, value in found.items() if name in _ATTRIBUTES}
    if _local(element.tag) == "g":
        kept.pop("id", None)  # figure_1, axes_1 and the like, which nothing refers to
    for name in {"d", "x", "y"} & kept.keys():
        kept[name] = _DIGITS.sub(r"\1", kept[name])
    for number, colour in enumerate(COLOURS):
        if "style" in kept:
            kept["style"] = kept["style"].replace(colour.lower(), f"var(--c{number})")
    return kept


def _local(name: str) -> str:
    return name.rpartition("}")[2]
