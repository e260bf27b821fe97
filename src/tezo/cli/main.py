"""The program `tezo`: registers the commands, and turns errors into messages and exit codes."""

import io
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated, NoReturn

import typer

from tezo.cli import answers, chat, lists, runs, train
from tezo.cli.common import options
from tezo.system.errors import RunInterrupted, TezoError, is_of_memory
from tezo.system.files import one_line

INTERRUPTED = 130
"""Exit code of typer on KeyboardInterrupt, which it catches without a message."""

app = typer.Typer(
    help="Fine-tune language models with forward passes, and at most the gradient of the output head.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
EXTENSIONS = "tezo.commands"
"""Entry-point group of modules of other distributions whose `register(app)` adds a command."""

for command in (
    train.train, answers.evaluate, answers.predict, chat.chat, runs.export, runs.push, runs.report, runs.replay,
    lists.methods, lists.tasks, lists.doctor,
):  # fmt: skip
    app.command("eval" if command is answers.evaluate else command.__name__)(command)
for extension in entry_points(group=EXTENSIONS):
    try:
        extension.load().register(app)
    except ImportError as error:  # the other commands work all the same
        print(f"notice: the command {extension.name} cannot be loaded ({one_line(error)}).", file=sys.stderr)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"tezo {version('tezo')}")
        raise typer.Exit


@app.callback()
def _global(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version  # its callback has ended the program
    options.debug = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Exit codes: 0 success, 1 the run failed, 2 the request was wrong, 130 Ctrl-C, 143 SIGTERM.
    """
    for stream in (sys.stdout, sys.stderr):  # no character that a stream lacks is a reason to end
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    options.started = time.perf_counter() - (time.process_time() if arguments is None else 0.0)
    try:
        app(args=arguments, prog_name="tezo")
    except SystemExit as stop:
        if stop.code != INTERRUPTED:
            raise
        cause = getattr(stop.__context__, "__cause__", None)  # an exception of typer is between
        if isinstance(cause, RunInterrupted):
            way = "the same command with --resume goes on"
            _end(f"stopped by {cause.by} after step {cause.steps}; {way}.", cause.exit_code)
        _end("interrupted; if a run had begun, the same command with --resume goes on.", INTERRUPTED)
    except Exception as error:
        if options.debug or "--debug" in (sys.argv if arguments is None else arguments):
            traceback.print_exc()
        if isinstance(error, TezoError):
            _end(str(error), error.exit_code)
        if is_of_memory(error):
            _end(
                f"memory is short ({one_line(error)}); close other programs, raise a limit such as that of ulimit -v, "
                "or take a smaller model or model.dtype=bfloat16.",
                1,
            )
        if isinstance(error, OSError):  # a file or folder from the command line
            _end(f"{error.filename or 'the disk'}: {error.strerror or error}; give another path.", 1)
        _end(
            f"{type(error).__name__} was not foreseen ({one_line(error)}); report it, with the traceback that "
            "tezo --debug shows.",
            1,
        )


def _end(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code) from None
