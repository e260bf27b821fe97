"""Charts as numbers: paths, ticks and words of small SVGs, which the page's template puts together and escapes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tezo.runs.reader import Run
from tezo.studies.report.curves import (
    Points,
    half_life,
    histogram,
    kappa_statistics,
    kappas,
    seconds_at,
    smooth,
    thinned,
)

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 250, 58, 14, 28, 44
_LARGEST = 1e150
"""Beyond it the span of an axis could overflow."""


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        run: name of the run, or of what else it is, for the legend.
        what: what it shows of that, in a word.
        colour: number of the run.
        kind: "dots", "line", "dev" (a line with round marks), "test" (broken, with square marks), "bars" or "rule".
        points: (x, y), x rising.
    """

    run: str
    what: str
    colour: int
    kind: str
    points: Points

    @property
    def name(self) -> str:
        """Run and word."""
        return f"{self.run}, {self.what}" if self.what else self.run


@dataclass(frozen=True)
class Mark:
    """A curve as drawn: `d` of an SVG path, and that of its marks."""

    colour: int
    kind: str
    line: str
    marks: str


@dataclass(frozen=True)
class Chart:
    """A chart as drawn.

    Attributes:
        title: above it.
        x: name and unit of the axis.
        y: likewise.
        marks: curves, in the order of drawing.
        legend: (name, colour, kinds of its curves).
        x_ticks: (place, text).
        y_ticks: likewise.
        label: what it shows, in words, for those who don't see it.
        caption: below it.
    """

    title: str
    x: str
    y: str
    marks: list[Mark]
    legend: list[tuple[str, int, list[str]]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    label: str
    caption: str


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= min((1, 2, 5, 10), key=lambda m: abs((high - low) / (step * m) - about))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def readable(value: float) -> str:
    """A tick's text: 12000 -> 12k."""
    if 1e4 <= abs(value) < 1e12:
        size, suffix = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= pair[0])
        return f"{value / size:.6g}{suffix}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.6g}".replace("e-0", "e-").replace("-", "\N{MINUS SIGN}")


def draw(
    title: str, x: str, y: str, series: Sequence[Series], caption: str, window: tuple[float, float] | None = None
) -> Chart:
    """A chart of curves.

    Args:
        title: above it.
        x: name and unit.
        y: likewise.
        series: what is drawn.
        caption: below it.
        window: of y; dots outside are left out, and counted in the caption. None: what takes all.
    """
    curves = [_finite(one) for one in series]
    xs = [px for one in curves for px, _ in one.points]
    ys = [py for one in curves for _, py in one.points]
    x_low, x_high = _widened(min(xs), max(xs), 0.0)
    y_low, y_high = _widened(*(window or (min(ys), max(ys))), 0.05)

    def place(px: float, py: float) -> str:
        across = LEFT + (px - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (py - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f} {down:.1f}"

    inside = [_within(one, y_low, y_high) for one in curves]
    left_out = sum(len(a.points) - len(b.points) for a, b in zip(curves, inside, strict=True))
    if left_out:
        caption += f" {left_out} points lie beyond the axis."
    return Chart(
        title,
        x,
        y,
        [_mark(one, place) for one in inside],
        _legend(curves),
        [(float(place(v, y_low).split()[0]), readable(v)) for v in ticks(x_low, x_high, 5)],
        [(float(place(x_low, v).split()[1]), readable(v)) for v in ticks(y_low, y_high, 5)],
        f"{title}: {y} over {x}. " + " ".join(_words(one) for one in curves if one.kind not in ("dots", "rule")),
        caption,
    )


def _finite(series: Series) -> Series:
    return replace(series, points=[(x, y) for x, y in series.points if abs(x) < _LARGEST and abs(y) < _LARGEST])


def _within(series: Series, low: float, high: float) -> Series:
    if series.kind != "dots":
        return series
    return replace(series, points=[point for point in series.points if low <= point[1] <= high])


def _legend(curves: Sequence[Series]) -> list[tuple[str, int, list[str]]]:
    kinds: dict[tuple[str, int], dict[str, None]] = {}
    for one in curves:
        kinds.setdefault((one.run, one.colour), {})[one.kind] = None
    return [(run, colour, list(found)) for (run, colour), found in kinds.items()]


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / _LARGEST):
        by = abs(high) / 2 or 0.5
    else:
        by = (high - low) * share
    return low - by, high + by


def _mark(series: Series, place: Callable[[float, float], str]) -> Mark:
    places = [place(x, y) for x, y in series.points]
    marks = "".join(f"M{at}h0" for at in places) if series.kind in ("dots", "dev", "test") else ""
    if series.kind == "bars":
        after = [place(x, y) for (x, _), (_, y) in zip(series.points[1:], series.points, strict=False)]
        places = [at for pair in zip(places, after, strict=False) for at in pair]
    line = "M" + "L".join(places) if places and series.kind != "dots" else ""
    return Mark(series.colour, series.kind, line, marks)


def _words(series: Series) -> str:
    if series.kind == "bars":
        x, y = max(series.points, key=lambda point: point[1])
        return f"{series.name}: highest at {readable(x)}, with {y:.3g}."
    if not series.points:
        return f"{series.name}: none."
    (first, start), (last, end) = series.points[0], series.points[-1]
    return f"{series.name}: {start:.4g} at {readable(first)}, {end:.4g} at {readable(last)}."


