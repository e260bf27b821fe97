"""Options and output functions that the commands share."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tezo.files import json_text


@dataclass
class Options:
    """Options of the program itself, given before the command."""

    debug: bool = False


options = Options()

SetOption = typer.Option([], "--set", metavar="KEY=VALUE", help="Set any key of the recipe, such as method.lr=1e-4.")
BaseOption = Annotated[str | None, typer.Option("--model", help="Base model of the run, if it has moved.")]
RewardOption = Annotated[
    str | None, typer.Option("--reward", metavar="FILE.py:FUNCTION", help="Scorer of completions; its code runs.")
]
TrustOption = typer.Option(False, "--trust-remote-code", help="Let code run that comes with the base model.")
JsonOption = typer.Option(False, "--json", help="Print JSON.")


def print_json(value: Any) -> None:
    """Prints one JSON document to standard output; NaN and infinity become null."""
    print(json_text(value, indent=2))
