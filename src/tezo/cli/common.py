"""What commands share."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tezo.files import json_text


@dataclass
class Options:
    """Options of the program, before the command."""

    debug: bool = False


options = Options()

SetOption = typer.Option([], "--set", metavar="KEY=VALUE", help="Any key of a recipe, such as method.lr=1e-4.")
BaseOption = Annotated[str | None, typer.Option("--model", help="The run's base, where it has moved since.")]
JsonOption = typer.Option(False, "--json", help="Print JSON, for programs.")


def print_json(value: Any) -> None:
    """One JSON document on standard output; JSON has no NaN or infinity, and null stands for them."""
    print(json_text(value, indent=2))


def percent(value: float) -> str:
    """0.512 -> 51.2 %."""
    return f"{100 * value:.1f} %"


def readable(metric: str, value: float) -> str:
    """A metric's value for people."""
    return f"{value:.4f}" if metric == "loss" else percent(value)
