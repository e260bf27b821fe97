"""Atomic writes of files and folders, and reads of files that nobody vouches for.

A file or folder is written under a temporary name, which starts with a dot, forced to disk and renamed. A killed
process leaves the old version or the new one. No link is followed below the folder that the user names. Only plain
files of bounded size are read. Windows has no locks on folders: two processes that write one are not noticed there.
"""

import errno
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from filelock import lock_descriptor
from safetensors import SafetensorError

from tezo.system.errors import RequestError, RunError, TezoError

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_PLAIN = _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of `os.open`: no link is followed, a pipe does not wait for its other end, and Windows keeps line ends."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""Flags of `open_plain` for a file that must not exist yet."""
_NUMBERED = re.compile(r"\(os error (\d+)\)")
"""How Rust writes the number of an error of the operating system."""
MOST_JSON = 1 << 24
"""Maximum size of a JSON file in bytes."""
MOST_YAML, MOST_VALUES, MOST_DEPTH = 1 << 22, 100_000, 16
"""Maximum size of a YAML text in characters, and number and depth of its values."""


class UntrustedError(ValueError):
    """A file is missing, too large, damaged or a link; the message is a short reason."""


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file that is no link; returns a handle as `os.open` does.

    Args:
        path: the file; its folder must have been checked.
        flags: of `os.open`. A file that is changed in place must have no second name (hard link), which would change
            with it.

    Raises:
        UntrustedError: it is a link or no regular file, or has a second name.
        OSError: it cannot be opened.
    """
    try:
        if not _NO_FOLLOW and path.is_symlink():
            raise OSError(errno.ELOOP, "a link")
        handle = os.open(path, flags | _PLAIN, 0o644)
    except OSError:
        if path.is_symlink():
            raise UntrustedError(f"{path.name} is a link, which is not followed") from None
        raise
    status = os.fstat(handle)
    is_regular, in_place = stat.S_ISREG(status.st_mode), flags & (os.O_WRONLY | os.O_RDWR)
    if is_regular and not (in_place and status.st_nlink > 1):
        return handle
    os.close(handle)
    if is_regular:
        raise UntrustedError(f"{path.name} has a second name (a hard link), whose file would change with it")
    raise UntrustedError(f"{path.name} is not a plain file")


def open_to_read(path: Path) -> BufferedReader:
    """Opens a regular file that is no link for reading; errors are those of `open_plain`."""
    return open(open_plain(path), "rb")


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link itself; nothing where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turns a write error of the operating system into a `RunError` with the file and the way out.

    Libraries in Rust (safetensors, tokenizers) raise such an error as one of their classes, with its number in the
    text.

    Raises:
        RequestError: a link or a hard link is in the way.
    """
    try:
        yield
    except UntrustedError as error:
        raise RequestError(f"{path.parent}: {error}; put a copy of the file itself there, or remove it.") from None
    except TezoError:
        raise
    except Exception as error:
        named = _NUMBERED.search(str(error))
        number = getattr(error, "errno", None) or (int(named[1]) if named else None)
        if number is None and not isinstance(error, OSError | SafetensorError):
            raise
        if number in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space, then start again (a run with --resume)"
        elif number == errno.EFBIG:
            reason = "it exceeds the limit of a file (ulimit -f); raise that, then start again (a run with --resume)"
        elif number in (errno.ENOENT, errno.ENOTDIR):
            reason = "its folder is gone; restore it, then start again (a run with --resume)"
        else:
            reason = getattr(error, "strerror", None) or (one_line(error) if number is None else os.strerror(number))
        raise RunError(f"{path} cannot be written: {reason}. Files saved earlier are intact.") from error


