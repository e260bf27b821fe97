"""Reading files that may come from a stranger."""

import json
from pathlib import Path
from typing import Any

from tezo.errors import RequestError

MOST_JSON = 1 << 24
"""Bytes of a JSON file, at most."""


class UntrustedError(ValueError):
    """A file that cannot be used, and why, in a few words."""


def read_bytes(path: Path, most: int) -> bytes:
    """A file's bytes; `UntrustedError` where it is no plain file, or has more than `most`."""
    try:
        if not path.is_file():
            raise UntrustedError(f"{path.name} is missing")
        if path.stat().st_size > most:
            raise UntrustedError(f"{path.name} has more than {most} bytes")
        return path.read_bytes()
    except OSError:
        raise UntrustedError(f"{path.name} cannot be read") from None


def read_json(path: Path) -> Any:
    """JSON from a file of bounded size; `UntrustedError` for anything else."""
    data = read_bytes(path, MOST_JSON)
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError):
        raise UntrustedError(f"{path.name} cannot be read") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; `UntrustedError` for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UntrustedError(f"{path.name} is no JSON object")
    return value


def own_object(path: Path, way_out: str) -> dict[str, Any]:
    """`read_object` of a file that this library wrote; a `RequestError` with the way out where it is damaged."""
    try:
        return read_object(path)
    except UntrustedError as error:
        raise RequestError(f"{path.parent}: {error}; {way_out}.") from None


def plain_file(path: Path) -> Path:
    """The path, if it is a file of its folder and no link out of it."""
    if path.is_symlink() or not path.is_file():
        raise UntrustedError(f"{path.name} is missing, or is a link")
    return path
