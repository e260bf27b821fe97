"""The charts of a report: the curves of each, its description in words, and its SVG, plotted by matplotlib.

The page is about runs that a stranger may have made. The output of matplotlib is parsed, and only the elements and
attributes of shapes and text are kept: no metadata, style sheet or link. Colours of runs are the page's, one for light
and one for dark.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from xml.etree import ElementTree

from tezo.report.curves import (
    Points,
    dev_losses,
    half_life,
    histogram,
    kappa_statistics,
    kappas,
    metric_points,
    seconds_at,
    signal_by_layer,
    smooth,
    subsample,
)
from tezo.report.tables import row_loss, step_loss
from tezo.runs.reader import RecordedRun
from tezo.runs.words import minus
from tezo.system.errors import RequestError
from tezo.tasks.scoring import REWARD

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's, which colour-blind people can distinguish; the order keeps neighbours distinct in grey too."""
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "image.cmap": "cividis",
    "svg.fonttype": "none",
    "svg.hashsalt": "tezo",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
}


@contextmanager
def figure_style(command: str, settings: Mapping[str, Any] | None = None) -> Iterator[type[Any]]:
    """Sets the style of this library, in which figures are made, laid out and saved.

    Args:
        command: that plots, for the error.
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


# The contents of a chart

MAX_VALUE = 1e150
"""Larger values are left out: the span of an axis could overflow."""
MAX_METRICS = 20
"""Metrics with a chart; a stranger's file can name thousands, and each chart takes a fifth of a second."""

_STYLES: Mapping[str, dict[str, Any]] = {
    "dots": {"linestyle": "none", "marker": "o", "markersize": 3, "markeredgewidth": 0, "alpha": 0.35},
    "line": {"linewidth": 1.5, "alpha": 0.6},
    "dev": {"linewidth": 2, "marker": "o", "markersize": 6, "markerfacecolor": "none", "markeredgewidth": 1.5},
    "kept": {"linestyle": "none", "marker": "o", "markersize": 8, "markeredgewidth": 0},
    "test": {"linewidth": 1, "linestyle": "--", "marker": "s", "markersize": 6},
    "steps": {"linewidth": 1.8, "drawstyle": "steps-post"},
    "rule": {"linewidth": 1.2, "linestyle": ":"},
}
Style = Literal["dots", "line", "dev", "kept", "test", "steps", "rule"]


@dataclass(frozen=True)
class Series:
    """A curve: points (x, y) with x rising, of a run by its name and number, with a word for the part of the run."""

    run: str
    label: str
    colour: int
    style: Style
    points: Points

    def describe(self) -> str:
        """Returns its ends, or its highest step, in words."""
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
    """A chart: title, name and unit of each axis, curves in the order of plotting, caption below."""

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
        """A description in words, for those who don't see the chart."""
        described = [one for one in self.series if one.style not in ("dots", "kept", "rule")] or self.series[:1]
        return f"{self.title}: {self.y} over {self.x}. " + " ".join(one.describe() for one in described)


