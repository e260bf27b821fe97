"""manifest.json: size and SHA-256 of each file of a folder. It is written last, and checked by whoever reads a file.

A changed, missing or added file is found, whether by a fault of the disk or by somebody's hand. The manifest has a
digest of its own entries, so that its damage is not taken for that of a file.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.files import UntrustedError, open_to_read, read_object, storing, write_file

MANIFEST = "manifest.json"
_FILES, _DIGEST = "files", "sha256_of_files"

Entry = dict[str, Any]
"""{"bytes": size, "sha256": digest in hexadecimal}."""


def entry_of(path: Path) -> Entry:
    """The entry of a file; `UntrustedError` if it is a link or no plain file."""
    with open_to_read(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Writes the manifest of a folder.

    Args:
        folder: the folder.
        names: its files, and folders of which all files are included.

    Raises:
        RunError: it cannot be written.
    """
    with storing(folder / MANIFEST):  # of what cannot be read there is no digest to write
        entries = {name: entry_of(folder / name) for given in names for name in _files(folder, given)}
    tree = {_FILES: entries, _DIGEST: _digest(entries)}
    write_file(folder / MANIFEST, (json.dumps(tree, indent=2) + "\n").encode())


def check_manifest(folder: Path, names: Collection[str], *, required: bool = False) -> None:
    """Checks files against the manifest of their folder, which is written when a run has ended.

    Args:
        folder: the folder.
        names: its files, and folders of which all files are checked; those that never existed are passed over.
        required: whether a folder without a manifest is refused, since its files are of a run that has ended.

    Raises:
        RequestError: a file was changed, removed or added since the manifest was written; the file is named.
    """
    if not os.path.lexists(folder / MANIFEST):
        if required:
            raise RequestError(
                f"{folder} has no {MANIFEST}, so that its files cannot be checked; put it back, or write them again by "
                f"tezo train --output {folder} --resume."
            )
        return
    try:
        entries = _read(folder / MANIFEST)
    except UntrustedError as error:
        raise RequestError(
            f"{folder}: {error}, and the other files may be sound; put an intact copy in its place, or "
            f"delete it, and write all files again by tezo train --output {folder} --resume."
        ) from None
    try:
        for given in names:
            listed = {name for name in entries if name == given or name.startswith(f"{given}/")}
            for name in sorted(listed | set(_files(folder, given))):
                _check(folder / name, name, entries)
    except (UntrustedError, OSError) as error:
        raise RequestError(f"{folder}: {error}; put an intact copy in its place.") from None


def _read(path: Path) -> dict[str, Any]:
    """The entries of a manifest; `UntrustedError` if it is damaged, or a link."""
    tree = read_object(path)
    entries = tree.get(_FILES)
    if not isinstance(entries, dict) or tree.get(_DIGEST) != _digest(entries):
        raise UntrustedError(f"{path.name} is damaged")
    return entries


def _digest(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _files(folder: Path, name: str) -> list[str]:
    """The files under a name, relative to the folder; links as they are, whatever they lead to."""
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        return [inside for entry in sorted(path.iterdir()) for inside in _files(folder, f"{name}/{entry.name}")]
    return [name] if os.path.lexists(path) else []


def _check(path: Path, name: str, entries: dict[str, Any]) -> None:
    if name not in entries:
        raise UntrustedError(f"{name} is not a file of the run")
    if not os.path.lexists(path):
        raise UntrustedError(f"{name} is missing")
    if entry_of(path) != entries[name]:
        raise UntrustedError(f"{name} is not the file that was saved")
