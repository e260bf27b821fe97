"""A sequential test of whether a run's loss has risen, from nothing but the losses that its steps measure anyway."""

import math
from dataclasses import dataclass
from statistics import NormalDist

FALSE_ALARM_RATE = 0.01
"""Largest probability of an alarm in a whole run whose loss does not rise and has normal noise."""
SHORTEST_WINDOW = 8
"""Steps of the shortest window: means of fewer losses are too far from normal where a batch has few rows."""
FEWEST_DIFFERENCES = 15
"""Differences that the noise is estimated from, at least: those of the first two windows."""


@dataclass
class _Window:
    """The window of `size` losses that is being filled, and the lowest mean of those before it."""

    size: int
    sum: float = 0.0
    count: int = 0
    lowest: float = math.inf


class Guard:
    """The test of one run.

    Let x_1, x_2, ... be the losses of the steps. Under the hypothesis that the run is sound they are a mean that does
    not rise plus independent noise of variance sigma^2, because batches differ. sigma^2 is estimated from differences
    of successive losses, which a slow change of the mean hardly enlarges:

        s^2 = mean of (x_{t+1} - x_t)^2 / 2.

    For windows of n = 8, 16, 32, ... steps, at every multiple of n, the mean of the last n losses is compared with the
    lowest mean of n losses of an earlier window (since the last return, where dev rows chose its state),

        z = (mean of the last n - lowest mean of n) / (s sqrt(2 / n)).

    Each comparison with one earlier window exceeds its quantile with probability at most `FALSE_ALARM_RATE` / C if the
    hypothesis is true and the noise normal, where C is the number of pairs of windows of a whole run. Hence a whole run
    raises a false alarm with probability at most `FALSE_ALARM_RATE`. The quantile is Student's, for s is estimated;
    successive differences are worth 2/3 of their number in degrees of freedom.
    """

    def __init__(self, steps: int) -> None:
        self._windows: list[_Window] = []
        size = SHORTEST_WINDOW
        while 2 * size <= steps:
            self._windows.append(_Window(size))
            size *= 2
        pairs = sum(math.comb(steps // window.size, 2) for window in self._windows)
        self._alpha = FALSE_ALARM_RATE / max(1, pairs)
        self._last: float | None = None
        self._squares, self._differences = 0.0, 0

    def add(self, loss: float) -> bool:
        """Takes in the loss of the next step; returns whether the losses have risen."""
        if self._last is not None:
            self._squares += (loss - self._last) ** 2 / 2
            self._differences += 1
        self._last = loss
        risen = False
        for window in self._windows:
            window.sum += loss
            window.count += 1
            if window.count == window.size:
                mean = window.sum / window.size
                risen |= self._is_large((mean - window.lowest) * math.sqrt(window.size / 2))
                window.sum, window.count, window.lowest = 0.0, 0, min(window.lowest, mean)
        return risen

    def is_above(self, rise: float, ratio: float) -> bool:
        """Returns whether a rise of the loss on other rows is larger than the noise allows.

        Args:
            rise: a loss on these rows minus an earlier one. On the same rows it varies less than the test assumes.
            ratio: rows of a step over rows of either loss.
        """
        return self._is_large(rise / math.sqrt(2 * ratio))

    def restart(self, *, keep_lowest: bool) -> None:
        """Goes on after a return to an earlier state.

        The noise is estimated anew: a rise may have begun in the first steps, and would have been taken for noise.

        Args:
            keep_lowest: whether the lowest means count from now on. They should not if other rows chose the state: a
                state that has learnt the training rows by heart has lower losses on them than a better one.
        """
        self._last = None
        self._squares, self._differences = 0.0, 0
        self._windows = [_Window(w.size, lowest=w.lowest if keep_lowest else math.inf) for w in self._windows]

    def _is_large(self, rise: float) -> bool:
        """Returns whether a difference of two means, scaled to the variance of one loss, is above its quantile."""
        if self._differences < FEWEST_DIFFERENCES:
            return False
        noise = math.sqrt(self._squares / self._differences)
        return rise > noise * student_quantile(1 - self._alpha, 2 / 3 * self._differences)


def student_quantile(p: float, freedom: float) -> float:
    """Returns the quantile of Student's distribution, by its expansion about the normal one.

    The next term of the expansion is below 1 % of the quantile for p <= 1 - 1e-7 and freedom >= 10.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))
