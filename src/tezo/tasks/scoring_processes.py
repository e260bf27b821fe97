"""Processes that score, with a limit of time for each call.

Nothing here imports torch, so that such a process starts at once.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tezo.system.files import write_all
from tezo.tasks.scorers import load_score
from tezo.tasks.scores import Scored, missing
from tezo.tasks.scoring import Sample, scored

SECONDS_OF_A_SCORE = 60.0
"""Limit of a call where it is not set."""


class Processes:
    """Processes that score, each with the function of a file. They get samples, and answer, as lines of JSON.

    Requests have numbers, which answers repeat: no score is taken for that of another call.

    Args:
        scorer: FILE.py:FUNCTION.
        count: number of processes.
        seconds: limit of a call, after which its process is ended and another takes its place.
        folder: where they start.
    """

    def __init__(self, scorer: str, count: int, seconds: float, folder: Path) -> None:
        self._scorer, self._seconds = scorer, seconds
        self._folder = folder
        self._free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        for _ in range(count):
            self._free.put(None)
        self._count = count
        self._called: set[_Process] = set()

    def scored(self, samples: Sequence[Sample], *, batch: bool) -> list[Scored]:
        """Returns the score of each sample; those of calls that do not end in time are missing.

        Args:
            samples: of what scores are wanted.
            batch: whether the function scores all of them in one call.
        """
        groups = [list(samples)] if batch else [[sample] for sample in samples]
        return [one for found in self._threads.map(self._scored_group, groups) for one in found]

    def _scored_group(self, samples: Sequence[Sample]) -> list[Scored]:
        process = self._free.get()
        try:
            if process is None:
                process = _Process(self._scorer, self._folder)
            self._called.add(process)
            found = process.scored(samples, self._seconds)
            self._called.discard(process)
            if isinstance(found, str):
                process = None
                return [missing(found)] * len(samples)
            return found
        finally:
            self._free.put(process)

    def close(self) -> None:
        """Ends the processes, and the calls that are under way where an error has ended what asked for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for called in [*self._called]:
            called.kill()
        for _ in range(self._count):
            process = self._free.get()
            if process is not None:
                process.end()
            self._free.put(None)
        self._threads.shutdown()


class _Process:
    """A process that runs `main` of this module."""

    def __init__(self, scorer: str, folder: Path) -> None:
        self._number = 0
        # not of multiprocessing, which would run the user's script again
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tezo.tasks.scoring_processes", scorer], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, encoding="utf-8", cwd=folder,
            process_group=0,  # Ctrl-C is for the run, which finishes its step
        )  # fmt: skip
        self._read(START_SECONDS)

    def scored(self, samples: Sequence[Sample], seconds: float) -> list[Scored] | str:
        """Returns the scores, or why there are none after so many seconds; then the process has ended."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return f"could not be started in a process (exit status {self._process.returncode}; see standard error)"
        self._number += 1
        request = {"number": self._number, "samples": [asdict(sample) for sample in samples]}
        with suppress(OSError):  # it has ended: there is nothing to read either
            self._process.stdin.write(json.dumps(request, default=str) + "\n")
            self._process.stdin.flush()
        started = time.monotonic()
        line = self._read(seconds)
        if line:
            found = _scores_in(line, self._number, len(samples))
            if found is not None:
                return found
            self.end()
            return "sent what is no answer to this call"
        if time.monotonic() - started >= seconds:
            return f"took more than {seconds:g} s"
        return f"ended its process (exit status {self._process.returncode})"

    def _read(self, seconds: float) -> str:
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.end()
        return line

    def kill(self) -> None:
        """Kills the process, and the programs that the scorer has started: they may have its pipes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (AttributeError, OSError):  # there are no groups on this system, or nobody in it is left
            self._process.kill()

    def end(self) -> None:
        """Ends the process, by itself where it can: it reads that no more is asked."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of what could not be written to it
                pipe.close() if pipe else None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        self.kill()
        self._process.wait()


def _scores_in(line: str, number: int, count: int) -> list[Scored] | None:
    """Returns the scores of an answer; None where it is not the one to request `number`, of so many samples."""
    try:
        answer = json.loads(line)
        found = [Scored(**fields) for fields in answer["scores"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if answer["number"] == number and len(found) == count else None


ENDING_SECONDS = 1.0
"""How long a process may take to end by itself."""
START_SECONDS = 60.0
"""Limit of the start of a process, with the imports of the scorer's file."""


def main() -> None:
    """Scores what standard input asks for, line by line, with the function that the argument names."""
    asked, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    os.dup2(2, 1)  # what the scorer prints is no answer, nor what programs print that it starts
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if hasattr(os, "register_at_fork"):  # a copy neither answers nor keeps the pipes open
        os.register_at_fork(after_in_child=lambda: _close(asked.fileno(), answers))
    function, _ = load_score(sys.argv[1])
    write_all(answers, b"[]\n")
    for line in asked:
        request = json.loads(line)
        found = scored(function, [Sample(**fields) for fields in request["samples"]])
        answer = {"number": request["number"], "scores": [asdict(one) for one in found]}
        write_all(answers, f"{json.dumps(answer)}\n".encode())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # threads of the scorer may wait for ever


def _close(*handles: int) -> None:
    for handle in handles:
        with suppress(OSError):
            os.close(handle)


if __name__ == "__main__":
    main()