@contextmanager
def reading(what: str, way_out: str, *, but: type[Exception] = TezoError) -> Iterator[None]:
    """Turns any exception of a library on a file of any content into a `RequestError`: what (the reason); way out.

    Errors of this library and of the class `but` stay as they are.
    """
    try:
        yield
    except (TezoError, but, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust code, as in tokenizers, is no Exception
        raise RequestError(f"{what} ({one_line(error)}); {way_out}.") from error


def one_line(error: BaseException) -> str:
    """Returns the message of an error of another library, cut to 300 characters in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically.

    Raises:
        RunError: it cannot be written; the old file, if any, is unchanged.
    """
    beside = _beside(path)
    with storing(path):
        try:
            remove(beside)
            _write(beside, NEW, data, forced=True)
            os.replace(beside, path)  # noqa: PTH105
            sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file to write into. It replaces `path` if the block succeeds; otherwise `path` is unchanged.

    Raises:
        RunError: it cannot be written.
    """
    beside = _beside(path)
    with storing(path):
        try:
            remove(beside)
            with open(open_plain(beside, NEW), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)  # noqa: PTH105
            sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def append(path: Path, data: bytes) -> None:
    """Appends `data` to a file with one write; the operating system decides when it goes to disk."""
    with storing(path):
        _write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, data, forced=False)


def _write(path: Path, flags: int, data: bytes, *, forced: bool) -> None:
    handle = open_plain(path, flags)
    try:
        write_all(handle, data)
        if forced:
            os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Writes all of `data`; a full disk accepts only a part, and the next write raises the reason."""
    written = os.write(handle, data)
    while written < len(data):
        written += os.write(handle, data[written:])


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder to write into. It replaces `path` if the block succeeds; otherwise `path` is unchanged.

    Raises:
        RequestError: another process is writing it.
        RunError: something cannot be written.
    """
    beside, old = _beside(path), path.with_name(f".{path.name}.old")
    if not (beside.is_symlink() or _is_leftover(beside)):
        raise RequestError(f"output: another process is writing {path}; wait for it, or give another --output.")
    with storing(path):
        remove(beside)
        beside.mkdir(parents=True)
        try:
            with _locked(beside):
                yield beside
                for inside in sorted(beside.rglob("*")):
                    sync(inside)
                sync(beside)
                remove(old)
                if os.path.lexists(path):
                    os.replace(path, old)  # noqa: PTH105
            os.replace(beside, path)  # noqa: PTH105
            remove(old)
            sync(path.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def check_free(output: Path, ways: str = "give another --output, or delete it first") -> None:
    """Raises a `RequestError` with `ways` where `output` exists and is not an empty folder, or cannot be written.

    A folder that has only unfinished files and folders of killed processes is emptied.
    """
    if output.name == "-":  # whose path may be whole already
        raise RequestError("output is -, and standard output takes no folder; give a folder.")
    inside = list(output.iterdir()) if output.is_dir() else []
    if not all(map(_is_leftover, inside)) or (output.exists() and not output.is_dir()):
        raise RequestError(f"output: {output} exists already; {ways}.")
    for path in inside:
        with storing(path):
            remove(path)
    whole = output.absolute()
    try:
        with tempfile.TemporaryFile(dir=next(above for above in (whole, *whole.parents) if above.exists())):
            pass
    except OSError as error:
        raise RequestError(f"output: {output} cannot be written ({error.strerror}); give another.") from None


def _beside(path: Path) -> Path:
    """The temporary name of a file or folder."""
    return path.with_name(f".{path.name}.partial")


def _is_leftover(path: Path) -> bool:
    """Whether nothing is there, or only an unfinished file of a dead process."""
    if path.is_symlink() or not path.name.startswith("."):
        return False
    if not path.is_dir():
        return path.name.endswith((".partial", ".lock"))
    if not path.name.endswith(".partial"):
        return False
    with storing(path), _locked(path) as was_free:
        return was_free


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Locks a folder while open, and yields whether no other process had."""
    file = folder / ".lock"
    handle = lock(file)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            unlock(file, handle)


def lock(file: Path) -> int | None:
    """Locks a file, which is made, for this process; a process that ends gives its locks back.

    Returns its handle, for `unlock`; None if another process has the lock. On a file system without locks nobody has.

    Raises:
        OSError: the file cannot be made.
        UntrustedError: a link is in the way.
    """
    handle = open_plain(file, os.O_RDWR | os.O_CREAT)
    is_ours = True
    with suppress(OSError):
        is_ours = lock_descriptor(handle, blocking=False)
    if is_ours and os.fstat(handle).st_nlink:  # a file that was removed since it was opened locks nothing
        return handle
    os.close(handle)
    return None


def unlock(file: Path, handle: int) -> None:
    """Gives the lock of `lock` back."""
    with suppress(OSError):  # Windows removes no open file
        file.unlink()
    os.close(handle)


def sync(path: Path) -> None:
    """Forces a file, or the entries of a folder, to disk; Windows has neither handles of folders nor need of them."""
    try:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs what may be written
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bytes(path: Path, most: int) -> bytes:
    """Reads a file; `UntrustedError` if it is not a plain file, is a link, or has more than `most` bytes."""
    try:
        with open_to_read(path) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise UntrustedError(f"{path.name} has more than {most} bytes")
            return file.read()
    except FileNotFoundError:
        raise UntrustedError(f"{path.name} is missing") from None
    except OSError:
        raise UntrustedError(f"{path.name} cannot be read") from None


def read_json(path: Path) -> Any:
    """Reads the JSON value in a file of at most `MOST_JSON` bytes; `UntrustedError` for anything else, and a link."""
    data = read_bytes(path, MOST_JSON)
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError):
        raise UntrustedError(f"{path.name} cannot be read") from None


