"""Reads the rows of a configuration and divides them into training, dev and test rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tezo.errors import RequestError
from tezo.models.local_names import hint, is_gone
from tezo.tasks import Fields, Format, Row, Task, hold_out, hold_out_of_groups, parts, per_class, read_rows, task
from tezo.tasks.data_config import DataConfig
from tezo.tasks.row_sources import is_local
from tezo.tasks.sampling import MOST_HELD_OUT

NO_ROWS = "-"
"""Value of data.train for a base model that is evaluated without training rows."""

NUM_TRAIN, NUM_TEST = 1000, 1000
"""Default numbers of training and test rows of a task, as in MeZO and later papers."""

MOST_DEV = 0.4
"""Maximum fraction of dev rows, for a task with too few rows. CB and COPA keep the papers' numbers of dev rows; WSC
does not use 500 of its 554 rows as dev rows, as the papers do."""


@dataclass(frozen=True)
class Splits:
    """Rows by use; dev and test may be empty.

    Attributes:
        train: rows to train on.
        dev: rows that choose the checkpoint.
        test: rows for the reported metrics.
        notices: notices for the user on how the rows were chosen.
    """

    train: list[Row]
    dev: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)
    notices: tuple[str, ...] = ()


def read_splits(data: DataConfig) -> Splits:
    """Reads all rows that the settings name; `divide` chooses among them."""
    _check_use(data)
    return Splits(training_rows(data), read_part(data, "dev"), evaluation_rows(data))


def _check_use(data: DataConfig) -> None:
    """Raises `RequestError` if a setting does not apply to the source of the rows."""
    if data.task is not None:
        source, idle = f"the task {data.task}", [*(f.name for f in fields(Fields)), "subset", "streaming"]
    elif is_local(str(data.train)):
        source, idle = "files", ["dir", "subset", "train_split", "streaming"]
    else:
        source, idle = "a hub data set", ["dir"]
    for name in idle:
        value, default = getattr(data, name), getattr(DataConfig, name)
        if value != default:
            raise RequestError(f"data.{name} is {value!r}, but has no meaning for {source}; leave it out.")


def training_rows(data: DataConfig) -> list[Row]:
    """All rows of data.train, or of the task's training split."""
    if data.task is None:
        assert data.train is not None
        first = _streamed(data, data.num_train, "data.num_train", more=_most_held_out(data))
        return read_rows(data.train, key="data.train", split=data.train_split, subset=data.subset, first=first)
    if data.train is not None:
        raise RequestError(f"data.train is {data.train!r} and data.task is {data.task!r}; leave one of them out.")
    return _task_rows(data, data.train_split, "data.train_split")


def read_part(data: DataConfig, name: str) -> list[Row]:
    """The rows of data.dev or data.test: from a file, or from a split of the training data set; [] if it is not set."""
    source, key = getattr(data, name), f"data.{name}"
    if source is None:
        return []
    if data.task is not None:
        return _task_rows(data, source, key)
    if Path(source).suffix == "" and not is_local(source) and not is_local(str(data.train)):
        first = _streamed(data, getattr(data, f"num_{name}"), f"data.num_{name}")
        return read_rows(str(data.train), key=key, split=source, subset=data.subset, first=first)
    return read_rows(source, key=key)


def _streamed(data: DataConfig, count: int | None, key: str, more: int = 0) -> int | None:
    """How many rows of a split of the hub data set are streamed; None: it is downloaded whole."""
    if not data.streaming:
        return None
    if count is None:
        raise RequestError(f"data.streaming is set, and {key} is not; give it, so that there is an end.")
    return count + more


def _most_held_out(data: DataConfig) -> int:
    """Rows to read besides data.num_train, enough for `_held_out`."""
    return 0 if data.dev is not None or data.hold_out == 0 else max(data.num_dev or 0, MOST_HELD_OUT)


def evaluation_rows(data: DataConfig) -> list[Row]:
    """The rows of data.test, or of the task's test split; the same rows for every seed."""
    if data.task is None or data.test is not None:
        rows = read_part(data, "test")
    else:
        rows = _task_rows(data, task(data.task).hub.test, "data.test")
    return drawn_test(rows, data)


