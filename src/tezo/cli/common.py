"""Options and output functions that the commands share."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from typing import Annotated, Any

import typer

from tezo.system.files import json_text
from tezo.system.progress import LIBRARIES, StatusLine, current, quiet_libraries, showing


@dataclass
class Options:
    """Options of the program itself, given before the command."""

    debug: bool = False
    started: float = 0.0
    """`time.perf_counter()` when the command began."""


options = Options()

SetOption = typer.Option([], "--set", metavar="KEY=VALUE", help="Set any key of the recipe, such as method.lr=1e-4.")
BaseOption = Annotated[str | None, typer.Option("--model", help="Base model of the run, if it has moved.")]
RewardOption = Annotated[
    str | None, typer.Option("--reward", metavar="FILE.py:FUNCTION", help="Scorer of completions; its code runs.")
]
ServeOption = Annotated[
    bool,
    typer.Option("--serve", help="With --reward: the scorer asks the model itself, on an OpenAI-compatible server."),
]
TrustOption = typer.Option(False, "--trust-remote-code", help="Let code run that comes with the base model.")
JsonOption = typer.Option(False, "--json", help="Print JSON.")


@contextmanager
def showing_work() -> Iterator[StatusLine | None]:
    """While open, standard error shows the activity of the command; the first line comes before torch is imported.

    Of the processes that torchrun starts the first one shows it; the others get None.
    """
    with showing(started=options.started) as line:
        with current().phase(LIBRARIES):
            quiet_libraries()
            import_module("tezo.training.api")
        yield line


def print_json(value: Any) -> None:
    """Prints one JSON document to standard output; NaN and infinity become null."""
    print(json_text(value, indent=2))


def print_table(rows: Iterable[Sequence[object]], indent: str = "") -> None:
    """Prints rows in columns that are as wide as their longest text."""
    table = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(indent + "  ".join(cells).rstrip())


def mebibytes(count: int) -> str:
    """Returns a number of bytes as "1,234.5 MiB"."""
    return f"{count / 2**20:,.1f} MiB"
