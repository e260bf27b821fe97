"""Numbers from lists: smoothing, thinning, the statistics of kappa, the groups of a plan."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tezo.runs.reader import PlanRow, Run

Points = list[tuple[float, float]]

BEYOND = 3
"""A kappa of more than so many rms is counted as far out."""
MOST_POINTS = 600
"""Of one curve in a chart; more can't be told apart."""

_NUMBER = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.|$)")


def half_life(steps: int) -> int:
    """Steps after which a loss counts half in the smoothed curve: a fifteenth of the longest run."""
    return max(1, round(steps / 15))


def smooth(values: Sequence[float], half: int) -> list[float]:
    """Exponential average with bias correction: the first is the first value, not drawn to zero."""
    decay = 0.5 ** (1 / half)
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        smoothed.append(mean / weight)
    return smoothed


def thinned(points: Points) -> Points:
    """At most about `MOST_POINTS` at even distances, the last among them."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def seconds_at(run: Run) -> dict[int, float]:
    """Number of steps -> seconds spent on them, between the lines of metrics.jsonl by interpolation."""
    known = [(0, 0.0), *run.times]
    end = run.summary.get("seconds_stepping") if run.summary else None
    if end is not None and len(run.records) > known[-1][0] and end >= known[-1][1]:
        known.append((len(run.records), float(end)))
    found = {}
    for (first, start), (last, stop) in itertools.pairwise(known):
        for step in range(first + 1, min(last, len(run.records)) + 1):
            found[step] = start + (stop - start) * (step - first) / (last - first)
    return found


@dataclass(frozen=True)
class Kappas:
    """Statistics of the projected gradients of a run.

    Attributes:
        count: how many, over all steps and directions.
        mean: of them.
        rms: root of the mean square.
        largest: of the absolute values.
        beyond: share whose absolute value is more than `BEYOND` rms.
    """

    count: int
    mean: float
    rms: float
    largest: float
    beyond: float


def kappas(run: Run) -> Points:
    """(steps, kappa) of each direction of each step."""
    return [
        (record.step + 1, kappa) for record in run.records for kappa in record.projected_grads if math.isfinite(kappa)
    ]


def kappa_statistics(values: Sequence[float]) -> Kappas | None:
    """None where there are none, as in a run by gradient."""
    if not values:
        return None
    largest = max(abs(value) for value in values)
    scale = largest or 1.0  # squares of what a stranger's log says could overflow
    rms = scale * math.sqrt(math.fsum((value / scale) ** 2 for value in values) / len(values))
    mean = math.fsum(value / len(values) for value in values)
    beyond = sum(abs(value) > BEYOND * rms for value in values) / len(values)
    return Kappas(len(values), mean, rms, largest, beyond)


def histogram(values: Sequence[float], edge: float = 4.0, bins: int = 16) -> Points:
    """(left edge, share) of bins from -`edge` to `edge`; the outermost hold what lies beyond. (edge, 0) closes it."""
    width = 2 * edge / bins
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, max(0, math.floor((max(-edge, min(edge, value)) + edge) / width)))] += 1
    return [(-edge + i * width, count / len(values)) for i, count in enumerate(counts)] + [(edge, 0.0)]


@dataclass(frozen=True)
class Group:
    """Parameters of a plan that differ by numbers in their names alone.

    Attributes:
        name: with * for every number in it.
        layers: the first number of each, as in "0-3, 5"; empty where the name has no number.
        tensors: how many.
        shape: of each.
        rank: of each; None: dense.
        moved: how, in words; empty: not trained.
        numbers: in all of them.
    """

    name: str
    layers: str
    tensors: int
    shape: tuple[int, ...]
    rank: int | None
    moved: str
    numbers: int


def groups(rows: Sequence[PlanRow]) -> list[Group]:
    """A plan's parameters by name, shape, rank and way, in the order in which they first come."""
    found: dict[tuple[str, tuple[int, ...], int | None, str], list[int]] = {}
    for row in rows:
        match = _NUMBER.search(row.name)
        name, way = _NUMBER.sub("*", row.name), (row.moved or "trained") if row.trained else ""
        found.setdefault((name, row.shape, row.rank, way), []).append(-1 if match is None else int(match[0]))
    return [
        Group(name, _ranges(layers), len(layers), shape, rank, way, len(layers) * math.prod(shape))
        for (name, shape, rank, way), layers in found.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted({number for number in numbers if number >= 0}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
