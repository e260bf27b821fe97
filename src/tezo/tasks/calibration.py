"""Probabilities of answers: a temperature that is fitted to them, and their calibration error.

The probabilities of an answer's options are softmax(scores / T). At T = 1 they are those that training works on. The
temperature does not change which option is the most likely (Guo et al. 2017, "On calibration of modern neural
networks").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

BINS = 15
"""Bins of probabilities, of equal width, as in the usual definition."""
LEAST, MOST = 1e-3, 1e3
"""Bounds of a temperature."""
HALVINGS = 80
"""Of the interval with the temperature, after which it is as exact as a float64."""


@dataclass(frozen=True)
class Bin:
    """The answers whose probability is in one bin.

    Attributes:
        rows: their number.
        sure: mean of their probabilities; 0 where there are none.
        right: share of them that is right; 0 where there are none.
    """

    rows: int
    sure: float
    right: float


def probabilities(scores: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
    """Returns for each row the probabilities of its options, (O,) in float64, from their scores (O,)."""
    return [(row.double() / temperature).softmax(0) for row in scores]


def fitted_temperature(scores: Sequence[Tensor], labels: Sequence[int]) -> float | None:
    """Returns the temperature at which the right options have the highest likelihood.

    The negative log-likelihood is convex in 1 / T, so the sign of its derivative tells on which side the minimum is.

    Args:
        scores: for each row those of its options, (O,); at least one row.
        labels: for each row the index of its right option.

    Returns:
        The temperature, at most `MOST`, which stands for even probabilities. None: it has no minimum above `LEAST`,
        because the right options have the highest scores, or all options the same.
    """
    rows_BO = pad_sequence([row.double().cpu() for row in scores], batch_first=True)
    missing_BO = pad_sequence([torch.ones(len(row)) for row in scores], batch_first=True) == 0
    right_B = rows_BO.gather(1, torch.tensor(labels)[:, None])[:, 0]

    def slope(log_of_inverse: float) -> float:
        scaled_BO = (math.exp(log_of_inverse) * rows_BO).masked_fill(missing_BO, -math.inf)
        return float(((scaled_BO.softmax(1) * rows_BO).sum(1) - right_B).sum())

    low, high = -math.log(MOST), -math.log(LEAST)
    if slope(high) <= 0:
        return None
    if slope(low) >= 0:
        return MOST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def reliability(sure: Sequence[float], right: Sequence[bool], bins: int = BINS) -> list[Bin]:
    """Returns bins ((m - 1) / M, m / M], m = 1, ..., M, of the probabilities of answers.

    Args:
        sure: for each answer its probability, from 0 to 1; one that is NaN makes the error NaN.
        right: whether it is right.
        bins: their number, M.
    """
    parts: list[list[int]] = [[] for _ in range(bins)]
    for i, value in enumerate(sure):
        place = 0 if math.isnan(value) else math.ceil(value * bins) - 1
        parts[min(max(place, 0), bins - 1)].append(i)
    return [Bin(len(part), _mean([sure[i] for i in part]), _mean([float(right[i]) for i in part])) for part in parts]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Returns the expected calibration error: the mean over answers of |share that is right - probability| in a bin."""
    return math.fsum(each.rows * abs(each.right - each.sure) for each in bins) / sum(each.rows for each in bins)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
