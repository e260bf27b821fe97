"""Checks of an optimizer's settings and losses; the errors name the setting."""

import statistics
from collections.abc import Sequence

from tezo.optim.closures import Closure
from tezo.optim.estimators.estimate import Probe
from tezo.system.errors import RequestError

MOST_RATE, MOST_RANK = 1e30, 1 << 16
"""Upper limits. Rates: products with a rate remain finite in float32. Frozen rank: a larger one compresses nothing."""
FAR_ABOVE, FAR_AT_LEAST = 0.5, 0.1
"""A loss is far above another if it is higher by more than half of that, and by more than 0.1."""


def check_rate(name: str, value: float) -> None:
    """Checks that a rate is a number between 0 and `MOST_RATE`.

    Raises:
        RequestError: it is not; the message has the name of the setting.
    """
    if not 0 <= value <= MOST_RATE:
        raise RequestError(f"method.{name} is {value}; it must lie between 0 and {MOST_RATE:g}.")


def check_rho(value: float) -> None:
    """Checks that a perturbation scale is positive, and at most `MOST_RATE`.

    Raises:
        RequestError: it is not.
    """
    if not 0 < value <= MOST_RATE:
        raise RequestError(f"method.rho is {value}; it must be positive, and at most {MOST_RATE:g}.")


def check_closure(closure: Closure | None) -> Closure:
    """Returns the closure of a step.

    Raises:
        RequestError: there is none, or it cannot be called.
    """
    if closure is None:
        raise RequestError(
            "step() needs a closure that returns the loss: optimizer.step(lambda: loss_of(batch)). Trainer of "
            "transformers gives none: use tezo.TezoTrainer, or tezo.TezoSFTTrainer for TRL."
        )
    if not callable(closure):
        raise RequestError(
            f"step() needs a function that returns the loss, and was given {type(closure).__name__}; write lambda: "
            "before it."
        )
    return closure


def check_count(name: str, value: int | None, most: int) -> None:
    """Checks that a number lies between 1 and `most`, if it is given.

    Raises:
        RequestError: it does not; the message has the name of the setting.
    """
    if value is not None and not 1 <= value <= most:
        raise RequestError(f"method.{name} is {value}; it must lie between 1 and {most}.")


def highest_loss(probes: Sequence[Probe]) -> float:
    """Returns the higher of the mean losses at W + rho Z and at W - rho Z."""
    return max(statistics.fmean(getattr(p, sign) for p in probes) for sign in ("loss_plus", "loss_minus"))


def is_far_above(loss: float, other: float) -> bool:
    """Returns whether a loss is far above another: a perturbed model tells little of the model then.

    It is never so for a reward, whose loss is negative.
    """
    return other > 0 and loss - other > max(FAR_ABOVE * other, FAR_AT_LEAST)
