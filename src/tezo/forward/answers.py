"""Answers of engines in other processes: their faults, and the second request that follows one."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from tezo.forward.engine import Asked, Told
from tezo.system.errors import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class MalformedError(Exception):
    """An answer does not match its request; the message describes the answer, without a full stop."""


def once_more(ask: Callable[[], T], subject: str, way_out: str) -> T:
    """Returns the answer; after a malformed answer it is requested once more, and then refused.

    Args:
        ask: returns the answer, or raises a `MalformedError`.
        subject: of the sentence that continues with the description of the answer.
        way_out: the remedy, after "; ".

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
    """Checks that the answers match the request, one for each change.

    NaN is let through: a model that computes it has diverged, which is for the run to notice.

    Raises:
        MalformedError: it is not.
    """
    if len(told) != changes:
        raise MalformedError(f"{len(told)} answers under {changes} changes")
    likely = (len(asked.text_P), asked.likely)
    for answer in told:
        values = answer.log_probs_PC, answer.likely_log_probs_PL
        shapes = [tuple(part.shape) for part in (*values, answer.likely_PL)]
        if shapes != [tuple(asked.tokens_PC.shape), likely, likely]:
            raise MalformedError(f"log-probabilities of shapes {shapes[0]} and {shapes[1]}")
        if any(bool((part > 0).any()) for part in values):
            raise MalformedError("a log-probability above 0")
        if bool((answer.likely_PL < 0).any()):
            raise MalformedError("a token below 0")


def has_twins(told: Sequence[Told]) -> bool:
    """Returns whether two changes have log-probabilities that are equal to the bit."""
    answers = [(answer.log_probs_PC, answer.likely_log_probs_PL) for answer in told]
    return len({tuple(part.numpy().tobytes() for part in answer) for answer in answers}) < len(told)


def check_continued(found: Sequence[Sequence[Sequence[int]]], changes: int, prompts: int) -> None:
    """Checks that these are continuations of so many prompts, under so many changes.

    Raises:
        MalformedError: they are not.
    """
    if len(found) != changes or any(len(texts) != prompts for texts in found):
        counts = [len(texts) for texts in found]
        raise MalformedError(f"continuations of {counts} prompts in place of {changes} times {prompts}")
    if any(type(token) is not int or token < 0 for texts in found for tokens in texts for token in tokens):
        raise MalformedError("a token that is not a whole number of at least 0")
