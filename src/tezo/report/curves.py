"""The numbers behind charts and tables: smoothed curves, times, statistics of kappa, groups of parameters."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tezo.runs.reader import PlanRow, RecordedRun

Points = list[tuple[float, float]]

OUTLIER_RMS = 3
"""A kappa of more than so many rms is an outlier."""
SPLITS = ("dev", "test")
"""Splits whose metrics are points of a curve; others belong to fits to the untuned model."""
NUMBER = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.|$)")
"""The number of a layer in the name of a parameter."""
MAX_POINTS = 300
"""Points of a curve in a chart, which is about as many pixels wide."""


def half_life(steps: int) -> int:
    """Returns the steps after which a loss counts half in the smoothed curve: a fifteenth of the longest run."""
    return max(1, round(steps / 15))


def smooth(values: Sequence[float], half_life: int) -> list[float]:
    """Returns the exponential average with bias correction, so that it begins at the first value and not near zero."""
    decay = 0.5 ** (1 / half_life)
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        smoothed.append(mean / weight)
    return smoothed


def subsample(points: Points) -> Points:
    """Returns at most `MAX_POINTS` + 1 of the points, at even distances, the last among them."""
    stride = math.ceil(len(points) / MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def seconds_at(run: RecordedRun) -> dict[int, float]:
    """Returns finished steps -> seconds spent on them, by linear interpolation between the lines of metrics.jsonl."""
    known = [(0, 0.0), *run.times]
    end = run.summary.get("seconds_stepping") if run.summary else None
    if end is not None and len(run.records) > known[-1][0] and end >= known[-1][1]:
        known.append((len(run.records), float(end)))
    found = {}
    for (first, start), (last, stop) in itertools.pairwise(known):
        for step in range(first + 1, min(last, len(run.records)) + 1):
            found[step] = start + (stop - start) * (step - first) / (last - first)
    return found


def metric_points(run: RecordedRun, name: str) -> dict[str, Points]:
    """Returns "dev" and "test" -> (steps, metric) of their evaluations, in the order of steps."""
    found: dict[str, Points] = {}
    for e in run.evaluations:
        if name in e.metrics and e.split in SPLITS:
            found.setdefault(e.split, []).append((e.step, e.metrics[name]))
    return found


def dev_losses(run: RecordedRun) -> Points:
    """Returns (steps, loss on the dev rows), in the order of steps.

    A run without separate test rows evaluates its dev rows as "test" before the first step, and not again as "dev".
    """
    of = metric_points(run, "loss")
    dev, before = of.get("dev", []), [point for point in of.get("test", [])[:1] if point[0] == 0]
    return before + dev if dev and dev[0][0] > 0 else dev


def signal_by_layer(signal: Mapping[str, float]) -> Points:
    """Returns (number of a layer, highest signal of its parameters); those without a number are left out."""
    found: dict[int, float] = {}
    for name, value in signal.items():
        if match := NUMBER.search(name):
            layer = int(match[0])
            found[layer] = max(value, found.get(layer, value))
    return [(float(layer), found[layer]) for layer in sorted(found)]


@dataclass(frozen=True)
class KappaStatistics:
    """Statistics of the projected gradients of all steps and directions of a run.

    Attributes:
        rms: root of the mean square.
        largest: of the absolute values.
        outliers: share whose absolute value is more than `OUTLIER_RMS` rms.
    """

    count: int
    mean: float
    rms: float
    largest: float
    outliers: float


def kappas(run: RecordedRun) -> Points:
    """Returns (steps, kappa) of each direction of each step, where it is finite."""
    return [(record.step + 1, k) for record in run.records for k in record.projected_grads if math.isfinite(k)]


def kappa_statistics(values: Sequence[float]) -> KappaStatistics | None:
    """Returns None where there are none, as in a run by gradient."""
    if not values:
        return None
    largest = max(abs(value) for value in values)
    scale = largest or 1.0  # the squares of a stranger's numbers could overflow
    rms = scale * math.sqrt(math.fsum((value / scale) ** 2 for value in values) / len(values))
    mean = math.fsum(value / len(values) for value in values)
    outliers = sum(abs(value) > OUTLIER_RMS * rms for value in values) / len(values)
    return KappaStatistics(len(values), mean, rms, largest, outliers)


def histogram(values: Sequence[float]) -> Points:
    """Returns (left edge, share) of 16 bins from -4 to 4, the outer ones with all values beyond; then (4, 0)."""
    counts = [0] * 16
    for value in values:
        counts[min(15, math.floor(2 * (max(-4.0, min(4.0, value)) + 4)))] += 1
    return [(i / 2 - 4, count / len(values)) for i, count in enumerate(counts)] + [(4.0, 0.0)]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of a plan whose names differ in their numbers alone.

    Attributes:
        name: with * for every number in it.
        layers: the first number of each, as in "0-3, 5"; empty where the name has no number.
        tensors: how many there are, each of the same shape and rank (None: dense).
        moved: how they are updated, in words; empty: not trained.
        numbers: entries of all of them together.
    """

    name: str
    layers: str
    tensors: int
    shape: tuple[int, ...]
    rank: int | None
    moved: str
    numbers: int


def group_parameters(rows: Sequence[PlanRow]) -> list[ParameterGroup]:
    """Returns a plan's parameters by name, shape, rank and update, in the order of their first one."""
    found: dict[tuple[str, tuple[int, ...], int | None, str], list[int]] = {}
    for row in rows:
        match = NUMBER.search(row.name)
        moved = (row.moved or "trained") if row.trained else ""
        layers = found.setdefault((NUMBER.sub("*", row.name), row.shape, row.rank, moved), [])
        layers.append(-1 if match is None else int(match[0]))
    return [
        ParameterGroup(name, _ranges(layers), len(layers), shape, rank, moved, len(layers) * math.prod(shape))
        for (name, shape, rank, moved), layers in found.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted({number for number in numbers if number >= 0}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
