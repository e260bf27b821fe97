"""Answers of engines in other processes: what may be wrong with them, and what is done then."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from tezo.forward.engine import Asked, Told
from tezo.system.errors import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class MalformedError(Exception):
    """An answer is not one to what was asked; the message says what was sent, without a full stop."""


def once_more(ask: Callable[[], T], subject: str, way_out: str) -> T:
    """Returns what is answered; a malformed answer is asked for once more, and refused then.

    Args:
        ask: returns the answer, or raises a `MalformedError`.
        subject: of the sentence that goes on with what was sent.
        way_out: what to do, after "; ".

    Raises:
        RequestError: two answers were malformed.
    """
    try:
        return ask()
    except MalformedError as error:
        logger.warning("%s %s. It is asked once more.", subject, error)
    try:
        return ask()
    except MalformedError as error:
        raise RequestError(f"{subject} {error}; {way_out}. A run that has begun goes on with --resume.") from None


def check_told(told: Sequence[Told], changes: int, asked: Asked) -> None:
    """Checks that this is what was asked for, under so many changes.

    NaN is let through: a model that computes it has diverged, which is for the run to notice.

    Raises:
        MalformedError: it is not.
    """
    if len(told) != changes:
        raise MalformedError(f"{len(told)} answers under {changes} changes")
    likely = (len(asked.text_P), asked.likely)
    for own in told:
        values = own.log_probs_PC, own.likely_log_probs_PL
        shapes = [tuple(part.shape) for part in (*values, own.likely_PL)]
        if shapes != [tuple(asked.tokens_PC.shape), likely, likely]:
            raise MalformedError(f"log-probabilities of shapes {shapes[0]} and {shapes[1]}")
        if any(bool((part > 0).any()) for part in values):
            raise MalformedError("a log-probability above 0")
        if bool((own.likely_PL < 0).any()):
            raise MalformedError("a token below 0")


def has_twins(told: Sequence[Told]) -> bool:
    """Returns whether two changes have log-probabilities that are equal to the bit."""
    parts = [(own.log_probs_PC, own.likely_log_probs_PL) for own in told]
    return len({tuple(part.numpy().tobytes() for part in own) for own in parts}) < len(told)


def check_continued(found: Sequence[Sequence[Sequence[int]]], changes: int, prompts: int) -> None:
    """Checks that these are continuations of so many prompts, under so many changes.

    Raises:
        MalformedError: they are not.
    """
    if len(found) != changes or any(len(own) != prompts for own in found):
        counts = [len(own) for own in found]
        raise MalformedError(f"continuations of {counts} prompts in place of {changes} times {prompts}")
    if any(type(token) is not int or token < 0 for own in found for tokens in own for token in tokens):
        raise MalformedError("a token that is not a whole number of at least 0")
