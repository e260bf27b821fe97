"""Exceptions of the library: a wrong request, or a run that failed.

A message is one or two sentences with the key, the value and the way out. The command line prints the message alone
and exits with `exit_code`: 2 where the same request would fail again, else 1.
"""

import difflib
import errno
import signal
from collections.abc import Iterable
from pathlib import Path


class TezoError(Exception):
    """Base class of all errors that this library raises."""

    exit_code = 1


class RequestError(TezoError, ValueError):
    """The request is wrong; nothing has been started or written."""

    exit_code = 2


class RunError(TezoError, RuntimeError):
    """A run failed after it had started."""


class RunInterrupted(KeyboardInterrupt):
    """A run was stopped by the signal `by`; `steps` steps are saved in its folder, and it can be resumed.

    It is no `Exception`, so that `except Exception` does not take Ctrl-C for a failure and go on.
    """

    def __init__(self, by: str, steps: int, folder: Path) -> None:
        super().__init__(by, steps, folder)
        self.by, self.steps, self.folder = by, steps, folder

    def __str__(self) -> str:
        return f"stopped by {self.by} after step {self.steps}; {resume_words(self.folder)}"

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal, as of a process that it ends; 1 if another process got it."""
        number = getattr(signal, self.by, None)
        return 1 if number is None else 128 + number


def resume_words(folder: Path) -> str:
    """Returns how to continue an interrupted run from Python."""
    return f"its steps so far are in {folder}: continue with tezo.train(..., output={str(folder)!r}, resume=True)."


class NonFiniteLossError(RunError):
    """A loss was NaN or infinite; the parameters are restored to their values before that step.

    Attributes:
        step: the step that failed, counted from 0.
        last_loss: the mean loss of the last finished step; None at the first step.
    """

    exit_code = 2

    def __init__(self, step: int, loss: float, last_loss: float | None) -> None:
        state = "no step was taken before, so the learning rate is not the reason"
        way_out = "A model in float16 is loaded in float32 or bfloat16 instead; or lower method.rho"
        if last_loss is not None:
            state = f"the last good loss was {last_loss:.6g}, and the weights are restored to before that step"
            way_out = "Lower method.lr or method.rho"
        super().__init__(f"the loss is {loss} at step {step}; {state}. {way_out}, or check the rows of this batch.")
        self.step, self.last_loss = step, last_loss


class NonFiniteResultError(RunError):
    """The tuned model's loss is NaN or infinite; no result was saved."""

    exit_code = 2

    def __init__(self, steps: int, loss: float) -> None:
        super().__init__(
            f"the loss is {loss} after {steps} steps, so no result was saved. Lower method.lr, or give data.dev to "
            "keep the best step."
        )


class NonFiniteModelError(NonFiniteResultError):
    """Outputs of a model of `dtype` are NaN or infinite, outside any step: no learning rate helps."""

    def __init__(self, subject: str, value: float, dtype: object) -> None:
        name = str(dtype).removeprefix("torch.")
        way_out = "its weights or these rows are at fault: load the model again, or try other rows"
        if name == "float16":
            way_out = (
                "it computes beyond the largest number of float16: load it in float32 or bfloat16 (model.dtype=float32)"
            )
        RunError.__init__(self, f"{subject} is {value} in {name}; {way_out}.")


class ChangedBaseError(RunError):
    """A file of the base model was changed while the model computed; nothing that it computed since then is kept.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, change: str) -> None:
        super().__init__(
            f"model.name: {path} is not the file that the model was loaded from ({change}). Put that file back; a run "
            "then goes on with --resume."
        )
        self.path = path


class PerturbationWarning(UserWarning):
    """A step's losses were measured where the model is far from itself."""


_OF_MEMORY = ("allocate memory", "failed to map segment", "out of memory", "bad_alloc", "without exception set")
"""Parts of the messages of errors of other kinds that mean that memory is short, in lower case. The last is Python's,
where an extension in C had no memory left for its error."""


def is_of_memory(error: BaseException) -> bool:
    """Returns whether an error, or one that led to it, is that memory is short."""
    found: BaseException | None = error
    while found is not None:
        said = str(found).lower()
        if isinstance(found, MemoryError) or getattr(found, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(found, ImportError | RuntimeError | SystemError) and any(part in said for part in _OF_MEMORY):
            return True
        found = found.__cause__ or found.__context__
    return False


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "Did you mean 'x'?" with the closest known name, else the list of known names."""
    options = list(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else "Known: " + ", ".join(options) + "."
