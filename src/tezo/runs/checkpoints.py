"""Checkpoints: `checkpoint-<step>/` with tensors, a state, and a manifest of their sizes and SHA-256.

The folder appears under its name only when all of it is on disk. Reading trusts nothing: names, sizes and digests are
checked before a byte is used, and a folder that fails is passed over for an older one.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tezo.files import UntrustedError, new_folder, plain_file, read_object

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Checkpoint:
    """A run after `step` steps.

    Attributes:
        step: finished steps.
        tensors: by name.
        state: JSON.
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class DamagedError(Exception):
    """A checkpoint that cannot be used, and why."""


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes a checkpoint into the folder of a run, and removes all but the newest `keep`.

    Raises:
        RunError: it cannot be written; those that were there are as before.
    """
    path = run / f"{_PREFIX}{checkpoint.step}"
    with new_folder(path) as folder:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
        save_file(plain, folder / TENSORS, metadata={"format": "pt"})
        (folder / STATE).write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}), encoding="utf-8")
        manifest = {name: _described(folder / name) for name in (TENSORS, STATE)}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for old in [*checkpoints(run)[keep:], *_unfinished(run)]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def _unfinished(run: Path) -> list[Path]:
    """What a process that died while it saved has left."""
    return list(run.glob(f".{_PREFIX}*"))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    found = [path for path in run.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(found, key=_step_of, reverse=True)


def remove_checkpoints(run: Path) -> None:
    """All of them."""
    for path in [*checkpoints(run), *_unfinished(run)]:
        shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def newest(run: Path, most_steps: int) -> tuple[Checkpoint | None, list[str]]:
    """(the newest checkpoint that verifies and has at most `most_steps`, why each newer one was passed over)."""
    skipped = []
    for path in checkpoints(run):
        if _step_of(path) > most_steps:
            skipped.append(f"{path.name} was passed over: the log ends at step {most_steps}.")
            continue
        try:
            return load_checkpoint(path), skipped
        except DamagedError as error:
            skipped.append(f"{path.name} was passed over: {error}.")
    return None, skipped


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint; `DamagedError` says what is wrong."""
    try:
        return _verified(path)
    except UntrustedError as error:
        raise DamagedError(str(error)) from None
    except (OSError, ValueError, KeyError, SafetensorError):
        raise DamagedError(f"{TENSORS} cannot be read") from None


def _verified(path: Path) -> Checkpoint:
    manifest = read_object(plain_file(path / MANIFEST))
    if set(manifest) != {TENSORS, STATE}:
        raise DamagedError("its manifest names other files than a checkpoint has")
    for name, described in manifest.items():
        if _described(plain_file(path / name)) != described:
            raise DamagedError(f"{name} is not the file that was saved")
    state = read_object(plain_file(path / STATE))
    if state.pop("step", None) != _step_of(path):
        raise DamagedError("it is of another step")
    return Checkpoint(_step_of(path), load_file(path / TENSORS), state)


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
