"""`tezo chat`: prompts from the terminal, and the answers of a model before and after a run."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from tezo.cli.common import SetOption, showing_work
from tezo.system.errors import RequestError


def chat(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run folder, or a base model.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer of free text; default: the task's, or 64.")
    ] = None,
    settings: list[str] = SetOption,
) -> None:
    """Answer prompts from the terminal: the untuned model, then the tuned one. An empty line or Ctrl-D ends it.

    Each prompt stands alone. Where standard input is a file or a pipe, each line is a prompt.
    """
    with showing_work():
        from tezo.system.progress import quieted
        from tezo.tasks.setup import row_of_prompt
        from tezo.training import opening
        from tezo.training.settings import parse_setting

        opening.check_new_tokens(max_new_tokens)
        config = opening.run_config(run, [parse_setting(text) for text in settings])
        speakers = opening.speakers(run, config)
        row_of_prompt(config.data, speakers[0].loaded, "a prompt")  # refused here, where rows have more fields
    said = set[str]()
    with quieted(wanted=True):
        for prompt in _prompts():
            for speaker in speakers:
                print(f"{speaker.name}: " if speaker.name else "", end="", flush=True)
                heard: list[str] = []

                def hear(piece: str, heard: list[str] = heard) -> None:
                    heard.append(piece)
                    print(piece, end="", flush=True)

                try:
                    row = row_of_prompt(config.data, speaker.loaded, prompt)
                    with speaker.within():
                        (answer,), notices, _ = opening.answer_rows(config, speaker.loaded, [row], max_new_tokens, hear)
                except RequestError as error:  # of this prompt; the next one may fit
                    if not sys.stdin.isatty():
                        raise
                    print(f"\nerror: {error}", file=sys.stderr)
                    break
                print("" if heard else answer, flush=True)
                for notice in notices:
                    if notice not in said:
                        typer.echo(f"note: {notice}", err=True)
                said.update(notices)


def _prompts() -> Iterator[str]:
    """Yields the lines of standard input, with a sign to write one where it is a terminal."""
    while sys.stdin.isatty():
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            return
        yield line
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")
