"""Options that `tezo` does not have, under names that settings have elsewhere: what was meant is said."""

from collections.abc import Sequence

import typer
from typer.main import get_command

from tezo.errors import RequestError

SET = "--set"


def check_options(app: typer.Typer, arguments: Sequence[str]) -> None:
    """An error for the first unknown option of a command with settings whose meaning is known.

    Args:
        app: the program.
        arguments: of the command line.
    """
    commands = getattr(get_command(app), "commands", {})
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    known = {option for parameter in commands[name].params for option in parameter.opts} if name in commands else set()
    if SET not in known:
        return
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--") and option not in (*known, "--help", "--debug"):
            _suggest(option, known)


def _suggest(option: str, known: set[str]) -> None:
    from tezo.training.configuration.aliases import OPTIONS, key_meant

    meant = key_meant(option)
    if meant is None:
        return
    key, _, value = meant.partition("=")
    own = OPTIONS.get(key, key)
    way = f"{own} {value}".strip() if own in known else f"{SET} {key}={value or 'VALUE'}"
    raise RequestError(f"{option}: there is no such option. Did you mean {way}?")
