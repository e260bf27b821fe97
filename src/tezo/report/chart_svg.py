"""A chart as an SVG element of the page: drawn by matplotlib, then cut down to shapes and text.

The page is about runs that a stranger may have made. What matplotlib writes is parsed, and only the elements and
attributes that draw are kept: no metadata, style sheet or link. Colours of runs are the page's, one for light and one
for dark.
"""

import io
import re
import warnings
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from tezo.report.charts import Chart
from tezo.report.plotting import COLOURS, figure_style

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