def drawn_test(rows: list[Row], data: DataConfig) -> list[Row]:
    """As many of the test rows as data.num_test says, the same ones for every seed."""
    count = data.num_test if data.num_test is not None else NUM_TEST if data.task is not None else None
    _check_enough(len(rows), data.num_test, "data.num_test", data)
    return rows if count is None or len(rows) <= count else parts(rows, [count], 0, "test")[0]


def rows_to_report(data: DataConfig, seed: int, file: str | None) -> tuple[list[Row], str]:
    """(rows to evaluate on, their source in words): `file`, or the rows that the run was evaluated on.

    Args:
        data: data settings of the run.
        seed: seed of the run.
        file: rows to use instead; None: the rows of the run.
    """
    if file is not None:
        return read_rows(file, key="data"), file
    if data.task is not None:
        return evaluation_rows(data), f"{data.task}, {data.test or 'test'}"
    own = data.test or data.dev or str(data.train)
    if is_gone(own):
        raise RequestError(
            f"data: the rows of this run were in {own}, which is not here; give --data FILE (evaluate(FILE) in Python)."
            f"{hint(own)}"
        )
    if data.test is not None:
        return evaluation_rows(data), data.test
    if data.dev is not None:
        return _drawn_dev(read_part(data, "dev"), data, seed), data.dev
    if data.train == NO_ROWS:
        raise RequestError(
            "data is not set, and there is no run folder of that name, which would have rows; give --data FILE or "
            "--task NAME with the rows to evaluate on."
        )
    _, held = _held_out(training_rows(data), data, _seed_of_draws(data, seed))
    if not held:
        raise RequestError("data is not set, and the run had neither dev nor test rows; give --data FILE.")
    return held, f"{data.train}, held out of training"


def _seed_of_draws(data: DataConfig, seed: int) -> int:
    return seed if data.seed is None else data.seed


def _drawn_dev(rows: list[Row], data: DataConfig, seed: int) -> list[Row]:
    """data.num_dev of the dev rows; all if it is not set."""
    _check_enough(len(rows), data.num_dev, "data.num_dev", data)
    most = min(data.num_dev or len(rows), len(rows))
    return parts(rows, [most], _seed_of_draws(data, seed), "dev")[0]


def divide(rows: Splits, form: Format, data: DataConfig, seed: int) -> Splits:
    """Chooses the rows that are used.

    Args:
        rows: result of `read_splits`.
        form: format of the rows; its labels are those of data.per_class.
        data: data settings, with the numbers of rows.
        seed: seed of the training and dev rows; the test rows do not depend on it.

    Raises:
        RequestError: there are too few rows, and data.allow_fewer is not set.
    """
    seed = _seed_of_draws(data, seed)
    if data.task is None and not rows.dev:
        kept, held = _held_out(rows.train, data, seed)
        if not held and not rows.test:
            raise RequestError("data.hold_out is 0, and there are no other rows to evaluate on; give data.test.")
        notice = (
            f"{len(held)} of {len(rows.train)} training rows are held out as dev rows, which choose the step to keep; "
            "data.dev names others."
        )
        rows = replace(rows, train=kept, dev=held, notices=(notice,) if held else ())
    takes_dev = data.task is not None and not rows.dev
    if takes_dev and data.per_class and data.num_dev is not None:
        rows, takes_dev = _with_dev(rows, form, data, seed), False
    chosen = _by_class(rows, form, data, seed, takes_dev) if data.per_class else _by_count(rows, data, seed, takes_dev)
    used = replace(chosen, dev=_drawn_dev(chosen.dev, data, seed))
    return replace(used, notices=used.notices + _repetition_notice(used))


