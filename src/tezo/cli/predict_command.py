"""`tezo predict`."""

from pathlib import Path
from typing import Annotated

import typer

from tezo.cli.common import JsonOption, SetOption, print_json, showing_work


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("predict")(predict)


@showing_work()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run folder, or a base model.")],
    source: Annotated[str, typer.Option("--input", help="Rows to answer; -: JSON lines from standard input.")],
    output: Annotated[
        Path, typer.Option(help="JSONL file to write: each row with its `prediction`; -: standard output.")
    ],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer of free text; default: the task's, or 64; a note counts what is cut."),
    ] = None,
    settings: list[str] = SetOption,
    json: bool = JsonOption,
) -> None:
    """Answer new rows with a tuned model, or with a model as it is."""
    from tezo.errors import RequestError
    from tezo.tasks import read_rows
    from tezo.tasks.row_files import standard_input_rows
    from tezo.training.configuration.config import parse_setting
    from tezo.training.finished_runs import answering
    from tezo.training.finished_runs.opening import open_model, run_config

    answering.check_new_tokens(max_new_tokens)
    answering.check_answer_file(output)
    to_file = str(output) != answering.STANDARD
    if json and not to_file:
        raise RequestError("output is -, where the answers are JSON lines already; leave out --json.")
    config = run_config(run, [parse_setting(text) for text in settings])
    rows = standard_input_rows("input") if source == answering.STANDARD else read_rows(source, key="input")
    answering.check_no_answers(rows)
    answers, notices = answering.answer_rows(config, open_model(run, config), rows, max_new_tokens)
    answering.write_answers(output, rows, answers)
    if json:
        print_json({"rows": len(rows), "file": str(output), "notices": notices})
        return
    for notice in notices:
        typer.echo(f"note: {notice}", err=True)
    if to_file:
        print(f"{len(rows)} answers: {output}")
