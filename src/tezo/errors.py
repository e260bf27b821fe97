"""Exceptions of the library: a wrong request, or a run that failed.

A message is one or two sentences with the key, the value and the way out. The command line prints
the message alone and exits with `exit_code`.
"""

import difflib
from collections.abc import Iterable


class TezoError(Exception):
    """Base class of all errors that this library raises."""

    exit_code = 1


class RequestError(TezoError, ValueError):
    """The request is wrong; nothing has been started or written."""

    exit_code = 2


class RunError(TezoError, RuntimeError):
    """A run failed after it had started."""


class NonFiniteLossError(RunError):
    """A loss was NaN or infinite; the parameters are restored to their values before that step.

    The same request would fail again, so the exit code is that of a wrong request.

    Attributes:
        step: the step that failed, counted from 0.
        last_loss: the mean loss of the last finished step; None at the first step.
    """

    exit_code = 2

    def __init__(self, step: int, loss: float, last_loss: float | None) -> None:
        last = "there was no earlier step" if last_loss is None else f"the last good loss was {last_loss:.6g}"
        super().__init__(
            f"the loss is {loss} at step {step}; {last}, and the weights are restored to before that step. "
            "Lower method.lr or method.rho, or check the rows of this batch."
        )
        self.step = step
        self.last_loss = last_loss


class NonFiniteResultError(RunError):
    """The tuned model's loss is NaN or infinite; no result was saved.

    The same request would fail again, so the exit code is that of a wrong request.
    """

    exit_code = 2

    def __init__(self, steps: int, loss: float) -> None:
        super().__init__(
            f"the loss is {loss} after {steps} steps, so no result was saved. Lower method.lr, or give data.dev to "
            "keep the best step."
        )


class PerturbationWarning(UserWarning):
    """A step's losses were measured where the model is far from itself."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known name, else the list of known names."""
    options = list(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return "Known: " + ", ".join(options) + "."
