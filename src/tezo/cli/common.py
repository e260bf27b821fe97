"""What commands share."""

import json
import math
import os
from dataclasses import dataclass
from logging import ERROR, getLogger
from typing import Annotated, Any

import typer


@dataclass
class Options:
    """Options of the program, before the command."""

    debug: bool = False


options = Options()

SetOption = typer.Option([], "--set", metavar="KEY=VALUE", help="Any key of a recipe, such as method.lr=1e-4.")
BaseOption = Annotated[str | None, typer.Option("--model", help="The run's base, where it has moved since.")]
JsonOption = typer.Option(False, "--json", help="Print JSON, for programs.")


def quiet_libraries() -> None:
    """Keeps the libraries' own bars and advice off the screen; errors still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # of every product that it rounds; at import
        getLogger(name).setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def print_json(value: Any) -> None:
    """One JSON document on standard output; JSON has no NaN or infinity, and null stands for them."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(value: float) -> str:
    """0.512 -> 51.2 %."""
    return f"{100 * value:.1f} %"


def readable(metric: str, value: float) -> str:
    """A metric's value for people."""
    return f"{value:.4f}" if metric == "loss" else percent(value)
