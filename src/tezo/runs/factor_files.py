"""Files of tensors computed from data, `<kind>-<step>.safetensors` in the folder of a run; a replay needs no data.

Kinds are "basis", the factors of a data-dependent basis, and "feedback", the gradients of a feedback step.
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
    """A `FactorStore` in the folder of a run.

    Args:
        folder: folder of the run.
        writes: whether this process writes the files; `save` does nothing if False.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder = folder
        self._writes = writes

    def path(self, kind: str, step: int) -> Path:
        """Path of the file for `kind` at `step`."""
        return self.folder / f"{kind}-{step}.safetensors"

    def save(self, kind: str, step: int, collected: CollectedFactors) -> None:
        """Writes the file atomically.

        Raises:
            RunError: the file cannot be written.
        """
        if self._writes:
            plain = {name: factor.cpu().contiguous() for name, factor in collected.factors.items()}
            metadata = f"{collected.calls} {_hash(plain, collected.calls)}"  # one entry: several have no fixed order
            write_file(self.path(kind, step), save(plain, metadata={"calls_sha256": metadata}))

    def load(self, kind: str, step: int) -> CollectedFactors | None:
        """Reads and verifies the file; None if it does not exist.

        Raises:
            RequestError: the file is damaged.
        """
        path = self.path(kind, step)
        if not path.exists():
            return None
        collected, sha256 = None, ""
        try:
            with safe_open(plain_file(path), framework="pt") as file:
                calls, _, sha256 = (file.metadata() or {}).get("calls_sha256", "").partition(" ")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                collected = CollectedFactors(tensors, int(calls))
        except (UntrustedError, OSError, ValueError, SafetensorError):
            pass
        if collected is None or sha256 != _hash(collected.factors, collected.calls):
            raise RequestError(f"{path} is damaged; replace it with an intact copy, or delete it to compute it again.")
        return collected


def _hash(factors: Mapping[str, Tensor], calls: int) -> str:
    digest = hashlib.sha256(str(calls).encode())
    for name, factor in sorted(factors.items()):
        digest.update(f"{name} {content_hash(factor)}".encode())
    return digest.hexdigest()
