"""What was seen of the data, in the folder of a run, so that a replay needs no data: `<kind>-<step>.safetensors`.

Kinds are "basis", what a basis saw, and "feedback", what a feedback step measured.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tezo.directions.bases import CollectedFactors
from tezo.errors import RequestError
from tezo.files import UntrustedError, plain_file, write_file
from tezo.numerics.hashing import content_hash


class FactorFiles:
    """The files of one folder.

    Args:
        folder: of the run.
        writes: whether this process is the one that writes it.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder = folder
        self._writes = writes

    def path(self, kind: str, step: int) -> Path:
        """Of what was seen at that step."""
        return self.folder / f"{kind}-{step}.safetensors"

    def save(self, kind: str, step: int, seen: CollectedFactors) -> None:
        """Writes it, whole or not at all.

        Raises:
            RunError: it cannot be written.
        """
        if self._writes:
            plain = {name: factor.cpu().contiguous() for name, factor in seen.factors.items()}
            about = f"{seen.calls} {_hash(plain, seen.calls)}"  # one entry: several have no fixed order
            write_file(self.path(kind, step), save(plain, metadata={"calls_sha256": about}))

    def load(self, kind: str, step: int) -> CollectedFactors | None:
        """Reads and verifies it; None where there is no such file.

        Raises:
            RequestError: the file is damaged.
        """
        path = self.path(kind, step)
        if not path.exists():
            return None
        seen, sha256 = None, ""
        try:
            with safe_open(plain_file(path), framework="pt") as file:
                calls, _, sha256 = (file.metadata() or {}).get("calls_sha256", "").partition(" ")
                seen = CollectedFactors({name: file.get_tensor(name) for name in file.keys()}, int(calls))  # noqa: SIM118
        except (UntrustedError, OSError, ValueError, SafetensorError):
            pass
        if seen is None or sha256 != _hash(seen.factors, seen.calls):
            raise RequestError(f"{path} is damaged; put a sound copy in its place, or delete it to look again.")
        return seen


def _hash(factors: Mapping[str, Tensor], calls: int) -> str:
    made = hashlib.sha256(str(calls).encode())
    for name, factor in sorted(factors.items()):
        made.update(f"{name} {content_hash(factor)}".encode())
    return made.hexdigest()
