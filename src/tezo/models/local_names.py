"""Names that may be a path on this machine or a name on the hub: which is meant, and which was misspelt."""

import difflib
from pathlib import Path
from typing import Literal

from tezo.models.kinds import IN_MEMORY
from tezo.system.errors import RequestError

_HUB = "https://huggingface.co/"
_HUB_SECONDS = 5.0
"""How long the hub may take to say whether it has a repository."""
_ALIKE = 0.8
"""Similarity of a part of a path to the one that is there, from which on a name of two parts is taken for a path."""


def is_pattern(name: str) -> bool:
    """Returns whether a name is a pattern of several files."""
    return "*" in name or "?" in name  # not brackets: a split of a hub data set may have them, as in train[:10%]


def absolute_name(name: str) -> str:
    """Returns the whole path of a name that is a path here, links of folders followed; other names as they are."""
    path = Path(name).expanduser()
    if name == IN_MEMORY or not name:
        return name
    if path.is_dir():
        return str(path.resolve())
    if is_pattern(name) and not path.is_absolute():
        return str(Path.cwd() / path)
    return str(path.parent.resolve() / path.name) if path.exists() else name


def working_folder() -> Path:
    """Returns the working folder; where it is gone, the root of its disk."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def is_gone(name: str) -> bool:
    """Returns whether a name is a whole path, as `absolute_name` gives it, of nothing that is here."""
    path = Path(name)
    return path.is_absolute() and not path.exists() and not is_pattern(name)


def hint(name: str) -> str:
    """Returns ` Did you mean 'x'?` for the path that is nearest to `name`; else empty."""
    near = name.removeprefix(_HUB) if name.startswith(_HUB) else _nearest_path(name, 0.6)
    return "" if near is None else f" Did you mean {near!r}?"


def check_no_path(key: str, name: str, kind: Literal["model", "dataset"]) -> None:
    """Raises a `RequestError` where a name of two parts, which could be one of the hub, is rather a misspelt path.

    That is one whose first part is a folder here, or that is like a path here; unless it has been downloaded.
    """
    path = Path(name)
    if len(path.parts) != 2 or _downloaded(name, kind) is not None:
        return
    here, near = path.parent.is_dir(), _nearest_path(name, _ALIKE)
    if here or near is not None:
        where = f"in the folder {path.parent} here" if here else "here"
        option = " --repo-type dataset" if kind == "dataset" else ""
        raise RequestError(
            f"{key}: there is no {name} {where}; check the path (one of the hub: run `hf download {name}{option}` "
            f"first).{hint(name)}"
        )


def ask_hub(key: str, name: str, kind: Literal["model", "dataset"]) -> Path | None:
    """Asks the hub once whether it has a repository; returns its downloaded copy, where the hub cannot be reached.

    The libraries that load it ask again and again for half a minute.

    Raises:
        RequestError: there is no such repository, or neither a hub nor a copy.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    what = {"model": "a model folder", "dataset": "a file"}[kind]
    try:
        HfApi(library_name="tezo").repo_info(name, repo_type=kind, timeout=_HUB_SECONDS)
    except GatedRepoError:
        return None  # loading it reports the reason
    except (RepositoryNotFoundError, HFValidationError):
        raise RequestError(
            f"{key}: {name} is neither {what} here nor a name on the hub; check it.{hint(name)}"
        ) from None
    except HfHubHTTPError:
        return None
    except Exception:  # of the network library that huggingface_hub has, whichever it is; or offline mode
        copy = _downloaded(name, kind)
        if copy is None:
            raise RequestError(
                f"{key}: {name} is not {what} here, and the hub cannot be reached; check the path, or the network."
                f"{hint(name)}"
            ) from None
        return copy
    return None


def _downloaded(name: str, kind: Literal["model", "dataset"]) -> Path | None:
    """The folder of a copy of a repository in the cache of the hub, or of `datasets`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        if kind == "model":
            return None
    from datasets import config

    kept, folder = Path(config.HF_DATASETS_CACHE), name.replace("/", "___").lower()
    return next((path for path in (kept.iterdir() if kept.is_dir() else ()) if path.name.lower() == folder), None)


def _nearest_path(name: str, similarity: float) -> str | None:
    """The path here whose parts are nearest to those of `name`, if each is that similar; not `name` itself."""
    path = Path(name).expanduser()
    found = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if (found / part).exists():
            found /= part
            continue
        try:
            entries = sorted(entry.name for entry in found.iterdir())
        except OSError:
            return None
        close = difflib.get_close_matches(part, entries, n=1, cutoff=similarity)
        close = close or [entry for entry in entries if Path(entry).stem == part]
        if not close:
            return None
        found /= close[0]
    return None if found in (path, Path()) else str(found)
