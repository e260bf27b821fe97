"""Scorers: functions of several forms, called in this process or in others, with a limit of time and second tries.

A score that cannot be had is missing, NaN, and never zero: a member of a population is not worse for a judge's failure.
Nothing here imports torch, so that a process that scores starts at once.
"""

import asyncio
import hashlib
import importlib.util
import inspect
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tezo.system.errors import RequestError

T = TypeVar("T")

REWARD = "reward"
"""The metric, and the objective, that a scorer defines."""
MISSING_SCORES = "missing_scores"
"""The metric that tells the share of answers without a score; left out where there is none."""
Score = Callable[..., Any]
"""A scorer, of one of the forms that `scored` calls; higher is better."""
FAULTS = (Exception, SystemExit, asyncio.CancelledError)
"""What a scorer may raise without an end of the run: code that ends its own process is at fault, as any other is, and
clients cancel what they wait for too long."""
TRIES = 3
"""Calls for one score, at most."""
MISSING = math.nan
LARGEST = 1e15
"""The largest magnitude of a score, or of a part of one: its squares can be added up, and a report reads it."""


@dataclass(frozen=True)
class Sample:
    """What a score is of.

    Attributes:
        prompt: text of the prompt.
        completion: what the model wrote, without spaces around it.
        fields: of the row.
        where: name of the row, for messages.
    """

    prompt: str
    completion: str
    fields: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Scored:
    """A score.

    Attributes:
        value: the sum of its parts; NaN where it is missing.
        parts: by name; empty where the function returns a number.
        failure: why it is missing.
    """

    value: float
    parts: Mapping[str, float]
    failure: str | None = None


def takes_batch(function: Score) -> bool:
    """Returns whether a function scores all completions of a batch at once, as reward functions of TRL do."""
    return "completions" in _names(function)


def _names(function: Score) -> list[str]:
    """Returns the names of its parameters but for *args and **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


OF_OTHER_FORMS = ("prompt", "prompts", "completion")
"""Names that a function's only parameter cannot have: it would get what they do not say."""


def check_form(function: Score, name: str) -> None:
    """Raises a `RequestError` where a function cannot be called in one of the forms."""
    if takes_batch(function):
        return
    names = _names(function)
    if (len(names) == 1 and names[0] in OF_OTHER_FORMS) or not _takes(function, 1 if len(names) == 1 else 3):
        raise RequestError(
            f"train.reward: {name} takes ({', '.join(names)}); write f(prompt, completion, row), f(sample) of one "
            "dictionary of these, or f(completions, **columns) of a whole batch."
        )


def _takes(function: Score, count: int) -> bool:
    """Returns whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def arguments(function: Score, sample: Sample) -> tuple[Any, ...]:
    """Returns what a function of one sample is called with: (prompt, completion, fields), or a dictionary of them."""
    if len(_names(function)) == 1:
        return ({**sample.fields, "prompt": sample.prompt, "completion": sample.completion},)
    return sample.prompt, sample.completion, dict(sample.fields)


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Returns the arguments of a function of a batch: prompts, completions, and every field of the rows as a list."""
    names = dict.fromkeys(name for sample in samples for name in sample.fields)
    found = {name: [sample.fields.get(name) for sample in samples] for name in names}
    return found | {"prompts": [s.prompt for s in samples], "completions": [s.completion for s in samples]}


def scored(function: Score, samples: Sequence[Sample]) -> list[Scored]:
    """Returns the score of each sample, by this process. A call that fails is made up to `TRIES` times.

    What the function prints goes to standard error: a command's answer alone goes to standard output.
    """
    with redirect_stdout(sys.stderr):
        return _scored(function, samples)


def _scored(function: Score, samples: Sequence[Sample]) -> list[Scored]:
    if takes_batch(function):
        given, parameters = columns(samples), _names(function)
        taken = {key: value for key, value in given.items() if key in parameters or _takes_any(function)}
        values = _tried(lambda: _done(function(**taken)))
        if isinstance(values, Scored):
            return [values] * len(samples)
        if not isinstance(values, Sequence) or len(values) != len(samples):
            return [_missing(f"returned {_shown(values)}, not a list of {len(samples)} scores")] * len(samples)
        return [_of(value) for value in values]
    found = [_tried(partial(function, *arguments(function, sample))) for sample in samples]
    if any(inspect.isawaitable(value) for value in found):
        found = _run(_all(function, samples, found))
    return [value if isinstance(value, Scored) else _of(value) for value in found]


def _takes_any(function: Score) -> bool:
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


async def _all(function: Score, samples: Sequence[Sample], begun: Sequence[Any]) -> list[Any]:
    async def one(sample: Sample, first: Any) -> Any:
        for attempt in range(TRIES):
            try:
                value: Any = function(*arguments(function, sample)) if attempt else first
                return await value if inspect.isawaitable(value) else value
            except FAULTS as error:
                failure = _missing(f"raised {type(error).__name__} ({error})")
        return failure

    return list(await asyncio.gather(*(one(*pair) for pair in zip(samples, begun, strict=True))))


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, in a thread of its own where this one has a loop, as a notebook has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _done(value: Any) -> Any:
    return _run(_awaited(value)) if inspect.isawaitable(value) else value


