"""Processes without the seconds of their imports: forks of one that has the libraries loaded, and has not computed.

`python tests/forks.py` is that one. A line of its input is a request in JSON, a line of its output the answer.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEZO = "tezo.cli.main"
# What the commands import when they run.
LOADED = (
    TEZO, "ranked", "kills", "tezo.training.screen", "tezo.training.loop", "tezo.models.lora",
    "peft", "transformers.models.opt.modeling_opt", "torch.distributed.fsdp", "torch.distributed.tensor",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """How processes that ran one command ended: the first exit code that is not 0, and what all of them wrote."""

    returncode: int
    stdout: str
    stderr: str


def forked(program: str | Path, *arguments: Any, ranks: int = 1, largest_file: int | None = None) -> Done:
    """`main()` of a module or a script, with the arguments of a program, in a process of its own, in this folder.

    Args:
        program: the module's name, or the script's path.
        arguments: of the program.
        ranks: how many processes run it; where there are several, in the environment that torchrun gives its ranks.
        largest_file: in bytes; the operating system refuses to let a file grow beyond.
    """
    request = {
        "program": str(program), "arguments": [*map(str, arguments)], "folder": str(Path.cwd()),
        "ranks": ranks, "largest_file": largest_file,
    }  # fmt: skip
    source = _source()
    assert source.stdin is not None and source.stdout is not None
    source.stdin.write(json.dumps(request) + "\n")
    source.stdin.flush()
    return Done(**json.loads(source.stdout.readline()))


@functools.cache
def _source() -> subprocess.Popen[str]:
    """The process that forks, one for all tests of this one."""
    source = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @atexit.register
    def close() -> None:
        assert source.stdin is not None
        source.stdin.close()
        source.wait()

    return source


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


def _run(request: dict[str, Any], patience: float = 240) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(rank)) for rank in range(request["ranks"])]
        environments = _environments(request["ranks"])
        children = [_fork(request, place, more) for place, more in zip(places, environments, strict=True)]
        codes = [os.waitstatus_to_exitcode(status) for status in _ends(children, time.monotonic() + patience)]
        out, err = ("".join(place.with_suffix(s).read_text() for place in places) for s in (".out", ".err"))
    return {"returncode": next((code for code in codes if code), 0), "stdout": out, "stderr": err}


def _environments(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _fork(request: dict[str, Any], place: Path, environment: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    code: Any = 1
    try:
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(place.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
        os.chdir(request["folder"])
        os.environ.update(environment)
        if request["largest_file"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"],) * 2)
        sys.argv = [request["program"], *request["arguments"]]
        code = _main_of(request["program"])() or 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _main_of(program: str) -> Callable[[], int | None]:
    return runpy.run_path(program)["main"] if program.endswith(".py") else importlib.import_module(program).main


def _ends(children: list[int], deadline: float) -> list[int]:
    """The status of each; those that are not done by then are killed."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                found, status = os.waitpid(child, os.WNOHANG)
                statuses |= {child: status} if found else {}
        if time.monotonic() > deadline:
            for child in set(children) - statuses.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [statuses[child] for child in children]


if __name__ == "__main__":
    serve()
