"""What a basis saw of the data, in the folder of a run: `basis-<step>.safetensors`, so that a replay needs no data."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tezo.durable import write_file
from tezo.errors import RequestError
from tezo.untrusted import UntrustedError, plain_file


class FactorFiles:
    """The files of one folder.

    Args:
        folder: of the run.
        writes: whether this process is the one that writes it.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder = folder
        self._writes = writes

    def path(self, born: int) -> Path:
        """Of the factors born at that step."""
        return self.folder / f"basis-{born}.safetensors"

    def save(self, born: int, factors: Mapping[str, Tensor]) -> None:
        """Writes them, whole or not at all.

        Raises:
            RunError: they cannot be written.
        """
        if self._writes:
            plain = {name: factor.contiguous() for name, factor in factors.items()}
            write_file(self.path(born), save(plain, metadata={"digest": _hash(plain)}))

    def load(self, born: int) -> dict[str, Tensor] | None:
        """Reads and verifies them; None where there is no such file.

        Raises:
            RequestError: the file is damaged.
        """
        path = self.path(born)
        if not path.exists():
            return None
        try:
            with safe_open(plain_file(path), framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                sound = (file.metadata() or {}).get("digest") == _hash(found)
        except (UntrustedError, OSError, ValueError, SafetensorError):
            sound = False
        if not sound:
            raise RequestError(f"{path} is damaged; put a sound copy in its place, or delete it to look again.")
        return found


def _hash(factors: Mapping[str, Tensor]) -> str:
    made = hashlib.sha256()
    for name, factor in sorted(factors.items()):
        made.update(f"{name} {tuple(factor.shape)} {factor.dtype}".encode())
        made.update(factor.contiguous().numpy().tobytes())
    return made.hexdigest()
