"""Checks of the files of a run folder: its manifest, the header of its step log, and tensors computed from data.

manifest.json has the size and SHA-256 of each file, and a digest of these entries. It is written last. Whoever reads a
file checks it first, so that a changed, missing or added file is found.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tezo.directions.bases.basis import StoredTensors
from tezo.runs.resuming import resume_line
from tezo.runs.step_log import LOG as LOG
from tezo.runs.step_log import read_header
from tezo.system.digests import content_hash
from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, open_to_read, plain_file, read_object, storing, write_file

MANIFEST = "manifest.json"
_FILES, _DIGEST = "files", "sha256_of_files"


def entry_of(path: Path) -> dict[str, Any]:
    """Returns {"bytes": size, "sha256": hexadecimal} of a file; `UntrustedError` if it is a link or no plain file."""
    with open_to_read(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Writes the manifest of a folder with these of its files, and all files of these of its folders."""
    with storing(folder / MANIFEST):  # an unreadable file has no digest
        entries = {name: entry_of(folder / name) for given in names for name in _files(folder, given)}
    tree = {_FILES: entries, _DIGEST: _digest(entries)}
    write_file(folder / MANIFEST, (json.dumps(tree, indent=2) + "\n").encode())


def resume_line_of(folder: Path) -> str:
    """Returns the `resume_line` of a run folder."""
    try:
        config = read_header(folder / LOG).get("config")
    except RequestError:
        config = None
    return resume_line(folder, config if isinstance(config, Mapping) else {})


def check_manifest(folder: Path, names: Collection[str], *, required: bool = False) -> None:
    """Checks files against the manifest of their folder, which is written when a run has ended.

    Args:
        folder: the folder.
        names: its files, and folders of which all files are checked; those that never existed are passed over.
        required: whether a folder without a manifest is refused.

    Raises:
        RequestError: a file was changed, removed or added since then; the file is named.
    """
    if not os.path.lexists(folder / MANIFEST):
        if required:
            raise RequestError(
                f"{folder} has no {MANIFEST}, so that its files cannot be checked; put it back, or write them again by "
                f"`{resume_line_of(folder)}`."
            )
        return
    try:
        tree = read_object(folder / MANIFEST)
        entries = tree.get(_FILES)
        if not isinstance(entries, dict) or tree.get(_DIGEST) != _digest(entries):
            raise UntrustedError(f"{MANIFEST} is damaged")
    except UntrustedError as error:
        raise RequestError(
            f"{folder}: {error}, and the other files may be sound; put an intact copy in its place, or "
            f"delete it, and write all files again by `{resume_line_of(folder)}`."
        ) from None
    try:
        for given in names:
            listed = {name for name in entries if name == given or name.startswith(f"{given}/")}
            for name in sorted(listed | set(_files(folder, given))):
                if name not in entries:
                    raise UntrustedError(f"{name} is not a file of the run")
                if not os.path.lexists(folder / name):
                    raise UntrustedError(f"{name} is missing")
                if entry_of(folder / name) != entries[name]:
                    raise UntrustedError(f"{name} is not the file that was saved")
    except (UntrustedError, OSError) as error:
        raise RequestError(
            f"{folder}: {error}; put an intact copy in its place. The files written at the end of the run are written "
            f"again from its log by `{resume_line_of(folder)}`, after {MANIFEST} is deleted."
        ) from None