def _held_out(rows: list[Row], data: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """(training rows, dev rows) of rows without dev rows of their own."""
    if data.hold_out == 0:
        return rows, []
    if data.hold_out is not None:
        kept, held = hold_out(rows, data.hold_out, seed)
        return kept, _drawn_dev(held, data, seed)
    return hold_out_of_groups(
        rows, [str(row.fields.get(row.column(data.label) or data.label)) for row in rows], data.num_dev, seed
    )


def _repetition_notice(splits: Splits) -> tuple[str, ...]:
    """A notice on dev and test rows that are training rows too; empty if there are none."""
    trained = {_content(row) for row in splits.train}
    held = [*splits.dev, *splits.test]
    count = sum(_content(row) in trained for row in held)
    if count == 0:
        return ()
    return (
        f"{count} of the {len(held)} dev and test rows are training rows too, word for word; "
        "their loss and scores measure what was memorised.",
    )


def _content(row: Row) -> str:
    return json.dumps(row.fields, sort_keys=True, default=str)


def _by_class(rows: Splits, form: Format, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
    assert data.per_class is not None
    if not form.labels:
        raise RequestError("data.per_class is set, but these rows have no labels in common; leave it out.")
    labels = [form.example(row).label for row in rows.train]
    counts = [data.per_class] * (2 if takes_dev else 1)
    drawn = per_class(labels, counts, form.labels, seed, fewer=data.allow_fewer)
    train, *dev = ([rows.train[i] for i in part] for part in drawn)
    notices = rows.notices
    if len(train) < data.per_class * len(form.labels):
        notices += (
            f"some labels have fewer than {sum(counts)} rows: {len(train)} training rows"
            + (f" and {len(dev[0])} dev rows are used." if takes_dev else " are used."),
        )
    return replace(rows, train=train, dev=dev[0] if takes_dev else rows.dev, notices=notices)


def _with_dev(rows: Splits, form: Format, data: DataConfig, seed: int) -> Splits:
    """Draws data.num_dev dev rows of a task; data.per_class draws from the others, so they are the same for any k."""
    available, count = len(rows.train), data.num_dev or 0
    together = count + (data.per_class or 0) * len(form.labels)
    _check_enough(available, together, "data.num_dev + data.per_class of each label", data)
    notices = rows.notices
    if available < together:
        count = min(count, int(MOST_DEV * available))
        notices += (f"{data.task} has {available} rows to train on; {count} of them are dev rows.",)
    dev, others = parts(rows.train, (count, available - count), seed, "dev")
    return replace(rows, train=others, dev=dev, notices=notices)


def _by_count(rows: Splits, data: DataConfig, seed: int, takes_dev: bool) -> Splits:
    if not takes_dev:
        default = NUM_TRAIN if data.task is not None else len(rows.train)
        _check_enough(len(rows.train), data.num_train, "data.num_train", data)
        count = min(data.num_train or default, len(rows.train))
        return replace(rows, train=parts(rows.train, [count], seed, "train")[0])
    wanted = data.num_train or NUM_TRAIN, data.num_dev or task(str(data.task)).num_dev
    if data.num_train is not None or data.num_dev is not None:
        _check_enough(len(rows.train), sum(wanted), "data.num_train + data.num_dev", data)
    dev = min(wanted[1], int(MOST_DEV * len(rows.train))) if len(rows.train) < sum(wanted) else wanted[1]
    counts, notices = (min(wanted[0], len(rows.train) - dev), dev), rows.notices
    if counts != wanted:
        notices += (
            f"{data.task} has {len(rows.train)} rows to train on, not {wanted[0]} + {wanted[1]}: "
            f"{counts[0]} training rows and {counts[1]} dev rows are used.",
        )
    train, chosen = parts(rows.train, counts, seed, "train")
    return replace(rows, train=train, dev=chosen, notices=notices)


def _check_enough(available: int, wanted: int | None, key: str, data: DataConfig) -> None:
    if wanted is not None and available < wanted and not data.allow_fewer:
        raise RequestError(f"{key} is {wanted}, but there are {available} rows; lower it, or set data.allow_fewer.")


def _task_rows(data: DataConfig, split: str, key: str) -> list[Row]:
    """The labelled rows of a task's split, from the hub or from the task's folder in data.dir."""
    entry = task(str(data.task))
    if data.dir is None:
        rows = read_rows(entry.hub.name, key=key, split=split, subset=entry.hub.subset)
    else:
        rows = read_rows(str(_file(entry, Path(data.dir).expanduser(), split)), key=key)
    return [row for row in rows if entry.unlabelled is None or row.fields.get("label") != entry.unlabelled]


def _file(entry: Task, folder: Path, split: str) -> Path:
    own = folder / entry.name
    names = [split, "validation"] if split == entry.hub.test else [split]
    paths = [path for name in names for path in sorted(own.glob(f"{name}.*"))]
    if paths:
        return paths[0]
    splits: Sequence[str] = sorted({path.stem for path in own.glob("*.*")})
    content = f"it has {', '.join(splits)}" if splits else "it has no rows"
    raise RequestError(
        f"data.dir: there is no split {split!r} in {own} ({content}); give the folder that contains {entry.name}/."
    )
