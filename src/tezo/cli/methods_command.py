"""`tezo methods`."""

from typing import Annotated, Any

import typer

from tezo.cli.common import JsonOption, print_json


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("methods")(methods)


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method in full.")] = None,
    json: bool = JsonOption,
) -> None:
    """List the methods, or describe one."""
    import inspect

    from tezo.optim.methods import BASELINES, METHODS, Method, method

    every: list[Method[Any]] = [*METHODS.values(), *BASELINES.values()]
    chosen = [method(name)] if name else every
    if json:
        print_json(
            [
                {
                    "name": m.name,
                    "summary": m.summary,
                    "in_paper": m.in_paper,
                    "exports_adapter": m.exports_adapter,
                    "options": m.defaults(),
                }
                for m in chosen
            ]
        )
        return
    if name:
        print(inspect.getdoc(chosen[0].build))
        print("\nOptions: " + ", ".join(f"{key}={value}" for key, value in chosen[0].defaults().items()))
        return
    for m in chosen:
        marks = ("" if m.in_paper else "  [ours]") + ("  [exact LoRA adapter]" if m.exports_adapter else "")
        print(f"{m.name:<11} {m.summary.partition(': ')[2]}{marks}")
