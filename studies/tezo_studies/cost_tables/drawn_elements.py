"""Random numbers that the steps of each method draw, counted by the generator, beside the paper's formulas.

Real steps on random weights are counted. How many numbers a step draws depends on the shapes alone, so the batch is a
single short row.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tezo.directions.random import Drawn, count_draws
from tezo_studies.bench.cases import LibraryCase
from tezo_studies.bench.workload import Work
from tezo_studies.cost_tables.cost_line import CostLine, settings_of

Form = Callable[[int, int, int, int], int]
"""(m, n, r, T) -> elements."""

PAPER_FORMS: Mapping[str, tuple[str, Form]] = {
    "mezo": ("m n T", lambda m, n, _, t: m * n * t),
    "subzo": ("(m + n + r) r T", lambda m, n, r, t: (m + n + r) * r * t),
    "lozo": ("(m + n) r T", lambda m, n, r, t: (m + n) * r * t),
    "tezo": ("(m + n + T) r", lambda m, n, r, t: (m + n + t) * r),
}
"""Of a weight (m, n) at rank r after T steps: the paper's table of sampled elements; momentum and Adam draw alike."""


def count_elements(line: CostLine, model: str, device: str) -> dict[str, Any]:
    """Counts of a method on a key of `SHAPES`.

    Returns:
        "factors": numbers for the matrices at the first step and at each refresh that other steps do not draw.
        "step": numbers for the matrices at each step.
        "again": numbers that a step draws again instead of storing them; a number drawn three times counts twice.
        "vectors": numbers for the 1-D parameters at each step.
        "interval": steps between refreshes; None: there are none.
        "shapes": (rows, columns) of the matrices.
    """
    assert line.method is not None
    settings = settings_of(line, model, device)
    work = Work(replace(settings, dtype="float32", batch=1, length="8"))
    case = LibraryCase(line.method, work)
    sides = {name: tuple(parameter.shape) for name, parameter in work.model.named_parameters() if parameter.ndim > 1}
    with count_draws() as drawn:
        case.run()
        first = _numbers(drawn, sides)
        case.run()
        second = _numbers(drawn, sides)
    case.close()
    matrices, vectors, again = (b - a for a, b in zip(first, second, strict=True))
    return {
        "factors": first[0] - matrices,
        "step": matrices,
        "again": again,
        "vectors": vectors,
        "interval": case.interval,
        "shapes": sorted(sides.values()),
    }


def _numbers(drawn: Drawn, matrices: Mapping[str, Any]) -> tuple[int, int, int]:
    """(numbers for matrices, numbers for vectors, numbers drawn again) so far."""
    sizes = dict(drawn)
    own = sum(size for (_, _, name, _), size in sizes.items() if name in matrices)
    total = sum(sizes.values())
    return own, total - own, sum(size for _, size in drawn) - total


def elements_after(counts: Mapping[str, Any], steps: int) -> int:
    """Numbers drawn for the matrices in so many steps."""
    refreshes = 1 if counts["interval"] is None else -(-steps // counts["interval"])
    return int(counts["step"] * steps + counts["factors"] * refreshes)


def paper_elements(line: CostLine, counts: Mapping[str, Any], steps: int) -> int:
    """The paper's formula, summed over the matrices; a rank is at most the smaller side, as in every method here."""
    assert line.method is not None
    _, form = PAPER_FORMS[line.method.partition("-")[0]]
    return sum(form(m, n, min(line.rank or 0, m, n), steps) for m, n in counts["shapes"])
