"""Which settings of an optimizer are refused."""

from tezo.directions.perturbations import Perturbation
from tezo.errors import RequestError
from tezo.estimators.estimate import MOST_DIRECTIONS

MOST_RATE, MOST_RANK = 1e30, 1 << 16
"""A rate times what it multiplies is a float32 number still; a frozen rank above this compresses nothing."""


def check_rate(name: str, value: float) -> None:
    """An error where a rate is below zero, no number, or too large.

    Raises:
        RequestError: with the setting's name.
    """
    if not 0 <= value <= MOST_RATE:
        raise RequestError(f"method.{name} is {value}; it must lie between 0 and {MOST_RATE:g}.")


def check_settings(lr: float, rho: float, decay: float, count: int, frozen: int | None, drawn: Perturbation) -> None:
    """An error where a setting of `ZerothOrderOptimizer` is out of range.

    Raises:
        RequestError: with the setting's name.
    """
    check_rate("lr", lr)
    check_rate("weight_decay", decay)
    if not 0 < rho <= MOST_RATE:
        raise RequestError(f"method.rho is {rho}; it must be positive, and at most {MOST_RATE:g}.")
    for name, number, most in (("num_directions", count, MOST_DIRECTIONS), ("frozen_rank", frozen, MOST_RANK)):
        if number is not None and not 1 <= number <= most:
            raise RequestError(f"method.{name} is {number}; it must lie between 1 and {most}.")
    if count > 1 and drawn.single_direction:
        raise RequestError(f"method.num_directions is {count}; this method is defined for 1 only.")
