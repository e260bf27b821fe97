"""Range checks for the settings of an optimizer."""

from tezo.errors import RequestError
from tezo.estimators.estimate import MOST_DIRECTIONS

MOST_RATE, MOST_RANK = 1e30, 1 << 16
"""Upper limits. Rates: products with a rate remain finite in float32. Frozen rank: a larger one compresses nothing."""


def check_rate(name: str, value: float) -> None:
    """Checks that a rate is a number between 0 and `MOST_RATE`.

    Raises:
        RequestError: it is not; the message has the name of the setting.
    """
    if not 0 <= value <= MOST_RATE:
        raise RequestError(f"method.{name} is {value}; it must lie between 0 and {MOST_RATE:g}.")


def check_settings(lr: float, rho: float, decay: float, count: int, frozen: int | None, *, single: bool) -> None:
    """Checks the settings of `ZerothOrderOptimizer`.

    Args:
        lr: learning rate.
        rho: perturbation scale.
        decay: weight decay.
        count: directions per step.
        frozen: `frozen_rank`.
        single: whether the method is defined for one direction per step only.

    Raises:
        RequestError: a setting is out of range; the message has its name.
    """
    check_rate("lr", lr)
    check_rate("weight_decay", decay)
    if not 0 < rho <= MOST_RATE:
        raise RequestError(f"method.rho is {rho}; it must be positive, and at most {MOST_RATE:g}.")
    for name, number, most in (("num_directions", count, MOST_DIRECTIONS), ("frozen_rank", frozen, MOST_RANK)):
        if number is not None and not 1 <= number <= most:
            raise RequestError(f"method.{name} is {number}; it must lie between 1 and {most}.")
    if count > 1 and single:
        raise RequestError(f"method.num_directions is {count}; this method is defined for 1 only.")
