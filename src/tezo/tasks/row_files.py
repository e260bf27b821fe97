"""Reads rows from a JSONL, CSV, TSV or Parquet file, or from a hub data set. Every error names the file and line."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.models.model_config import IN_MEMORY
from tezo.tasks.examples import Row


def read_rows(source: str, *, key: str, split: str = "train", subset: str | None = None) -> list[Row]:
    """All rows of `source`.

    Args:
        source: a file, or the name of a data set on the hub.
        key: the setting that `source` comes from, for messages.
        split: split of a hub data set.
        subset: configuration name of a hub data set.

    Raises:
        RequestError: the file is missing, empty, not UTF-8 or of an unknown kind, or a line is invalid.
    """
    if source == IN_MEMORY:
        raise RequestError(f"{key}: the rows of this run were objects in memory; give them again, or name a file.")
    path = Path(source).expanduser()
    if path.is_file():
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise RequestError(f"{key}: {source} is not one of {', '.join(_READERS)}; convert it to one of them.")
        rows = reader(path, key)
    elif path.is_dir():
        raise RequestError(f"{key}: {source} is a folder; give a file in it, or for a task its folder as data.dir.")
    elif path.suffix.lower() in _READERS or path.is_absolute() or source.startswith("."):
        raise RequestError(f"{key}: there is no file {source}; check the path.")
    else:
        rows = _from_hub(source, key, split, subset)
    if not rows:
        raise RequestError(f"{key}: {source} has no rows; give a file with at least one.")
    return rows


def _text(path: Path, key: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RequestError(f"{key}: {path}, line {line}, is not UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise RequestError(f"{key}: {path} cannot be read ({error.strerror}).") from None


def _jsonl(path: Path, key: str) -> list[Row]:
    rows = []
    for number, line in enumerate(_text(path, key).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            fault = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
            raise RequestError(f"{key}: {path}, line {number}, is not JSON ({fault}); fix that line.") from None
        if not isinstance(fields, dict):
            raise RequestError(
                f'{key}: {path}, line {number}, is not an object; write {{"field": value}} in each line.'
            )
        if "\\ud" in line.lower() and not _is_text(fields):
            raise RequestError(f"{key}: {path}, line {number}, has half of a surrogate pair; fix that line.")
        rows.append(Row(fields, f"{path.name}, line {number}"))
    return rows


def _is_text(fields: dict[str, Any]) -> bool:
    """Whether all strings can be encoded: a JSON escape can be half of a surrogate pair."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _separated(path: Path, key: str, delimiter: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(_text(path, key), newline=""), delimiter=delimiter, strict=True)
    rows = []
    try:
        for fields in reader:
            if None in fields or None in fields.values():
                count = len(reader.fieldnames or ())
                raise RequestError(
                    f"{key}: {path}, line {reader.line_num}, does not have the {count} columns of the header; fix that "
                    "line."
                )
            rows.append(Row(dict(fields), f"{path.name}, line {reader.line_num}"))
    except csv.Error as error:
        raise RequestError(
            f"{key}: {path}, line {reader.reader.line_num}, is invalid ({error}); fix that line."
        ) from None
    return rows


def _parquet(path: Path, key: str) -> list[Row]:
    import pyarrow.parquet

    try:
        table: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"{key}: {path} is not a Parquet file that can be read ({reason}).") from None
    return [Row(fields, f"{path.name}, row {number}") for number, fields in enumerate(table, start=1)]


def _from_hub(name: str, key: str, split: str, subset: str | None) -> list[Row]:
    import datasets

    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestError(
            f"{key}: {name} is not a file, and its split {split!r} could not be loaded from the hub ({reason}). "
            "Check the name, or give a JSONL, CSV or Parquet file."
        ) from None
    return [Row(dict(fields), f"{name}, {split} row {number}") for number, fields in enumerate(loaded)]


_READERS: dict[str, Callable[[Path, str], list[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _jsonl,
    ".csv": lambda path, key: _separated(path, key, ","),
    ".tsv": lambda path, key: _separated(path, key, "\t"),
    ".parquet": _parquet,
}