def loss_charts(runs: Sequence[RecordedRun]) -> dict[str, dict[str, Chart]]:
    """Returns kind of loss, in words -> name of an axis -> chart of the runs that have such losses.

    The axes are forward passes (of a reward its evaluations), steps, and time where it is known.
    """
    half = half_life(max(len(run.records) for run in runs))
    longest = max(max(seconds_at(run).values(), default=0.0) for run in runs)
    unit, size = ("hours", 3600) if longest >= 2 * 3600 else ("minutes", 60) if longest >= 2 * 60 else ("seconds", 1)
    found = {}
    for kind in dict.fromkeys(kind for run in runs for kind in (step_loss(run), row_loss(run))):
        counted = "evaluations of the reward" if kind == minus(REWARD) else "forward passes"
        axes: list[tuple[str, str, Callable[[RecordedRun], Mapping[float, float]]]] = [
            (counted, counted, lambda run: dict(enumerate(map(float, run.passes)))),
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
        if charts:
            found[kind] = charts
    return found


def _loss_series(colour: int, run: RecordedRun, kind: str, positions: Mapping[float, float], half: int) -> list[Series]:
    """Returns those of a run's losses that are of a kind; `positions`: finished steps -> x, where it is known."""

    def series(label: str, style: Style, values: Sequence[tuple[float, float]]) -> Series:
        points = subsample([(positions[step], y) for step, y in values if step in positions])
        return Series(run.name, label, colour, style, points)

    found = []
    if step_loss(run) == kind:
        finite = [(record.step + 1, record.loss) for record in run.records if abs(record.loss) < MAX_VALUE]
        averages = smooth([loss for _, loss in finite], half)
        line = [(step, mean) for (step, _), mean in zip(finite, averages, strict=True)]
        found += [series("a step", "dots", finite), series("smoothed", "line", line)]
    if row_loss(run) == kind:
        dev = dev_losses(run)
        kept = [(step, loss) for step, loss in dev if step == (run.summary or {}).get("kept_step")]
        found += [series("dev rows", "dev", dev)] if dev else []
        found += [series("the step kept", "kept", kept)] if kept else []
    return found


def _without_far_dots(series: Sequence[Series]) -> tuple[list[Series], int]:
    """Returns (the series without dots far above or below the curves and the other dots, how many were left out)."""
    ys = [y for one in series if one.style != "dots" for _, y in one.points]
    for one in series:
        if one.style == "dots" and one.points:
            dots = sorted(y for _, y in one.points)
            ys += [dots[len(dots) // 100], dots[-1 - len(dots) // 100]]
    margin = (max(ys) - min(ys)) / 20 or 1.0
    low, high = min(ys) - margin, max(ys) + margin
    kept = [replace(one, points=[point for point in one.points if low <= point[1] <= high]) for one in series]
    return kept, sum(len(one.points) for one in series) - sum(len(one.points) for one in kept)


def _loss_caption(series: Sequence[Series], half: int, outside: int) -> str:
    """Returns a legend of the marks, for the styles that occur."""
    styles = {one.style for one in series}
    parts = {
        "dots": "Dots: the loss of each step, on its batch.",
        "line": f"Line: their exponential average with bias correction, half-life {half} steps.",
        "dev": "Rings: dev rows.",
        "kept": "Filled ring: the step that was kept.",
    }
    note = f" {outside} points lie beyond the axis." if outside else ""
    return " ".join(text for style, text in parts.items() if style in styles) + note


def metric_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Returns a chart for each of the first metrics of evaluations but the loss, where a run has at least two."""
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.metrics if name != "loss")
    marks = {"dev": "Rings: dev rows.", "test": "Squares: test rows, at the end with the parameters that were kept."}
    charts = []
    for name in [*names][:MAX_METRICS]:
        series = []
        for i, run in enumerate(runs):
            for split, points in metric_points(run, name).items():
                series.append(Series(run.name, split, i, "test" if split == "test" else "dev", subsample(points)))
        if any(len(one.points) > 1 for one in series):
            caption = " ".join(text for style, text in marks.items() if style in {one.style for one in series})
            charts.append(Chart(f"{name} at evaluations", "steps", name, series, caption))
    return charts


def kappa_histogram(runs: Sequence[RecordedRun]) -> Chart | None:
    """Returns each run's kappas in units of their rms; None where there are none."""
    series = []
    for i, run in enumerate(runs):
        values = [kappa for _, kappa in kappas(run)]
        found = kappa_statistics(values)
        if found is not None and found.rms > 0:
            series.append(Series(run.name, "", i, "steps", histogram([value / found.rms for value in values])))
    caption = "Each run in units of its rms; the outermost bins hold all values beyond."
    return Chart("Projected gradients", "kappa / rms", "share of kappas", series, caption) if series else None


def signal_chart(index: int, run: RecordedRun) -> Chart | None:
    """Returns the highest signal of each layer in the first round; None where fewer than two layers have one."""
    points = signal_by_layer(run.rounds[0].signal) if run.rounds else []
    if len(points) < 2:
        return None
    caption = "Round 1: the layers whose inputs best predict the errors of the outputs are changed."
    return Chart("Signal by layer", "layer", "signal", [Series(run.name, "", index, "dev", points)], caption)


def reliability_chart(index: int, run: RecordedRun) -> Chart | None:
    """Returns the share of right answers over their probability, in bins; None where rows have no options."""
    found = (run.summary or {}).get("calibration")
    if found is None:
        return None
    points = sorted((one["sure"], one["right"]) for one in found["bins"] if one["rows"])
    temperature = found["temperature"]
    at = "without a temperature" if temperature is None else f"at a temperature of {temperature:.3g}"
    caption = (
        f"Rings: the answers in {len(found['bins'])} bins of their probability, {at}. On the dotted line the share "
        "that is right is the probability. Below it the model is too sure."
    )
    even = Series(run.name, "", index, "rule", [(0.0, 0.0), (1.0, 1.0)])
    rings = Series(run.name, "bins", index, "dev", points)
    return Chart("How sure, and how often right", "probability of the answer", "share right", [rings, even], caption)


def kappa_chart(index: int, run: RecordedRun) -> Chart | None:
    """Returns kappa over steps, with lines at three rms; None where there are none."""
    points = kappas(run)
    found = kappa_statistics([kappa for _, kappa in points])
    if found is None or found.rms >= MAX_VALUE:
        return None
    first, last = points[0][0], points[-1][0]
    rules = [Series(run.name, "", index, "rule", [(first, y), (last, y)]) for y in (3 * found.rms, -3 * found.rms)]
    caption = (
        "Kappa, the factor of each direction in the estimate of a step; with two points it is "
        "(loss plus - loss minus) / (2 rho). Dotted lines: 3 rms."
    )
    dots = Series(run.name, "kappa", index, "dots", subsample(points))
    return Chart("Projected gradient over steps", "steps", "kappa", [dots, *rules], caption)


# Its SVG

MAX_LABEL = 18
"""Characters of the y axis's name, which fit its height."""
_ELEMENTS = {"svg", "g", "defs", "clipPath", "path", "rect", "text", "use"}
_ATTRIBUTES = {"clip-path", "d", "height", "href", "id", "style", "transform", "width", "x", "y"}


def plot(chart: Chart, figure: Any) -> None:
    """Plots a chart into an empty matplotlib figure."""
    axes = figure.subplots()
    for one in chart.series:
        if one.points:
            xs, ys = zip(*one.points, strict=True)
            axes.plot(xs, ys, color=COLOURS[one.colour], **_STYLES[one.style])
    axes.set_xlabel(chart.x)
    # a metric's name, a stranger's perhaps, as XML can hold it and the axis has room for it
    label = "".join(char if char.isprintable() else " " for char in chart.y)
    label = label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    axes.set_ylabel(label, parse_math=False)
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])


def chart_svg(chart: Chart, *, large: bool = False) -> str:
    """Returns the <svg> element of a chart, with its description for those who don't see it.

    Raises:
        RequestError: matplotlib is not installed.
    """
    # Inches of 72 units, of which a phone shows one as about a pixel. The page makes the text of large charts smaller
    # where they are shown larger.
    size, font = ((5.2, 2.7), 13) if large else ((4.2, 2.8), 10)
    ids = {"svg.hashsalt": ascii(chart.description)}  # ids of one page differ, and are the same whenever it is written
    ticks = {"xtick.major.size": 0, "ytick.major.size": 0}
    written = io.StringIO()
    with figure_style("tezo report", {"font.size": font, "axes.edgecolor": "0.5"} | ids | ticks) as figure_type:
        figure = figure_type(figsize=size)
        plot(chart, figure)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the browser has fonts for glyphs that matplotlib's lacks
            figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    svg = _cleaned(root)
    named = {"class": "chart large" if large else "chart", "viewBox": root.attrib["viewBox"]}
    svg.attrib = {**named, "role": "img", "aria-label": chart.description}
    return ElementTree.tostring(svg, encoding="unicode")


def _cleaned(element: ElementTree.Element) -> ElementTree.Element:
    """Returns the element with nothing but shapes and text, in the form that HTML has it: without namespaces."""
    tag = _local(element.tag)
    attributes = {_local(name): value for name, value in element.attrib.items()}
    if tag == "g":
        attributes.pop("id", None)  # figure_1, axes_1 and the like, which nothing refers to
    kept = ElementTree.Element(tag, {name: value for name, value in attributes.items() if name in _ATTRIBUTES})
    for name in {"d", "x", "y"} & kept.attrib.keys():
        kept.set(name, re.sub(r"(\.\d\d)\d+", r"\1", kept.attrib[name]))
    for number, colour in enumerate(COLOURS):
        if "style" in kept.attrib:
            kept.set("style", kept.attrib["style"].replace(colour.lower(), f"var(--c{number})"))
    kept.text = element.text if tag == "text" else None
    kept.extend(_cleaned(child) for child in element if _local(child.tag) in _ELEMENTS)
    markers = [child for child in kept if child.tag == "use"]
    if markers:  # all of a curve are alike: their style is said once
        kept.set("style", markers[0].get("style", ""))
        for marker in markers:
            marker.attrib.pop("style", None)
    return kept


def _local(name: str) -> str:
    return name.rpartition("}")[2]
