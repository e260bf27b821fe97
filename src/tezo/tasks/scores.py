"""A score, made of the value that a scorer returns; or the reason why it is missing.

A score that cannot be had is missing, NaN, and never zero: a member of a population is not worse for a judge's failure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = math.nan
LARGEST = 1e15
"""The largest magnitude of a score, or of a part of one: its squares can be added up, and a report reads it."""
MOST_SHOWN = 80
"""Characters of a value, or of an error, in a message."""


@dataclass(frozen=True)
class Scored:
    """A score.

    Attributes:
        value: the sum of its parts; NaN where it is missing.
        parts: by name; empty where the function returns a number.
        failure: why it is missing.
        lacks: names of the parts that are missing, and left out of the sum.
    """

    value: float
    parts: Mapping[str, float]
    failure: str | None = None
    lacks: Sequence[str] = ()


def missing(why: str) -> Scored:
    """Returns a score that could not be had, for this reason."""
    return Scored(MISSING, {}, why)


def raised(error: BaseException) -> Scored:
    """Returns a score that could not be had because the user's code raised an error."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a class of the user's
        text = ""
    return missing(f"raised {type(error).__name__}" + f" ({_cut(text)})" * bool(text))


def score_of(value: Any) -> Scored:
    """Returns the score that a function's value is.

    Args:
        value: a number, a scalar or array of one number of NumPy or torch, or a mapping of named parts, which are
            added. None is no score; a part that is None or NaN is left out of the sum, as TRL does.
    """
    if value is None:
        return missing("returned None")
    try:
        named = {str(name): part for name, part in value.items()} if isinstance(value, Mapping) else None
        numbers = [_number(part) for part in ([value] if named is None else named.values())]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of a class of the user's
        return missing(f"returned {shown(value)}, which is no number ({type(error).__name__})")
    parts = {} if named is None else dict(zip(named, numbers, strict=True))
    known = {name: part for name, part in parts.items() if not math.isnan(part)}
    total = numbers[0] if named is None else sum(known.values()) if known else MISSING
    if all(abs(number) <= LARGEST for number in (total, *known.values())):  # NaN is not
        return Scored(total, known, lacks=tuple(name for name in parts if name not in known))
    return missing(f"returned {shown(value)}, no finite number from -{LARGEST:g} to {LARGEST:g}")


def _number(value: Any) -> float:
    return MISSING if value is None else float(value.item() if hasattr(value, "item") else value)


def shown(value: Any) -> str:
    """Returns a value in a message."""
    try:
        return _cut(repr(value))
    except Exception:  # of an integer with thousands of digits, among others
        return f"an object of type {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
