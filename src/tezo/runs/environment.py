"""The machine that a run is on: its name, its memory, the versions of what it runs."""

import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch

from tezo.errors import RunError
from tezo.tasks.objectives import Encoded


def peak_memory() -> int:
    """Bytes: the most reserved on the GPU, or on a CPU the peak resident set of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def memory_for(what: str, rows: Sequence[Encoded], key: str) -> Iterator[None]:
    """Turns an allocation that fails inside into an error that says what to lower.

    Args:
        what: is being done, in words.
        rows: it is done with.
        key: the setting that decides how many at once.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refused = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not refused:
            raise
        longest = max((encoded.length for encoded in rows), default=0)
        raise RunError(
            f"out of memory at {what}, with {len(rows)} rows of up to {longest} tokens. "
            f"Lower {key} or data.max_length, or set model.dtype=bfloat16."
        ) from error


def versions(packages: Sequence[str] = ("tezo", "torch", "transformers", "peft", "numpy")) -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def hardware() -> str:
    """The processor or GPU, in words."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
