"""`tezo predict`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tezo.cli.common import SetOption
from tezo.errors import RequestError
from tezo.models.quiet import quiet_libraries

if TYPE_CHECKING:
    from tezo.tasks import Row

ANSWER = "prediction"
"""The field that a row gains."""

MAX_NEW_TOKENS = 64
"""Longest answer of free text, where neither the user nor the task says."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("predict")(predict)


def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    source: Annotated[str, typer.Option("--input", help="Rows to answer; an answer in them is not needed.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write: each row with its `prediction`.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer of free text; default: the task's, or 64.")
    ] = None,
    settings: list[str] = SetOption,
) -> None:
    """Answer new rows with a tuned model."""
    from tezo.training.config import parse_setting

    quiet_libraries()
    from tezo.files import write_file
    from tezo.tasks import read_rows
    from tezo.tasks.evaluation import predict as answer
    from tezo.tasks.setup import make_format, make_objective
    from tezo.tasks.token_notices import token_notices
    from tezo.training.opening import is_run, open_model, run_config

    if not is_run(run):
        raise RequestError(f"{run} is not a run folder (it has no config.yaml); give one that tezo train made.")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    _check_output(output)
    config = run_config(run, [parse_setting(text) for text in settings])
    rows = read_rows(source, key="input")
    for row in rows:
        if ANSWER in row.fields:
            raise RequestError(f"{row.where}: there is a field {ANSWER!r} already; rename it, or take it out.")
    loaded = open_model(run, config)
    form = make_format(config.data, loaded, rows)
    new = 0 if form.options else max_new_tokens or form.max_new_tokens or MAX_NEW_TOKENS
    objective = make_objective(config.data, loaded, form, new)
    encoded = [objective.encode(form.example(row, answered=False)) for row in rows]
    for notice in token_notices(objective):
        typer.echo(f"note: {notice}", err=True)
    answers = answer(loaded.model, objective, encoded, config.train.eval_batch_size, new)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, _text(rows, answers).encode())
    print(f"{len(rows)} answers: {output}")


def _check_output(output: Path) -> None:
    if output.exists():
        raise RequestError(f"output: {output} exists; give another --output, or delete it first.")
    above = next(folder for folder in output.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise RequestError(f"output: nothing can be written in {above}; give another --output.")


def _text(rows: "Sequence[Row]", predictions: Sequence[str]) -> str:
    pairs = zip(rows, predictions, strict=True)
    lines = (json.dumps({**row.fields, ANSWER: answer}, ensure_ascii=False, default=str) for row, answer in pairs)
    return "".join(line + "\n" for line in lines)
