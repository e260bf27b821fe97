"""manifest.json: size and SHA-256 of each file of a folder. It is written last, and checked by whoever reads a file.

A changed, missing or added file is found, whether by a fault of the disk or by somebody's hand.
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.files import UntrustedError, plain_file, read_object, write_file

MANIFEST = "manifest.json"

Entry = dict[str, Any]
"""{"bytes": size, "sha256": digest in hexadecimal}."""


def entry_of(path: Path) -> Entry:
    """The entry of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Writes the manifest of a folder.

    Args:
        folder: the folder.
        names: its files, and folders of which all files are included.

    Raises:
        RunError: it cannot be written.
    """
    entries = {name: entry_of(folder / name) for given in names for name in _files(folder, given)}
    write_file(folder / MANIFEST, (json.dumps(entries, indent=2) + "\n").encode())


def check_manifest(folder: Path, names: Collection[str]) -> None:
    """Checks files against the manifest of their folder. A folder without a manifest has not been finished.

    Args:
        folder: the folder.
        names: its files, and folders of which all files are checked; those that never existed are passed over.

    Raises:
        RequestError: a file was changed, removed or added since the manifest was written; the file is named.
    """
    if not (folder / MANIFEST).exists():
        return
    try:
        entries = read_object(plain_file(folder / MANIFEST))
        for given in names:
            listed = {name for name in entries if name == given or name.startswith(f"{given}/")}
            for name in sorted(listed | set(_files(folder, given))):
                _check(folder / name, name, entries)
    except (UntrustedError, OSError) as error:
        raise RequestError(f"{folder}: {error}; put an intact copy in its place.") from None


def _files(folder: Path, name: str) -> list[str]:
    path = folder / name
    found = [inside for inside in sorted(path.rglob("*")) if not inside.is_dir()] if path.is_dir() else [path]
    return [file.relative_to(folder).as_posix() for file in found if file.exists() or file.is_symlink()]


def _check(path: Path, name: str, entries: dict[str, Any]) -> None:
    if name not in entries:
        raise UntrustedError(f"{name} is not a file of the run")
    if not path.exists():
        raise UntrustedError(f"{name} is missing")
    if entry_of(plain_file(path)) != entries[name]:
        raise UntrustedError(f"{name} is not the file that was saved")
