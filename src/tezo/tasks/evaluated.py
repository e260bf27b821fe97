"""The result of an evaluation."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Evaluated(NamedTuple):
    """The result of an evaluation of some examples.

    Attributes:
        metrics: name -> value, "loss" among them.
        answers: the answer to each example; empty for text that is not measured.
        row_losses: for each example its part in the loss, whose mean over the examples is the loss; NaN where a score
            is missing, which the loss leaves out.
        scores: for each example those of its options, (O,) in float64 on the CPU; empty for free text.
    """

    metrics: dict[str, float]
    answers: list[str]
    row_losses: list[float]
    scores: Sequence[Tensor] = ()
