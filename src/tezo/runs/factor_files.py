"""Files of tensors computed from data, `<kind>-<step>.safetensors` in the folder of a run; a replay needs no data.

Kinds are "basis", the factors of a data-dependent basis, and "feedback", the gradients of a feedback step.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tezo.directions.bases import CollectedFactors
from tezo.errors import RequestError
from tezo.files import UntrustedError, plain_file, write_file
from tezo.numerics.hashing import content_hash
from tezo.runs.manifest import entry_of


class FactorFiles:
    """A `FactorStore` in the folder of a run.

    Args:
        folder: folder of the run.
        writes: whether this process writes the files; `save` does nothing if False.
        digests: file name -> SHA-256 in the run's step log; other files are not the run's. None: any intact file is.
        saved: called with the name and SHA-256 of each file that is written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writes: bool,
        digests: Mapping[str, str] | None = None,
        saved: Callable[[str, str], None] | None = None,
    ) -> None:
        self.folder = folder
        self._writes = writes
        self._digests = digests
        self._saved = saved

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
            data = save(plain, metadata={"calls_sha256": metadata})
            write_file(self.path(kind, step), data)
            if self._saved is not None:
                self._saved(self.path(kind, step).name, hashlib.sha256(data).hexdigest())

    def load(self, kind: str, step: int) -> CollectedFactors | None:
        """Reads and verifies the file; None if the run has not written it.

        Raises:
            RequestError: the file is damaged, missing, or of another run or step.
        """
        path = self.path(kind, step)
        if self._digests is not None:
            if path.name not in self._digests:
                return None
            self.check(path.name)
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
        # the log's digest of the whole file was checked above
        intact = self._digests is not None or (collected and sha256 == _hash(collected.factors, collected.calls))
        if collected is None or not intact:
            raise RequestError(f"{path} is damaged; replace it with an intact copy, or delete it to compute it again.")
        return collected

    def check(self, name: str | None = None) -> None:
        """Checks one file, or all files, against the digests of the step log.

        Raises:
            RequestError: a file is missing, or is not the one that the run wrote; the file is named.
        """
        digests = self._digests or {}
        for each in digests if name is None else [name]:
            path = self.folder / each
            found = path.is_file() and not path.is_symlink() and entry_of(path)["sha256"] == digests[each]
            if not found:
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
