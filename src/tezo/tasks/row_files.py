"""Settings of the data, and rows of one file: JSONL, JSON, CSV, TSV, Parquet or plain text, each also as .gz.

Lines are not read by `datasets`, which changes values: strings that look like dates become dates, "NA" in a
CSV file becomes nothing and "007" the number 7; its errors do not give a line of the file.
"""

import csv
import gzip
import io
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tezo.system.errors import RequestError
from tezo.tasks.examples import Row, check_fields_differ, class_names, rows_of_fields
from tezo.tasks.tables import table_of


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The section `data`: where rows come from, how they become prompts, and how many are used."""

    train: str | None = None
    """Training rows: a file, a folder or pattern (data/*.jsonl) of files, or a hub data set; see docs/rows.md."""
    task: str | None = None
    """One of the paper's data sets, instead of train; see `tezo tasks`."""
    dir: str | None = None
    """Folder with the task's rows, TASK/train.jsonl and TASK/validation.jsonl. Default: the hub."""
    dev: str | None = None
    """Dev rows, evaluated during the run to choose the checkpoint: a file, or a split of the hub data set."""
    test: str | None = None
    """Rows for the metrics before and after training: a file, or a split of the hub data set. Default: the dev rows."""
    hold_out: float | None = None
    """Share of rows held out as dev rows if none are given; 0: none. Default: 0.1, at least 32 rows (0.3 of few,
    and none of few labelled rows whose outputs are kept, if there are test rows)."""
    subset: str | None = None
    """Configuration name of the hub data set."""
    train_split: str = "train"
    """Split to train on, of the hub data set or the task."""
    streaming: bool = False
    """Read only the first rows of a hub data set: num_train, and those that are held out; test rows by num_test."""
    shape: Literal["auto", "completion", "messages", "instruction", "label", "text"] = "auto"
    """Shape: completion, messages, instruction, label or text. Default auto: by the fields of the first row."""
    text: str = "text"
    """Name of the field with the text of a labelled row, or of plain text. Labelled rows may have another."""
    label: str = "label"
    """Name of the field with the label."""
    prompt: str = "prompt"
    """Name of the field with the prompt."""
    completion: str = "completion"
    """Name of the field with the completion."""
    messages: str = "messages"
    """Name of the field with the messages of a conversation. Where it is missing: conversations."""
    template: str | None = None
    """Prompt of labelled rows: {field} inserts a field, {mask} the mask token. Default: by the kind of model."""
    label_words: dict[str, str] | None = None
    """Word (encoder: description, classifier: class) that stands for each label. Default: the labels themselves."""
    num_train: int | None = None
    """Training rows. Default: all; for a task 1000."""
    num_dev: int | None = None
    """Dev rows. Default: all that are given or held out; for a task 500 (cb and copa 100), from the training rows."""
    num_test: int | None = None
    """Test rows, the same for every seed. Default: all; for a task at most 1000."""
    per_class: int | None = None
    """Training rows per label (k-shot). A task also draws as many dev rows per label, unless num_dev is set."""
    allow_fewer: bool = False
    """Use all rows there are if they are fewer than num_train, num_dev, num_test or per_class."""
    seed: int | None = None
    """Seed of the choice of rows. Default: train.seed."""
    max_length: int | None = None
    """Maximum input length in tokens. Default: the model's maximum, at most 2048."""

    def __post_init__(self) -> None:
        if self.label_words is not None:
            words = {label.strip(): word.strip() for label, word in self.label_words.items()}
            if len(words) < len(self.label_words):
                raise RequestError(
                    f"data.label_words has a label twice, blanks around it aside: {', '.join(self.label_words)}; leave "
                    "one of them."
                )
            object.__setattr__(self, "label_words", words)

    def draw_seed(self, run: int) -> int:
        """Returns the seed of the choice of rows in a run with the seed `run`."""
        return run if self.seed is None else self.seed


TEXT = "text"
"""The field of a row that is a line of plain text."""

LISTS = ("data", "rows", "train", "validation", "valid", "val", "dev", "test", "eval")
"""Fields of the only object of a JSON file that have its rows, whatever else it has."""

_GZ = ".gz"
_ANY_LENGTH = 2**31 - 1
_LIMIT = threading.Lock()
"""Held while the limit of `csv`, which all threads share, is another."""


@dataclass(frozen=True)
class _Content:
    """The bytes of a file, with its name in messages (`path`) and in the places of its rows (`name`)."""

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
    """Returns the kind of a file by its name, such as ".csv", without .gz; None if no reader takes it."""
    suffix = Path(path.stem).suffix if path.suffix.lower() == _GZ else path.suffix
    return suffix.lower() if suffix.lower() in _READERS else None


def file_rows(path: Path, key: str, name: str | None = None) -> list[Row]:
    """Reads all rows of a file, in order.

    `key` is the setting that it comes from; `name` the file's name in the places of its rows.

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
    """Reads all rows that standard input has: JSON lines, or a JSON array; `key` names the option in messages.

    Raises:
        RequestError: there are none, or a line is invalid.
    """
    rows = list(_json(_Content(sys.stdin.buffer.read(), key, "standard input", "standard input")))
    if not rows:
        raise RequestError(f"{key}: standard input has no rows; give at least one line of JSON.")
    return rows


def _json(content: _Content) -> Iterator[Row]:
    """Reads JSON lines, one object over several lines, or an array of objects, which may be a field of an object."""
    text = content.text()
    opening = text.lstrip().partition("\n")[0].rstrip()
    try:
        whole = _loads(text)
    except RecursionError:
        raise RequestError(f"{content.key}: {content.path} is nested too deeply; write one object a line.") from None
    except ValueError as error:
        if opening == text.strip() or not (opening.startswith("[") or opening == "{"):
            return _jsonl(content)
        if not isinstance(error, json.JSONDecodeError):  # a number with too many digits, or two fields of one name
            raise RequestError(f"{content.key}: {content.path} is not JSON ({error}); fix it.") from None
        fault = "several values; make them an array, or write one object a line" if error.msg == "Extra data" else None
        raise content.fault(error.lineno, f"is not JSON ({fault or error.msg}); fix that line") from None
    if isinstance(whole, dict):
        names = [name for name, value in whole.items() if _are_rows(name, value, alone=len(whole) == 1)]
        if len(names) > 1:
            raise RequestError(
                f"{content.key}: {content.path} has several lists of rows ({', '.join(names)}); write each to its file."
            )
        if names:
            return _array(content, whole[names[0]])
        if _are_columns(whole):
            raise RequestError(
                f"{content.key}: {content.path} has columns ({', '.join(whole)}), and no rows; write one object a row, "
                "with pandas to_json(orient='records', lines=True)."
            )
        return _jsonl(content) if opening == text.strip() else _array(content, [whole])
    return _array(content, whole) if isinstance(whole, list) else _jsonl(content)


def _are_rows(name: str, value: Any, *, alone: bool) -> bool:
    """Whether a field of the only object of a file has the rows; a conversation's messages are a field of one row."""
    if not isinstance(value, list) or (value and not any(isinstance(row, dict) for row in value)):
        return False
    talk = any(key in row for row in value if isinstance(row, dict) for key in ("role", "from"))
    return name in LISTS or (alone and bool(value) and not talk)


def _are_columns(whole: dict[str, Any]) -> bool:
    """Whether an object has the values of all rows in each of its fields, by their indices or in a list."""
    first, *others = whole.values() if len(whole) > 1 else (None,)
    if isinstance(first, dict):
        return all(isinstance(other, dict) and list(other) == list(first) for other in others)
    flat = [
        value for value in whole.values() if isinstance(value, list) and not any(isinstance(v, dict) for v in value)
    ]
    return isinstance(first, list) and len(flat) == len(whole) and {len(value) for value in flat} == {len(first)}


def _loads(text: str) -> Any:
    """Reads JSON, where no object may have two fields of one name, and NaN is a value that is missing."""
    missing = {"NaN": None}
    return json.loads(text, object_pairs_hook=_object, parse_constant=lambda name: missing.get(name, float(name)))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two fields are called {twice!r}")
    return fields


def _array(content: _Content, items: Iterable[Any]) -> Iterator[Row]:
    for number, fields in enumerate(items, start=1):
        place = f"{content.key}: {content.path}, row {number},"
        if not isinstance(fields, dict):
            raise RequestError(f'{place} is not an object; write {{"field": value}} for each row.')
        if not _is_text(fields):
            raise RequestError(f"{place} has half of a surrogate pair; fix that row.")
        yield Row(fields, f"{content.name}, row {number}")


def _jsonl(content: _Content) -> Iterator[Row]:
    for number, line in _filled_lines(content):
        try:
            fields = _loads(line)
        except (ValueError, RecursionError) as error:
            fault = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
            raise content.fault(number, f"is not JSON ({fault}); fix that line") from None
        if not isinstance(fields, dict):
            raise content.fault(number, 'is not an object; write {"field": value} in each line')
        if "\\ud" in line.lower() and not _is_text(fields):
            raise content.fault(number, "has half of a surrogate pair; fix that line")
        yield Row(fields, f"{content.name}, line {number}")


def _filled_lines(content: _Content) -> Iterator[tuple[int, str]]:
    lines = enumerate(content.text().split("\n"), start=1)
    return ((number, line) for number, line in lines if line.strip())


def _is_text(fields: dict[str, Any]) -> bool:
    """Whether all strings can be encoded: a JSON escape can be half of a surrogate pair."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(content: _Content) -> Iterator[Row]:
    for number, line in _filled_lines(content):
        yield Row({TEXT: line.removesuffix("\r")}, f"{content.name}, line {number}")


def _separated(content: _Content, delimiter: str) -> Iterator[Row]:
    """Reads rows of fields between delimiters, in the dialect that `table_of` finds; `delimiter` is the usual one."""
    found = table_of(content.text(), delimiter)
    lines = csv.reader(io.StringIO(found.text, newline=""), delimiter=found.separator, strict=True)
    names: list[str] = []
    with _LIMIT:
        usual = csv.field_size_limit(_ANY_LENGTH)  # from 131072 characters
        try:
            while True:
                first = lines.line_num + found.line
                values = next(lines, None)
                if values is None:
                    return
                if not names:
                    check_fields_differ([name.strip() for name in values], f"{content.key}: {content.path}")
                    names = values
                    continue
                if not values or (len(values) > 1 and not any(map(str.strip, values))):
                    continue  # a blank line, or one of delimiters alone
                fields = _fields(names, values)
                if fields is None:
                    raise content.fault(first, f"does not have the {len(names)} columns of the header; fix that line")
                yield Row(fields, f"{content.name}, line {first}")
        except csv.Error as error:
            fault = "a quote that is not closed" if "end of data" in str(error) else error
            raise content.fault(first, f"is invalid ({fault}); fix that line") from None
        finally:
            csv.field_size_limit(usual)


def _fields(names: list[str], values: list[str]) -> dict[str, str] | None:
    """Returns a row of a table; None where it has more values than names, or fewer, that are not blank."""
    most = min(len(names), len(values))
    if any(map(str.strip, (*names[most:], *values[most:]))):
        return None
    return dict(zip(names, [*values, *[""] * (len(names) - most)], strict=False))


def _parquet(content: _Content) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content.data))
        schema = file.schema_arrow
        check_fields_differ(schema.names, f"{content.key}: {content.path}")
        table: list[dict[str, Any]] = file.read().to_pylist()
    except RequestError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"{content.key}: {content.path} is not a Parquet file that can be read ({reason})."
        ) from None
    classes: dict[str, tuple[str, ...]] = {}
    if b"huggingface" in (schema.metadata or {}):
        import datasets

        with suppress(ValueError, TypeError, KeyError, AttributeError):  # of a version that writes features otherwise
            classes = class_names(datasets.Features.from_arrow_schema(schema))
    yield from rows_of_fields(table, f"{content.name}, ", classes)


_READERS: dict[str, Callable[[_Content], Iterator[Row]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".csv": lambda content: _separated(content, ","),
    ".tsv": lambda content: _separated(content, "\t"),
    ".parquet": _parquet,
    ".txt": _lines,
}
