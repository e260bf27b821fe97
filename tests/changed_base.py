"""Runs whose base is changed while they go on: `python tests/changed_base.py HOME OUTPUT HOW STEP`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from short_runs import config

from tezo.system.errors import TezoError
from tezo.training.listeners import Listener
from tezo.training.loop import train


def zeros(path: Path) -> None:
    """Writes zeros over the second half, in place."""
    _over(path, b"\0")


def nans(path: Path) -> None:
    """Writes what are NaNs in every float type over the second half, in place."""
    _over(path, b"\xff")


def _over(path: Path, byte: bytes) -> None:
    half = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(half)
        file.write(byte * half)


def shorter(path: Path) -> None:
    """Cuts the second half off."""
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    """Puts another file in its place, as most programs write a file."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-4] + bytes(4))
    other.replace(path)


def gone(path: Path) -> None:
    """Removes it."""
    path.unlink()


def touched(path: Path) -> None:
    """Writes it again with the content that it has."""
    path.write_bytes(path.read_bytes())


WAYS: dict[str, Callable[[Path], None]] = {way.__name__: way for way in (zeros, nans, shorter, replaced, gone, touched)}


class Change(Listener):
    """Changes a file before a step, once.

    Args:
        path: of the file.
        step: counted from 0.
        way: what is done with it.
    """

    def __init__(self, path: Path, step: int, way: Callable[[Path], None]) -> None:
        self.path, self.step, self.way = path, step, way

    def stepping(self, step: int) -> None:
        if step == self.step:
            self.way(self.path)


def main() -> int:
    home, output, way, step = sys.argv[1:]
    change = Change(Path(home, "opt/model.safetensors"), int(step), WAYS[way])
    try:
        train(config(Path(home)), Path(output), [change])
    except TezoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
