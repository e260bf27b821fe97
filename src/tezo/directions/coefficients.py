"""Draws of coefficients: for one direction that all examples of a batch share, or for one of each example.

Example 0 has the numbers of the shared direction. The numbers of example i depend on the key of the draw and on i
alone, not on the other examples of the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tezo.directions.random import Signs

FIRST = range(1)
"""The examples of a shared direction."""


class CoefficientDraw(ABC):
    """The coefficients of a direction's examples, drawn at each use or stored."""

    @abstractmethod
    def __call__(self, examples: Sequence[int]) -> Tensor:
        """The coefficients of B examples: (B, *shape)."""

    def of(self, example: int) -> Tensor:
        """The coefficient of one example."""
        return self((example,))[0]

    def sum(self, factors: Sequence[float]) -> Tensor:
        """sum_i factors[i] * coefficient of example i, a new tensor."""
        coefficients = self(range(len(factors)))
        if len(factors) == 1:
            return coefficients[0] * factors[0]
        return torch.einsum("b,b...->...", _like(factors, coefficients), coefficients)

    def stack(self, examples: Sequence[int]) -> "Stack":
        """The coefficients of the examples for several uses in a row: they are not drawn again for each."""
        return Stack(self(examples))


class FixedCoefficient(CoefficientDraw):
    """A coefficient that is stored, the same for all examples; it may be a stack of points, (G, *shape)."""

    def __init__(self, coefficient: Tensor) -> None:
        self.coefficient = coefficient

    def __call__(self, examples: Sequence[int]) -> Tensor:
        return self.coefficient.expand(len(examples), *self.coefficient.shape)

    def of(self, example: int) -> Tensor:
        del example
        return self.coefficient


class OwnNumbers(CoefficientDraw):
    """Coefficients cut from one stream of numbers, in the order of the examples; for few numbers, which are kept.

    Args:
        draw: function of a count that returns the first coefficients of the stream, (count, *shape).
    """

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self._draw = draw
        self._drawn = torch.empty(0)

    def __call__(self, examples: Sequence[int]) -> Tensor:
        count = 1 + max(examples)
        if len(self._drawn) < count:
            self._drawn = self._draw(count)
        return self._drawn[:count] if tuple(examples) == tuple(range(count)) else self._drawn[list(examples)]


class SignedNumbers(CoefficientDraw):
    """One draw for all examples, whose entries along the first dimension have the signs of each example.

    For coefficients of so many numbers that those of each example would cost more than the forward passes.

    Args:
        draw: returns the numbers, (M, ...).
        signs: signs of their M rows.
    """

    def __init__(self, draw: Callable[[], Tensor], signs: Signs) -> None:
        self._draw, self._signs = draw, signs

    def __call__(self, examples: Sequence[int]) -> Tensor:
        numbers = self._draw()
        if tuple(examples) == (0,):
            return numbers.unsqueeze(0)
        return numbers * self._of(examples, numbers)

    def sum(self, factors: Sequence[float]) -> Tensor:
        numbers = self._draw()
        if len(factors) == 1:
            return numbers * factors[0]
        signs = self._of(range(len(factors)), numbers)
        return numbers * torch.einsum("b,b...->...", _like(factors, signs), signs)

    def _of(self, examples: Sequence[int], numbers: Tensor) -> Tensor:
        signs_BM = self._signs(examples, numbers.dtype, numbers.device)
        return signs_BM.view(*signs_BM.shape, *[1] * (numbers.ndim - 1))

    def stack(self, examples: Sequence[int]) -> "Stack":
        if tuple(examples) == (0,):
            return super().stack(examples)
        numbers = self._draw()
        return _SignedStack(numbers, self._of(examples, numbers))


class Stack:
    """Coefficients of B examples.

    Args:
        coefficients: (B, *shape).
    """

    def __init__(self, coefficients: Tensor) -> None:
        self._coefficients = coefficients

    def scaled(self, scale: float, part: slice = slice(None)) -> Tensor:
        """Scale * those of a part of the examples: a new tensor, (b, *shape)."""
        return scale * self._coefficients[part]

    def added(self, point: Tensor, scale: float, part: slice = slice(None)) -> Tensor:
        """Point + scale * those of a part of the examples: a new tensor, (b, *shape)."""
        return self.scaled(scale, part).add_(point)


class _SignedStack(Stack):
    def __init__(self, numbers: Tensor, signs: Tensor) -> None:
        self._numbers, self._signs = numbers, signs

    def scaled(self, scale: float, part: slice = slice(None)) -> Tensor:
        return self._numbers * (scale * self._signs[part])

    def added(self, point: Tensor, scale: float, part: slice = slice(None)) -> Tensor:
        return torch.addcmul(point, self._numbers, scale * self._signs[part])


def _like(factors: Sequence[float], values: Tensor) -> Tensor:
    return torch.tensor(factors, dtype=values.dtype, device=values.device)
