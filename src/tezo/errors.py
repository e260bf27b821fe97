"""What goes wrong, by whose doing it is.

Messages are one or two sentences that name the key, the value and the way out. The command line
prints them bare and exits with `exit_code`.
"""

import difflib
from collections.abc import Iterable


class TezoError(Exception):
    """Any failure this library foresees."""

    exit_code = 1


class RequestError(TezoError, ValueError):
    """What was asked for is wrong: nothing has been started or written."""

    exit_code = 2


class RunError(TezoError, RuntimeError):
    """A run that began could not go on."""


class NonFiniteLossError(RunError):
    """A loss was NaN or infinite; the parameters are back where they were before that step.

    The same request would end so again, so the exit code is that of a request to be changed.

    Attributes:
        step: the step that failed, from 0.
        last_loss: the mean loss of the last finished step, None at the first.
    """

    exit_code = 2

    def __init__(self, step: int, loss: float, last_loss: float | None) -> None:
        last = "there was no earlier step" if last_loss is None else f"the last good loss was {last_loss:.6g}"
        super().__init__(
            f"the loss is {loss} at step {step}; {last}, and the weights are as before that step. "
            "Lower method.lr or method.rho, or look at the rows of this batch."
        )
        self.step = step
        self.last_loss = last_loss


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest known name, else the list of known names."""
    options = list(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}?"
    return "Known: " + ", ".join(options) + "."
