"""The environment of a run: hardware, memory and package versions."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tezo.system.errors import RunError, is_of_memory
from tezo.tasks.objectives.objective import Encoded


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: the maximum reserved on a GPU, the peak resident set for a CPU."""
    return int(torch.cuda.max_memory_reserved()) if device.type == "cuda" else peak_resident()


def peak_resident() -> int:
    """Returns the peak resident set of this process in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        used = psutil.Process().memory_info()
        return int(getattr(used, "peak_wset", used.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux has the memory that a container may take: a number of bytes, or "max"."""


def usable_memory() -> int:
    """Returns the bytes of memory of this machine, or of its container where that may take fewer."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except AttributeError:  # Windows
        import psutil

        memory = int(psutil.virtual_memory().total)
    limit = CONTAINER_LIMIT.read_text(encoding="ascii").strip() if CONTAINER_LIMIT.is_file() else ""
    return min(memory, int(limit)) if limit.isdecimal() else memory


@contextmanager
def memory_for(what: str, rows: Sequence[Encoded], key: str) -> Iterator[None]:
    """Turns a failed allocation into a `RunError` with the settings to lower.

    Args:
        what: the operation, in words.
        rows: the rows of the operation.
        key: the setting that determines the number of rows.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_of_memory(error):
            raise
        longest = max((encoded.length for encoded in rows), default=0)
        raise RunError(
            f"out of memory at {what}, with {len(rows)} rows of up to {longest} tokens. "
            f"Lower {key} or data.max_length, or set model.dtype=bfloat16."
        ) from error


def versions(packages: Sequence[str] = ("tezo", "torch", "transformers", "peft", "numpy")) -> dict[str, str]:
    """Returns package name -> version, for Python and the packages that a result depends on."""
    installed = {"python": platform.python_version()} | dict.fromkeys(packages, "not installed")
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def hardware() -> str:
    """Names the GPU, or the CPU and its number of threads."""
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"{platform.machine()} CPU, {threads()}"


def threads() -> str:
    """Returns the number of threads that torch computes with: "1 thread", "2 threads"."""
    count = torch.get_num_threads()
    return f"{count} thread{'' if count == 1 else 's'}"