def _digest(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _files(folder: Path, name: str) -> list[str]:
    """Returns the files under a name, relative to the folder; links as they are, whatever they lead to."""
    path = folder / name
    if path.is_dir() and not path.is_symlink():
        return [inside for entry in sorted(path.iterdir()) for inside in _files(folder, f"{name}/{entry.name}")]
    return [name] if os.path.lexists(path) else []


HEADER_TYPES = {
    "directions": int, "config": dict, "untrained": list, "model": dict, "rows": str, "read_rows": str,
    "reported_rows": str, "device": str, "noise": int, "versions": dict, "sources": dict,
}  # fmt: skip
"""Key of a step log's header -> type."""


def check_complete(header: Mapping[str, Any]) -> None:
    """Raises a `RequestError` if a log's header lacks a key of `HEADER_TYPES`, or has it with another type."""
    if not all(isinstance(header.get(key), kind) for key, kind in HEADER_TYPES.items()):
        raise RequestError("steps.log: its header is not that of a run; give the folder of a run.")


def check_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises a `RequestError` if a setting differs from the one that the run began with; both by dotted key."""
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key != "method.name", key)):  # options follow it
        if before.get(key) != now.get(key):
            raise RequestError(
                f"{key} is {now.get(key)!r}, and the run began with {before.get(key)!r}; use the original value, "
                "or another --output."
            )


def check_rows(header: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises a `RequestError` if the digests of rows differ from those in the header."""
    kinds = {"rows": "training rows", "answers": "answers of its training rows", "held_rows": "dev and test rows"}
    for key, rows in kinds.items():
        if header.get(key) != current[key]:
            raise RequestError(f"data: the {rows} are not those that the run began with; restore them.")


def check_place(
    header: Mapping[str, Any], current: Mapping[str, Any], drawn_on_the_device: Callable[[], str | None]
) -> list[str]:
    """Returns messages for the user about a changed device or changed package versions.

    Args:
        header: of the step log; "noise" is the version of the generator of dense noise and rounding on a CPU.
        current: "device", "versions" and "noise" of this process.
        drawn_on_the_device: returns the name of a parameter whose steps depend on the device type, or None.

    Raises:
        RequestError: the run's steps cannot be reproduced on this device.
    """
    before, now, notices = header["device"], current["device"], []
    if before != now:
        if (name := drawn_on_the_device()) is not None:
            raise RequestError(
                f"model.device is {now}, and the run drew noise for {name} on {before}, which "
                f"cannot be reproduced on another device; set model.device={before}."
            )
        notices.append(f"the run began on {before}: on {now} steps may differ in rounding.")
    elif now == "cpu" and header["noise"] != current["noise"] and (name := drawn_on_the_device()) is not None:
        raise RequestError(
            f"steps.log: the run drew noise for {name} with version {header['noise']} of the generator, and "
            f"this version of tezo has version {current['noise']}, which gives other weights; use the earlier tezo."
        )
    for package, version in current["versions"].items():
        if (old := header["versions"].get(package)) != version:
            notices.append(f"the run began with {package} {old}: with {version} steps may differ in rounding.")
    return notices


@dataclass(frozen=True)
class FactorFiles:
    """A `FactorStore` in the folder of a run, in files `<kind>-<step>.safetensors`; a replay needs no data.

    Kinds are "basis", the factors of a data-dependent basis, and "feedback", the gradients of a feedback step.

    Attributes:
        folder: folder of the run.
        writes: whether this process writes the files; `save` does nothing if False.
        digests: file name -> SHA-256 in the run's step log; other files are not the run's. None: any intact file is.
        saved: called with the name and SHA-256 of each file that is written.
    """

    folder: Path
    writes: bool
    digests: Mapping[str, str] | None = None
    saved: Callable[[str, str], None] | None = None

    def path(self, kind: str, step: int) -> Path:
        """Returns the path of the file for `kind` at `step`."""
        return self.folder / f"{kind}-{step}.safetensors"

    def save(self, kind: str, step: int, stored: StoredTensors) -> None:
        """Writes the file atomically."""
        if self.writes:
            plain = {name: tensor.cpu().contiguous() for name, tensor in stored.tensors.items()}
            metadata = f"{stored.passes} {_hash(plain, stored.passes)}"  # one entry: several have no fixed order
            data = save(plain, metadata={"calls_sha256": metadata})
            write_file(self.path(kind, step), data)
            if self.saved is not None:
                self.saved(self.path(kind, step).name, hashlib.sha256(data).hexdigest())

    def load(self, kind: str, step: int) -> StoredTensors | None:
        """Reads and verifies the file; None if the run has not written it.

        Raises:
            RequestError: the file is damaged, missing, or of another run or step.
        """
        path = self.path(kind, step)
        if self.digests is not None and path.name in self.digests:
            self.check(path.name)
        elif self.digests is not None or not path.exists():
            return None
        try:
            with safe_open(plain_file(path), framework="pt") as file:
                calls, _, sha256 = (file.metadata() or {}).get("calls_sha256", "").partition(" ")
                factors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if self.digests is None and sha256 != _hash(factors, int(calls)):
                raise UntrustedError
            return StoredTensors(factors, int(calls))
        except (UntrustedError, OSError, ValueError, SafetensorError):
            raise RequestError(
                f"{path} is damaged; replace it with an intact copy, or delete it to compute it again."
            ) from None

    def check(self, name: str | None = None) -> None:
        """Checks one file, or all files, against the digests of the step log.

        Raises:
            RequestError: a file is missing, or is not the one that the run wrote; the file is named.
        """
        digests = self.digests or {}
        for each in digests if name is None else [name]:
            path = self.folder / each
            if not path.is_file() or path.is_symlink() or entry_of(path)["sha256"] != digests[each]:
                state = "not the file that this run wrote" if path.exists() else "missing"
                step = path.stem.rpartition("-")[2]
                raise RequestError(
                    f"{path} is {state}, and steps from {step} on depend on it; put an intact copy in its place, or "
                    f"stop before it, with tezo replay --step {step}."
                )


def _hash(factors: Mapping[str, Tensor], calls: int) -> str:
    digest = hashlib.sha256(str(calls).encode())
    for name, factor in sorted(factors.items()):
        digest.update(f"{name} {content_hash(factor)}".encode())
    return digest.hexdigest()
