"""`tezo reproduce` with a cost table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tezo.errors import RequestError

NAMES = ("memory", "time", "peft-memory", "elements")
"""Tables of costs; the other tables are of accuracies."""


def reproduce_costs(
    name: str, output: Path, *, only: str, model: str | None, devices: str, others: Mapping[str, Any]
) -> None:
    """Makes a cost table cell by cell, and writes it next to the paper's numbers.

    Args:
        name: one of `NAMES`.
        output: folder of its cells and texts.
        only: rows and models, separated by commas; empty: all.
        model: shapes for other columns, separated by commas; None: the table's.
        devices: name of a torch device.
        others: options of the tables of accuracies that were given, which costs do not have.
    """
    from tezo.studies.cost_tables import COST_TABLES, chosen, fill

    given = [option for option, value in others.items() if value]
    if given or "," in devices:
        option = given[0] if given else "devices with several devices"
        raise RequestError(f"{option} is for tables of accuracies; leave it out for the table {name}.")
    table = chosen(COST_TABLES[name], only=_names(only), models=_names(model or ""))
    for path in fill(table, output, devices, print):
        print(f"written: {path}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
