"""Scorers: functions of several forms, and what a call of one gives, with second tries where it fails.

A score that cannot be had is missing, NaN, and never zero: a member of a population is not worse for a judge's failure.
Nothing here imports torch, so that a process that scores starts at once.
"""

import asyncio
import inspect
import math
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

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


@contextmanager
def _ending_copies() -> Iterator[None]:
    """Surrounds a call of the user's code. A copy of this process that it forks ends where it would leave the call."""
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != process:
            _end_copy(error)
        raise
    if os.getpid() != process:
        _end_copy(SystemExit(0))


def _end_copy(error: BaseException) -> NoReturn:
    """Ends this process, as Python does for an error that nobody has caught."""
    status = (error.code or 0) if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


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
            return [missing(f"returned {_shown(values)}, not a list of {len(samples)} scores")] * len(samples)
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
                with _ending_copies():
                    value: Any = function(*arguments(function, sample)) if attempt else first
                    return await value if inspect.isawaitable(value) else value
            except FAULTS as error:
                failure = missing(f"raised {type(error).__name__} ({error})")
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
    with _ending_copies():
        return await value


def _done(value: Any) -> Any:
    return _run(_awaited(value)) if inspect.isawaitable(value) else value


def _tried(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or a `Scored` that says how the last of its tries failed."""
    for _ in range(TRIES):
        try:
            with _ending_copies():
                return call()
        except FAULTS as error:
            failure = missing(f"raised {type(error).__name__} ({error})")
    return failure


def missing(why: str) -> Scored:
    """Returns a score that could not be had, for this reason."""
    return Scored(MISSING, {}, why)


def _of(value: Any) -> Scored:
    """Returns the score that a function's value is: a number, named parts, or None where it has none."""
    if value is None:
        return missing("returned None")
    try:
        parts = {str(name): float(part) for name, part in value.items()} if isinstance(value, Mapping) else {}
        total = float(value) if not isinstance(value, Mapping) else sum(parts.values()) if parts else MISSING
    except Exception as error:  # of a class of the user's
        return missing(f"returned {_shown(value)}, which is no number ({type(error).__name__})")
    if all(abs(number) <= LARGEST for number in (total, *parts.values())):  # NaN is not
        return Scored(total, parts)
    return missing(f"returned {_shown(value)}, no finite number from -{LARGEST:g} to {LARGEST:g}")


MOST_SHOWN = 80
"""Characters of a value in a message."""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of an integer with thousands of digits, among others
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
