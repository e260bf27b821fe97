"""How long a step on a GPU may take beside other cases of the benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tezo_studies.bench.settings import CAPTURED, EACH, KERNEL, ONE_PASS, PREFIX

PASSES = "J2"
"""One pass over the batch twice: what both losses of a two-point step take at least."""


@dataclass(frozen=True)
class Target:
    """An upper limit for the time of a step.

    Attributes:
        label: label of the case.
        beside: label of the case that it is compared with, in the same rounds.
        most: largest ratio of their times.
        of_shapes: key of `SHAPES` -> another limit for that model.
    """

    label: str
    beside: str
    most: float
    of_shapes: Mapping[str, float] = field(default_factory=dict)

    def limit(self, shape: str) -> float:
        """Returns the largest ratio for a model."""
        return self.of_shapes.get(shape, self.most)


TARGETS = (
    *(Target(form + "tezo", PASSES, 1.25, {"llama-7b": 1.10}) for form in ("", ONE_PASS, CAPTURED)),
    Target("tezo-adam", PASSES, 1.3),
    Target("head-feedback", "tezo", 1.15),
    Target(EACH + "tezo", "tezo", 1.25),
    Target(EACH + "head-feedback", "head-feedback", 1.25),
    *(Target(label, PREFIX + "mezo", 1.0) for label in ("mezo", KERNEL, "mezo-m", "mezo-adam", "zo-adamu")),
)


def compared_with(label: str) -> tuple[str, ...]:
    """Returns the labels of the cases that a case is compared with."""
    return tuple(target.beside for target in TARGETS if target.label == label)
