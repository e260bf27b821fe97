"""The files that a base model is read from: their digests, and whether they are still as they were.

On a CPU the weights of a model are often a map of their file. Such a model changes with its file.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from tezo.system.errors import ChangedBaseError, RequestError
from tezo.system.files import NumberCache, default_cache

_JUST_NOW = 2.0
"""Seconds within which a file can change again and keep its time of change, on file systems with coarse clocks."""
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class _State:
    """Facts of the file system about a file.

    Attributes:
        size: in bytes.
        rest: its times of change, device and number.
        is_recent: whether it may change again without a trace in these.
    """

    size: int
    rest: tuple[int, ...]
    is_recent: bool


def _state(path: Path) -> _State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    is_recent = time.time() - max(found.st_mtime, found.st_ctime) < _JUST_NOW
    times = found.st_mtime_ns, found.st_ctime_ns
    return _State(found.st_size, (*times, found.st_dev, found.st_ino), is_recent)


def _same(before: _State, now: _State) -> bool:
    return (before.size, before.rest) == (now.size, now.rest)


class BaseFiles:
    """The files that the weights of a model are read from, as they are when this object is made.

    Args:
        paths: of the files; none where the weights are of no file that is known.
    """

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._states = {path: state for path in paths if (state := _state(path)) is not None}
        self._digests: dict[Path, str] = {}

    @property
    def paths(self) -> list[Path]:
        """The files that are there."""
        return list(self._states)

    def digest(self) -> str | None:
        """Returns a SHA-256 of their contents in hexadecimal, whatever their names; None where there are none.

        The digest of a file is kept in the cache folder, and not made again as long as size and times are the same.

        Raises:
            RequestError: a file has changed since this object was made.
        """
        for path, before in self._states.items():
            self._digests[path] = _kept_digest_of(path, before)
            now = _state(path)
            if now is None or not _same(before, now):
                raise RequestError(f"model.name: {path} was changed while the model was loaded; load it again.")
        joined = "".join(self._digests[path] for path in self._states)
        return hashlib.sha256(joined.encode()).hexdigest() if joined else None

    def check(self, *, by_content: bool = False) -> None:
        """Checks that the files are those of the `digest` that was made: by their sizes and times.

        A file with other times is read, and may go on if its content is the same.

        Args:
            by_content: whether a file is read, too, that had been written so shortly before that its times may not show
                another change.

        Raises:
            ChangedBaseError: a file is another; it is named.
        """
        for path, before in self._states.items():
            now = _state(path)
            if now is not None and _same(before, now) and not (by_content and before.is_recent):
                continue
            if now is None:
                raise ChangedBaseError(path, "it is gone")
            if now.size != before.size:
                raise ChangedBaseError(path, f"it has {now.size:,} bytes, and had {before.size:,}")
            try:
                is_same = _digest_of(path) == self._digests.get(path)
            except OSError as error:
                raise ChangedBaseError(path, f"it cannot be read: {error.strerror}") from error
            if not is_same:
                raise ChangedBaseError(path, "its content is another")
            self._states[path] = now

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Checks the files before and after a block; a changed file is the error, whatever else came of it.

        Raises:
            ChangedBaseError: see `check`.
        """
        self.check()
        try:
            yield
        except Exception:  # not one that ends the process
            self.check()
            raise
        self.check()


def files_of(source: str) -> BaseFiles:
    """Returns the files with the weights of a model.

    Args:
        source: folder, GGUF file, or name of the hub, of which the local copy counts; of others there are no files.
    """
    place = place_of(source)
    if place is None:
        return BaseFiles()
    if place.is_file():
        return BaseFiles([place])
    return BaseFiles(weights_in(place))


def place_of(source: str) -> Path | None:
    """Returns the folder or file of a model, of a name of the hub that of its local copy; None if there is none."""
    if not source or Path(source).exists():
        return Path(source).absolute() if source else None
    with suppress(HFValidationError):
        found = try_to_load_from_cache(source, "config.json")
        return Path(found).parent if isinstance(found, str) else None
    return None


def weights_in(folder: Path) -> list[Path]:
    """Returns the safetensors of a folder that transformers reads; not others that lie beside them."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        index = json.loads((folder / f"{_WEIGHTS}.index.json").read_bytes())
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def stamp(source: str) -> str | None:
    """Returns a digest of size, times and number of each file of a model; None if that does not show a change.

    `source` is a folder, a file, or a name of the hub, of which the local copy counts.
    """
    place = place_of(source)
    if place is None:
        return None
    files = [place] if place.is_file() else sorted(inside for inside in place.iterdir() if inside.is_file())
    states = [(str(file), _state(file)) for file in files]
    known = [(file, state.size, *state.rest) for file, state in states if state is not None and not state.is_recent]
    return hashlib.sha256(repr(known).encode()).hexdigest() if len(known) == len(files) > 0 else None


def kept_digest(known_as: str, compute: Callable[[], str]) -> str:
    """Returns a digest in hexadecimal that is kept in the cache folder under a name, and computed the first time."""
    key = hashlib.sha256(known_as.encode()).hexdigest()
    cache = NumberCache(default_cache(), "weights")
    if key not in cache.numbers:
        cache.numbers[key] = int(compute(), 16)
        cache.save()
    return f"{cache.numbers[key]:064x}"


def _kept_digest_of(path: Path, state: _State) -> str:
    if state.is_recent:
        return _digest_of(path)
    return kept_digest(f"file {path.resolve()} {state.size} {state.rest}", lambda: _digest_of(path))


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
