"""Reads rows from one file: JSONL, JSON, CSV, TSV, Parquet or plain text, each also as .gz. Errors name the line.

Lines are read here, and not by the readers of `datasets`, which change what a file has: strings that look like dates
become dates, "NA" in a CSV file becomes nothing and "007" the number 7; their errors do not give a line of the file.
"""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.errors import RequestError
from tezo.tasks.examples import Row

TEXT = "text"
"""The field of a row that is a line of plain text."""

_GZ = ".gz"


@dataclass(frozen=True)
class _Content:
    """The bytes of a file, and what it is called in messages (`path`) and in the places of its rows (`name`)."""

    data: bytes
    key: str
    path: str
    name: str

    def fault(self, line: int, fault: str) -> RequestError:
        return RequestError(f"{self.key}: {self.path}, line {line}, {fault}.")

    def text(self) -> str:
        try:
            return self.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise self.fault(line, "is not UTF-8; save the file as UTF-8") from None


def kind_of_file(path: Path) -> str | None:
    """The kind of a file by its name, such as ".csv", without .gz; None if no reader takes it."""
    suffix = Path(path.stem).suffix if path.suffix.lower() == _GZ else path.suffix
    return suffix.lower() if suffix.lower() in _READERS else None


def file_rows(path: Path, key: str, name: str | None = None) -> list[Row]:
    """All rows of a file, in order.

    Args:
        path: the file.
        key: the setting that it comes from, for messages.
        name: what it is called in the places of its rows; None: by its name alone.

    Raises:
        RequestError: the file cannot be read, is not UTF-8 or of an unknown kind, or a line is invalid.
    """
    kind = kind_of_file(path)
    if kind is None:
        raise RequestError(f"{key}: {path} is not one of {', '.join(_READERS)} (or .gz); convert it to one of them.")
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix.lower() == _GZ else data
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise RequestError(f"{key}: {path} is no sound gzip file; compress it again.") from None
    except OSError as error:
        raise RequestError(f"{key}: {path} cannot be read ({error.strerror}).") from None
    return list(_READERS[kind](_Content(data, key, str(path), name or path.name)))


def standard_input_rows(key: str) -> list[Row]:
    """All rows that standard input has: JSON lines, or a JSON array.

    Args:
        key: the option that asks for them, for messages.

    Raises:
        RequestError: there are none, or a line is invalid.
    """
    rows = list(_json(_Content(sys.stdin.buffer.read(), key, "standard input", "standard input")))
    if not rows:
        raise RequestError(f"{key}: standard input has no rows; give at least one line of JSON.")
    return rows


def _json(content: _Content) -> Iterator[Row]:
    """JSON lines; or one array of objects, which may be the field "data" of an object."""
    text = content.text()
    try:
        whole = json.loads(text)
    except RecursionError:
        raise RequestError(f"{content.key}: {content.path} is nested too deeply; write one object a line.") from None
    except json.JSONDecodeError as error:
        opening = text.lstrip().partition("\n")[0].rstrip()
        if opening.startswith("[") or opening == "{":  # one value, and no JSON lines
            raise content.fault(error.lineno, f"is not JSON ({error.msg}); fix that line") from None
        whole = None
    except ValueError:  # a number with too many digits; the lines tell which
        whole = None
    items = whole.get("data") if isinstance(whole, dict) else whole
    return _array(content, items) if isinstance(items, list) else _jsonl(content)


def _array(content: _Content, items: Iterable[Any]) -> Iterator[Row]:
    for number, fields in enumerate(items, start=1):
        place = f"{content.key}: {content.path}, row {number},"
        if not isinstance(fields, dict):
            raise RequestError(f'{place} is not an object; write {{"field": value}} for each row.')
        if not _is_text(fields):
            raise RequestError(f"{place} has half of a surrogate pair; fix that row.")
        yield Row(fields, f"{content.name}, row {number}")


def _jsonl(content: _Content) -> Iterator[Row]:
    for number, line in enumerate(content.text().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            fault = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
            raise content.fault(number, f"is not JSON ({fault}); fix that line") from None
        if not isinstance(fields, dict):
            raise content.fault(number, 'is not an object; write {"field": value} in each line')
        if "\\ud" in line.lower() and not _is_text(fields):
            raise content.fault(number, "has half of a surrogate pair; fix that line")
        yield Row(fields, f"{content.name}, line {number}")


def _is_text(fields: dict[str, Any]) -> bool:
    """Whether all strings can be encoded: a JSON escape can be half of a surrogate pair."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(content: _Content) -> Iterator[Row]:
    """Plain text: each line that is not blank."""
    for number, line in enumerate(content.text().split("\n"), start=1):
        if line.strip():
            yield Row({TEXT: line.removesuffix("\r")}, f"{content.name}, line {number}")


def _separated(content: _Content, delimiter: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(content.text(), newline=""), delimiter=delimiter, strict=True)
    try:
        for fields in reader:
            if None in fields or None in fields.values():
                count = len(reader.fieldnames or ())
                raise content.fault(reader.line_num, f"does not have the {count} columns of the header; fix that line")
            yield Row(dict(fields), f"{content.name}, line {reader.line_num}")
    except csv.Error as error:
        raise content.fault(reader.reader.line_num, f"is invalid ({error}); fix that line") from None


def _parquet(content: _Content) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table: list[dict[str, Any]] = pyarrow.parquet.read_table(pyarrow.BufferReader(content.data)).to_pylist()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"{content.key}: {content.path} is not a Parquet file that can be read ({reason})."
        ) from None
    for number, fields in enumerate(table, start=1):
        yield Row(fields, f"{content.name}, row {number}")


_READERS: dict[str, Callable[[_Content], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": lambda content: _separated(content, ","),
    ".tsv": lambda content: _separated(content, "\t"),
    ".parquet": _parquet,
    ".txt": _lines,
}