def read_object(path: Path) -> dict[str, Any]:
    """`read_json` of a JSON object; `UntrustedError` for another value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UntrustedError(f"{path.name} is not a JSON object")
    return value


def own_object(path: Path, way_out: str) -> dict[str, Any]:
    """`read_object` of a file that this library wrote; a `RequestError` with `way_out` if it is damaged."""
    try:
        return read_object(path)
    except UntrustedError as error:
        raise RequestError(f"{path.parent}: {error}; {way_out}.") from None


def parse_yaml(data: str | bytes) -> Any:
    """Parses a YAML text; `UntrustedError`, without a name of the file, if it is none or is out of bounds."""
    try:
        text = data if isinstance(data, str) else data.decode()
        value = yaml.safe_load(text[: MOST_YAML + 1])
    except Exception as error:  # a false tag, such as !!timestamp x, ends in other errors than YAML's
        raise UntrustedError(f"cannot be read as YAML ({one_line(error)})") from None
    count, level = 0, [value]
    for _ in range(MOST_DEPTH):  # an alias counts as often as it is used
        level = list(islice(chain.from_iterable(map(_inside, level)), MOST_VALUES + 1 - count))
        count += len(level)
        if count > MOST_VALUES:
            break
    if len(text) > MOST_YAML or level:
        raise UntrustedError("is no configuration")
    return value


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def plain_file(path: Path) -> Path:
    """Returns the path, if it is a regular file and not a link; otherwise `UntrustedError`."""
    if path.is_symlink() or not path.is_file():
        raise UntrustedError(f"{path.name} is missing, or is a link")
    return path


def json_text(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Returns the JSON text of dicts, lists, tuples, strings, numbers and None; NaN and infinity become null.

    `default` makes one of these of any other object.
    """
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False, default=default)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def default_cache() -> Path:
    """Returns `$TEZO_CACHE` if set, else `tezo` in the user's cache folder."""
    chosen = os.environ.get("TEZO_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "tezo"


class NumberCache:
    """Integers by name, in a JSON file of a cache folder. A file that cannot be read or written is ignored."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        self.numbers: dict[str, int] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):
            read = json.loads(self.path.read_text(encoding="utf-8"))
            self.numbers = {str(key): int(number) for key, number in read.items()}
        self._known = len(self.numbers)

    def save(self) -> None:
        """Replaces the file atomically if a number was added."""
        if len(self.numbers) > self._known:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                    json.dump(self.numbers, file)
                Path(file.name).replace(self.path)
