"""Settings that a user gives for all runs of a table."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tezo.methods import method
from tezo.system.errors import RequestError, nearest
from tezo_studies.reproduce.table import Line

Setting = tuple[str, Any]
"""(dotted key, value)."""

DECIDED = frozenset(
    {"model.name", "model.device", "data.task", "data.dir", "data.train", "data.dev", "data.test", "data.seed",
     "data.per_class", "method.name", "method.lr", "method.scale", "train.seed"}
)  # fmt: skip
"""Keys that the cells of a table differ in, or that other options of the command set."""


def check_settings(settings: Sequence[Setting], lines: Sequence[Line]) -> None:
    """Raises a `RequestError` for a key that the cells decide, or for an option that none of their methods has."""
    options = {option for line in lines if line.how == "train" for option in method(line.method).options()}
    for key, _ in settings:
        section, _, name = key.partition(".")
        if key in DECIDED or not name:
            raise RequestError(f"set: {key} is decided by the table and its cells; choose cells by --only instead.")
        if section == "method" and name not in options:
            raise RequestError(f"set: no method of these cells has the option {name}. {nearest(name, options)}")


def settings_of(line: Line, settings: Iterable[Setting]) -> Iterator[Setting]:
    """The settings for the runs of a line: without options that its method lacks."""
    own = method(line.method).options() if line.how == "train" else {}
    for key, value in settings:
        section, _, name = key.partition(".")
        if section != "method" or name in own:
            yield key, value
