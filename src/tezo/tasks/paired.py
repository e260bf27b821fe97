"""A paired test: whether a loss fell by more than the noise of the rows that it is a mean over."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.02
"""The p-value up to which a fall counts. The rate of false ones is at most this where gains of rows are symmetric, and
in simulations at most 0.05 where they are skewed: a model that moves its bias towards the most frequent label gains a
little on most rows and loses much on a few."""
FLIPS, AT_ONCE = 4999, 500
"""Random assignments of signs, and how many of them are added up at once."""
MOST_ROWS = 10_000
"""Rows whose losses are kept and compared; of more the first."""


def kept_losses(row_losses: Sequence[float]) -> list[float]:
    """Returns the losses of the first `MOST_ROWS` rows to six digits, as a run folder keeps them."""
    return [float(f"{loss:.6g}") for loss in row_losses[:MOST_ROWS]]


def chance(before: Sequence[float], states: Sequence[Sequence[float]], kept: int) -> float:
    """Returns the p-value of the hypothesis that the loss of a state is as low as it is by chance.

    It is the larger one of two, both one-sided:

    - a sign-flip test. If a state is no better, the gain of a row is as likely as its negative. The mean gain of the
      kept state is compared with the largest mean gain of all states under `FLIPS` random assignments of signs to rows,
      drawn with a fixed seed: the best of several states is low by chance more often than a given one.
    - a normal test of the kept state's mean gain with Hall's correction for skewness (Hall 1992, "On the removal of
      skewness by transformation"), since signs alone do not see it.

    Args:
        before: the loss of each row at first, or its part in the loss; NaN where it is missing.
        states: the same of each state that was compared, in the same order of rows.
        kept: index of the state that is asked about.
    """
    gains_SR = np.asarray(before, dtype=np.float64) - np.asarray(states, dtype=np.float64)
    known_SR = np.isfinite(gains_SR)
    kept_R = gains_SR[kept][known_SR[kept]]
    if not kept_R.any():
        return 1.0
    gains_SR = np.where(known_SR, gains_SR, 0.0) / np.maximum(1, known_SR.sum(1, keepdims=True))
    return max(_by_signs(gains_SR, kept), _by_skewness(kept_R))


def _by_signs(gains_SR: NDArray[np.float64], kept: int) -> float:
    draw, count, rows = np.random.default_rng(0), 0, gains_SR.shape[1]
    least = gains_SR[kept].sum() - 1e-12 * np.abs(gains_SR).sum(1).max()  # sums of the same numbers are rounded apart
    for start in range(0, FLIPS, AT_ONCE):
        flips = min(AT_ONCE, FLIPS - start)
        bits = np.unpackbits(np.frombuffer(draw.bytes(flips * math.ceil(rows / 8)), dtype=np.uint8))
        signs_FR = 2.0 * bits.reshape(flips, -1)[:, :rows] - 1
        count += int(((signs_FR @ gains_SR.T).max(1) >= least).sum())
    return (1 + count) / (1 + FLIPS)


def _by_skewness(gains_R: NDArray[np.float64]) -> float:
    mean, spread = float(gains_R.mean()), float(gains_R.std())
    if spread < 1e-12 * abs(mean):  # all rows gain alike
        return float(mean <= 0)
    skewness, w = float(((gains_R - mean) ** 3).mean()) / spread**3, mean / spread
    t = math.sqrt(len(gains_R)) * (w + skewness * w**2 / 3 + skewness**2 * w**3 / 27 + skewness / (6 * len(gains_R)))
    return math.erfc(t / math.sqrt(2)) / 2
