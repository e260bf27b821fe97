"""Rows that are in memory already: lists of dicts, data sets of `datasets`, DataFrames of pandas."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from tezo.errors import RequestError
from tezo.models.model_config import IN_MEMORY
from tezo.tasks import Format, Row, read_rows
from tezo.tasks.data_config import DataConfig
from tezo.tasks.examples import check_fields_differ, class_names, rows_of_fields
from tezo.tasks.splits import Splits, divide, drawn_test, evaluation_rows, read_part, training_rows

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file, folder or pattern, the name of a hub data set, a list of dicts, a DataFrame of pandas, or a split of a data
set of `datasets`."""


def is_named(source: object) -> bool:
    """Whether rows are given by a name, rather than as objects."""
    return isinstance(source, str | Path)


def rows_of(source: Rows, key: str) -> list[Row]:
    """All rows of `source`.

    Args:
        source: a name, or the rows themselves.
        key: the argument that gave it, for messages.

    Raises:
        RequestError: it cannot be read, it has no rows, or a row is not a dict.
    """
    if isinstance(source, str | Path):
        return read_rows(str(source), key=key)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        keys = f" of {', '.join(map(str, source))}" if isinstance(source, Mapping) else ""
        raise RequestError(
            f"{key} is {type(source).__name__}{keys}; give a list of dicts, a DataFrame, or one split of a data set."
        )
    found = list(_records(source, key))
    for number, fields in enumerate(found, start=1):
        if not isinstance(fields, Mapping):
            raise RequestError(f"{key}, row {number}, is {type(fields).__name__}; a row is a dict of its fields.")
    if not found:
        raise RequestError(f"{key} has no rows; give at least one.")
    return rows_of_fields(found, f"{key}, ", class_names(getattr(source, "features", None)))


def _records(source: Any, key: str) -> Iterable[Any]:
    """The rows of a DataFrame of pandas; anything else as it is."""
    if not (hasattr(source, "columns") and hasattr(source, "to_dict")):
        return cast("Iterable[Any]", source)
    check_fields_differ([str(name) for name in source.columns], key)
    return cast("Iterable[Any]", source.to_dict("records"))


def splits_of(data: DataConfig, objects: Mapping[str, Rows]) -> Splits:
    """What `read_splits` gives, where some of it is in memory.

    Args:
        data: has `IN_MEMORY` in the place of each part that is.
        objects: those parts, by "train", "dev" and "test".

    Raises:
        RequestError: a setting is of rows from another source, or the rows do not fit.
    """
    _check_use(data, objects)
    given = {part: rows_of(source, "data" if part == "train" else part) for part, source in objects.items()}
    return Splits(
        given["train"] if "train" in given else training_rows(data),
        given["dev"] if "dev" in given else read_part(data, "dev"),
        drawn_test(given["test"], data) if "test" in given else evaluation_rows(data),
    )


def reported_rows(rows: Splits, form: Format, data: DataConfig, seed: int) -> list[Row]:
    """The rows that a run's figures are made of: its test rows, or its dev rows where it has none.

    Args:
        rows: what `splits_of` returned.
        form: of the rows.
        data: of the run.
        seed: of the run.
    """
    used = divide(rows, form, data, seed)
    return used.test or used.dev


def _check_use(data: DataConfig, objects: Mapping[str, Rows]) -> None:
    part = next(iter(objects))
    if data.task is not None:
        raise RequestError(
            f"data.task is {data.task}, and {'data' if part == 'train' else part} are rows in memory; leave one of "
            "them out."
        )
    for name in ("dir", "subset", "train_split", "streaming") if data.train == IN_MEMORY else ("dir",):
        if getattr(data, name) != getattr(DataConfig, name):
            raise RequestError(
                f"data.{name} is {getattr(data, name)!r}, and has no meaning for rows in memory; leave it out."
            )
