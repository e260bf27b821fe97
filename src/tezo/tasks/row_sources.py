"""Reads rows of files, of folders and patterns of files, of folders by `save_to_disk`, and of hub data sets."""

from itertools import islice
from pathlib import Path
from typing import Any

from tezo.models.kinds import IN_MEMORY
from tezo.models.local_names import ask_hub, check_no_path, hint, is_pattern
from tezo.system.errors import RequestError
from tezo.system.progress import READING, current
from tezo.tasks.examples import Row, class_names, rows_of_fields
from tezo.tasks.row_files import file_rows, kind_of_file

_SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
"""Beginnings of the names of files that are not to be mixed."""


def is_local(source: str) -> bool:
    """Whether `source` is a file, a folder or a pattern, and not a name on the hub."""
    return Path(source).expanduser().exists() or is_pattern(source)


def read_rows(
    source: str, *, key: str, split: str = "train", subset: str | None = None, first: int | None = None
) -> list[Row]:
    """Reads all rows of `source`, in an order that depends on nothing but the names of its files.

    It is a file, a folder or a pattern (data/*.jsonl) of files, or the name of a data set on the hub, of which `split`
    of the configuration `subset` is read: the `first` rows are streamed, or, if None, all are downloaded.

    Raises:
        RequestError: the file is missing, empty, not UTF-8 or of an unknown kind, or a line is invalid.
    """
    if source == IN_MEMORY:
        raise RequestError(f"{key}: the rows of this run were objects in memory; give them again, or name a file.")
    path = Path(source).expanduser()
    with current().phase(READING):
        if path.is_file():
            rows = file_rows(path, key)
        elif path.is_dir():
            rows = _in_folder(path, key)
        elif is_pattern(source):
            root = Path(path.anchor)
            matches = sorted(root.glob(str(path.relative_to(root))))
            files = [match for match in matches if match.is_file() and match.name[0] != "."]
            if not files:
                raise RequestError(f"{key}: no file matches {source}; check the pattern.")
            rows = _of_files(files, key)
        elif kind_of_file(path) or path.is_absolute() or source.startswith("."):
            raise RequestError(f"{key}: there is no file {source}; check the path.{hint(source)}")
        else:
            rows = _from_hub(source, key, split, subset, first)
    if not rows:
        raise RequestError(f"{key}: {source} has no rows; give a file with at least one.")
    return rows


def _of_files(files: list[Path], key: str) -> list[Row]:
    """Reads the rows of files in order; each row's place has as much of the path as distinguishes the files."""
    folders = {path.parent for path in files}
    named = [path.name if len(folders) == 1 else path.as_posix() for path in files]
    return [row for path, name in zip(files, named, strict=True) for row in file_rows(path, key, name)]


def _in_folder(folder: Path, key: str) -> list[Row]:
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved(folder, key)
    if (folder / "dataset_dict.json").is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise RequestError(f"{key}: {folder} is a folder with the splits {names}; give one of them, {folder}/SPLIT.")
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != "." and kind_of_file(path))
    if not files:
        raise RequestError(
            f"{key}: {folder} is a folder without files of rows; give a file, or for a task its folder as data.dir."
        )
    kinds = sorted({str(kind_of_file(path)) for path in files})
    splits = [path for path in files if path.name.lower().startswith(_SPLITS)]
    if len(kinds) > 1:
        raise RequestError(
            f"{key}: {folder} is a folder with files of several kinds ({', '.join(kinds)}); give a pattern, such as "
            f"{folder}/*{kinds[0]}."
        )
    if len({next(name for name in _SPLITS if path.name.lower().startswith(name)) for path in splits}) > 1:
        names = ", ".join(path.name for path in splits)
        raise RequestError(f"{key}: {folder} is a folder with several splits ({names}); give a file of one.")
    return _of_files(files, key)


def _saved(folder: Path, key: str) -> list[Row]:
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(folder))
        return rows_of_fields(loaded, f"{folder.name}, ", class_names(loaded.features))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{key}: {folder} is no data set that save_to_disk wrote ({_reason(error)}).") from None


def _from_hub(name: str, key: str, split: str, subset: str | None, first: int | None) -> list[Row]:
    check_no_path(key, name, "dataset")
    ask_hub(key, name, "dataset")
    import datasets

    try:
        loaded: Any = datasets.load_dataset(name, subset, split=split, streaming=first is not None)
        found = islice(loaded, first)  # the set's take() opens one file more than it needs
        return rows_of_fields(found, f"{name}, {split} ", class_names(loaded.features))
    except Exception as error:
        raise RequestError(
            f"{key}: {name} is not a file, and its split {split!r} could not be loaded from the hub "
            f"({_reason(error)}). Check the name, or give a JSONL, CSV or Parquet file."
        ) from None


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
