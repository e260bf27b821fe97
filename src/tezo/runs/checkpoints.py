"""Checkpoints: folders `checkpoint-<step>/` with tensors, a state, and a manifest of their sizes and SHA-256 digests.

A folder gets its name when it is completely written. A reader verifies names, sizes and digests first. In place of a
damaged checkpoint, an older one is used.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tezo.runs.files import MANIFEST, entry_of
from tezo.system.files import UntrustedError, new_folder, read_object, remove

TENSORS, STATE = "tensors.safetensors", "state.json"
KEEP = 2
"""Number of newest checkpoints that a run keeps until it ends."""
_PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps: tensors, and values that JSON can represent, by name."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int = KEEP) -> Path:
    """Writes a checkpoint into the folder of a run, and removes all except the newest `keep` checkpoints.

    Raises:
        RunError: the checkpoint cannot be written; existing checkpoints are unchanged.
    """
    path = run / f"{_PREFIX}{checkpoint.step}"
    with new_folder(path) as folder:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
        save_file(plain, folder / TENSORS, metadata={"format": "pt"})
        (folder / STATE).write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}), encoding="utf-8")
        manifest = {name: entry_of(folder / name) for name in (TENSORS, STATE)}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    remove_checkpoints(run, keep)
    return path


def checkpoints(run: Path) -> list[Path]:
    """Returns the checkpoint folders of a run, newest first."""
    folders = [path for path in run.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(folders, key=_step_of, reverse=True)


def remove_checkpoints(run: Path, keep: int = 0) -> None:
    """Removes all except the newest `keep` checkpoints of a run, and unfinished ones of killed processes."""
    for path in [*checkpoints(run)[keep:], *run.glob(f".{_PREFIX}*")]:
        remove(path)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def newest(run: Path, most_steps: int) -> tuple[Checkpoint | None, list[str]]:
    """Returns (the newest valid checkpoint with at most `most_steps` steps or None, a message for each one skipped)."""
    skipped = []
    for path in checkpoints(run):
        if _step_of(path) > most_steps:
            skipped.append(f"{path.name} was skipped: the log ends at step {most_steps}.")
            continue
        try:
            return load_checkpoint(path), skipped
        except UntrustedError as error:
            skipped.append(f"{path.name} was skipped: {error}.")
    return None, skipped


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        UntrustedError: the checkpoint is incomplete or altered; the message has the reason.
    """
    try:
        if path.is_symlink():
            raise UntrustedError("it is a link to another folder")
        manifest = read_object(path / MANIFEST)
        if set(manifest) != {TENSORS, STATE}:
            raise UntrustedError(f"its manifest names other files than {TENSORS} and {STATE}")
        for name, entry in manifest.items():
            if entry_of(path / name) != entry:
                raise UntrustedError(f"{name} is not the file that was saved")
        state = read_object(path / STATE)
        if state.pop("step", None) != _step_of(path):
            raise UntrustedError(f"{STATE} belongs to another step")
        return Checkpoint(_step_of(path), load_file(path / TENSORS), state)
    except UntrustedError:
        raise
    except Exception:  # whatever safetensors makes of a file that was crafted
        raise UntrustedError(f"{TENSORS} cannot be read") from None
