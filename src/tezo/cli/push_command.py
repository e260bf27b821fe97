"""`tezo push`."""

from pathlib import Path
from typing import Annotated

import typer

from tezo.cli.common import JsonOption, print_json, showing_work


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("push")(push)


@showing_work()
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; it is created if needed.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a repository that is created.")] = False,
    json: bool = JsonOption,
) -> None:
    """Upload a run's adapter, or its model, with a model card to the Hugging Face hub; private unless --public."""
    from tezo.training.finished_runs.publishing import push_run

    url = push_run(run, name, public=public)
    if json:
        print_json({"repository": name, "url": url})
    else:
        print(url)