def _tried(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or a `Scored` that says how the last of its tries failed."""
    for _ in range(TRIES):
        try:
            return call()
        except FAULTS as error:
            failure = _missing(f"raised {type(error).__name__} ({error})")
    return failure


def _missing(why: str) -> Scored:
    return Scored(MISSING, {}, why)


def _of(value: Any) -> Scored:
    """Returns the score that a function's value is: a number, named parts, or None where it has none."""
    if value is None:
        return _missing("returned None")
    try:
        parts = {str(name): float(part) for name, part in value.items()} if isinstance(value, Mapping) else {}
        total = float(value) if not isinstance(value, Mapping) else sum(parts.values()) if parts else MISSING
    except Exception as error:  # of a class of the user's
        return _missing(f"returned {_shown(value)}, which is no number ({type(error).__name__})")
    if all(abs(number) <= LARGEST for number in (total, *parts.values())):  # NaN is not
        return Scored(total, parts)
    return _missing(f"returned {_shown(value)}, no finite number from -{LARGEST:g} to {LARGEST:g}")


MOST_SHOWN = 80
"""Characters of a value in a message."""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of an integer with thousands of digits, among others
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def load_score(text: str) -> tuple[Score, str]:
    """Returns (the function that FILE.py:FUNCTION names, digest of the file). The file's code runs.

    Raises:
        RequestError: there is no such file or function, or the file cannot be run.
    """
    file, colon, name = text.rpartition(":")
    path = Path(file).expanduser()
    if colon and path.is_file() and not name.isidentifier():
        raise RequestError(f"train.reward: {name!r} is no name of a function in {path}; give FILE.py:FUNCTION.")
    if not colon or not path.is_file():
        raise RequestError(f"train.reward: {text} is not FILE.py:FUNCTION of a file that exists; check the path.")
    spec = importlib.util.spec_from_file_location(f"tezo_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RequestError(f"train.reward: {path} is not a Python file; give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except FAULTS as error:
        raise RequestError(f"train.reward: {path} cannot be run ({type(error).__name__}: {error}); mend it.") from error
    score = getattr(module, name, None)
    if not callable(score):
        raise RequestError(f"train.reward: {path} has no function {name!r}; define it there.")
    return score, hashlib.sha256(path.read_bytes()).hexdigest()


def name_of(score: Score) -> str:
    """Returns the qualified name of a scorer that is an object."""
    named = score if hasattr(score, "__qualname__") else type(score)
    return f"{named.__module__}.{named.__qualname__}"


def scorer_digest(scorer: Score | str) -> str:
    """Returns what tells a scorer from others: a digest of its file, or of the name of an object."""
    if isinstance(scorer, str):
        return load_score(scorer)[1]
    return hashlib.sha256(name_of(scorer).encode()).hexdigest()


class Processes:
    """Processes that score, each with the function of a file. They get samples, and answer, as lines of JSON.

    Args:
        scorer: FILE.py:FUNCTION.
        count: number of processes.
        seconds: limit of a call, after which its process is ended and another takes its place.
    """

    def __init__(self, scorer: str, count: int, seconds: float) -> None:
        self._scorer, self._seconds = scorer, seconds
        self._free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        for _ in range(count):
            self._free.put(None)
        self._count = count

    def scored(self, samples: Sequence[Sample], *, batch: bool) -> list[Scored]:
        """Returns the score of each sample; those of calls that do not end in time are missing.

        Args:
            samples: of what scores are wanted.
            batch: whether the function scores all of them in one call.
        """
        groups = [list(samples)] if batch else [[sample] for sample in samples]
        return [own for found in self._threads.map(self._scored_group, groups) for own in found]

    def _scored_group(self, samples: Sequence[Sample]) -> list[Scored]:
        process = self._free.get()
        try:
            if process is None:
                process = _Process(self._scorer)
            found = process.scored(samples, self._seconds)
            if isinstance(found, str):
                process = None
                return [_missing(found)] * len(samples)
            return found
        finally:
            self._free.put(process)

    def close(self) -> None:
        """Ends the processes."""
        for _ in range(self._count):
            process = self._free.get()
            if process is not None:
                process.end()
            self._free.put(None)
        self._threads.shutdown()


class _Process:
    """A process that runs `main` of this module."""

    def __init__(self, scorer: str) -> None:
        # not of multiprocessing, which would run the user's script again
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tezo.tasks.scoring", scorer], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, encoding="utf-8", process_group=0,  # Ctrl-C is for the run, which finishes its step
        )  # fmt: skip
        self._read(START_SECONDS)

    def scored(self, samples: Sequence[Sample], seconds: float) -> list[Scored] | str:
        """Returns the scores, or why there are none after so many seconds; then the process has ended."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return f"could not be started in a process (exit status {self._process.returncode}; see standard error)"
        with suppress(OSError):  # it has ended: there is nothing to read either
            self._process.stdin.write(json.dumps([asdict(sample) for sample in samples], default=str) + "\n")
            self._process.stdin.flush()
        started = time.monotonic()
        line = self._read(seconds)
        if line:
            return [Scored(**own) for own in json.loads(line)]
        if time.monotonic() - started >= seconds:
            return f"took more than {seconds:g} s"
        return f"ended its process (exit status {self._process.returncode})"

    def _read(self, seconds: float) -> str:
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.end()
        return line

    def _kill(self) -> None:
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
        self._kill()
        self._process.wait()


ENDING_SECONDS = 1.0
"""How long a process may take to end by itself."""
START_SECONDS = 60.0
"""Limit of the start of a process, with the imports of the scorer's file."""


def main() -> None:
    """Scores what standard input asks for, line by line, with the function that the argument names."""
    answers, asked = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)  # what the scorer prints is no answer, nor what programs print that it starts
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    function, _ = load_score(sys.argv[1])
    print("[]", file=answers, flush=True)
    for line in asked:
        found = scored(function, [Sample(**own) for own in json.loads(line)])
        print(json.dumps([asdict(own) for own in found]), file=answers, flush=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # threads of the scorer may wait for ever


if __name__ == "__main__":
    main()