Axis = Callable[[Run], Callable[[int], float | None]]
"""Of a run: number of steps -> place on the x axis; None: not known."""


def loss_charts(runs: Sequence[Run]) -> list[Chart]:
    """Loss over steps, over forward passes, and over time where it is known."""
    half = half_life(max(len(run.records) for run in runs))
    unit, size = _unit_of_time([seconds_at(run) for run in runs])
    axes: list[tuple[str, str, Axis]] = [
        ("Loss over steps", "steps", lambda _: float),
        ("Loss over forward passes", "forward passes", lambda run: lambda step: float(run.passes[step])),
        ("Loss over time", f"{unit} spent on steps", lambda run: _clock(run, size)),
    ]
    smoothed = f"Line: exponential average of the step loss with bias correction, half-life {half} steps. "
    caption = smoothed + "Dots: the step losses as they are. Round marks: dev rows."
    charts = []
    for title, x, axis in axes:
        series = [one for i, run in enumerate(runs) for one in _losses(i, run, axis(run), half)]
        if any(one.kind == "line" and len(one.points) > 1 for one in series):
            charts.append(draw(title, x, "loss", series, caption, _loss_window(series)))
    return charts


def _clock(run: Run, size: float) -> Callable[[int], float | None]:
    seconds = {0: 0.0, **seconds_at(run)}
    return lambda step: seconds[step] / size if step in seconds else None


def _unit_of_time(times: Sequence[dict[int, float]]) -> tuple[str, float]:
    longest = max((max(one.values(), default=0.0) for one in times), default=0.0)
    if longest >= 2 * 3600:
        return "hours", 3600
    return ("minutes", 60) if longest >= 2 * 60 else ("seconds", 1)


def _losses(colour: int, run: Run, place: Callable[[int], float | None], half: int) -> list[Series]:
    finite = [(record.step + 1, record.loss) for record in run.records if abs(record.loss) < _LARGEST]
    averages = smooth([loss for _, loss in finite], half)
    dev = [(e.step, e.metrics["loss"]) for e in run.evaluations if e.split == "dev" and "loss" in e.metrics]
    line = [(step, mean) for (step, _), mean in zip(finite, averages, strict=True)]
    given = [("dots", "a step", finite), ("line", "smoothed", line), *([("dev", "dev rows", dev)] if dev else [])]
    return [Series(run.name, what, colour, kind, thinned(_placed(points, place))) for kind, what, points in given]


def _placed(points: Sequence[tuple[int, float]], place: Callable[[int], float | None]) -> Points:
    return [(x, y) for step, y in points if (x := place(step)) is not None]


def _loss_window(series: Sequence[Series]) -> tuple[float, float] | None:
    """What takes the curves and all but the outermost hundredth of the dots on either side."""
    held = [y for one in series if one.kind != "dots" for _, y in one.points]
    for one in series:
        if one.kind == "dots" and one.points:
            ys = sorted(y for _, y in one.points)
            held += [ys[len(ys) // 100], ys[-1 - len(ys) // 100]]
    return (min(held), max(held)) if held else None


def metric_charts(runs: Sequence[Run]) -> list[Chart]:
    """One for every metric of the evaluations but the loss, where there are at least two."""
    names = dict.fromkeys(name for run in runs for e in run.evaluations for name in e.metrics if name != "loss")
    caption = "Round marks: dev rows. Square marks: test rows, at the end with the parameters that were kept."
    charts = []
    for name in names:
        series = []
        for i, run in enumerate(runs):
            for split in dict.fromkeys(evaluation.split for evaluation in run.evaluations):
                found = [(e.step, e.metrics[name]) for e in run.evaluations if e.split == split and name in e.metrics]
                kind = "test" if split == "test" else "dev"
                series.append(Series(run.name, split, i, kind, thinned([(float(s), y) for s, y in found])))
        series = [one for one in series if one.points]
        if any(len(one.points) > 1 for one in series):
            title = f"{name} at evaluations"
            charts.append(draw(title, "steps", name, series, caption))
    return charts


def kappa_histogram(runs: Sequence[Run]) -> Chart | None:
    """Each run's kappas in units of their rms; None where there are none."""
    series = []
    for i, run in enumerate(runs):
        values = [kappa for _, kappa in kappas(run)]
        found = kappa_statistics(values)
        if found is not None and found.rms > 0:
            series.append(Series(run.name, "", i, "bars", histogram([value / found.rms for value in values])))
    if not series:
        return None
    caption = "Each run in units of its own rms; the outermost bins hold what lies beyond."
    return draw("Projected gradients", "kappa / rms", "share of kappas", series, caption)


def kappa_chart(index: int, run: Run) -> Chart | None:
    """Kappa over steps, with lines at three rms; None where there are none."""
    points = kappas(run)
    found = kappa_statistics([kappa for _, kappa in points])
    if found is None or found.rms >= _LARGEST:
        return None
    ends = (points[0][0], points[-1][0])
    rules = [
        Series("\N{PLUS-MINUS SIGN}3 rms", "", index, "rule", [(x, by * found.rms) for x in ends]) for by in (3, -3)
    ]
    series = [Series(run.name, "kappa", index, "dots", thinned(points)), *rules]
    caption = "Kappa = (loss plus - loss minus) / (2 rho), of each direction of each step."
    return draw("Projected gradient over steps", "steps", "kappa", series, caption)
