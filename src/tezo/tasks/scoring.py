"""Scorers: functions of several forms, which are called in this process, with second tries where a call fails.

Nothing here imports torch, so that a process that scores starts at once.
"""

import asyncio
import inspect
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
from tezo.tasks.scores import Scored, missing, raised, score_of, shown

T = TypeVar("T")

REWARD = "reward"
"""The metric, and the objective, that a scorer defines."""
MISSING_SCORES = "missing_scores"
"""The metric that tells the share of answers without a score; left out where there is none."""
Score = Callable[..., Any] | tuple[Callable[..., Any], ...]
"""A scorer, of one of the forms that `scored` calls; higher is better. The scores of several are added."""
TRIES = 3
"""Calls for one score, at most."""


@dataclass(frozen=True)
class Sample:
    """What a score is of.

    Attributes:
        prompt: text of the prompt.
        completion: what the model wrote, without spaces around it.
        fields: of the row.
        where: name of the row, for messages.
        messages: of the prompt, where the row is a conversation.
        base_url: of the server that the scorer asks itself; "": it is given the completion.
        model: the name of the model there.
    """

    prompt: str
    completion: str
    fields: Mapping[str, Any]
    where: str
    messages: Sequence[Mapping[str, Any]] = ()
    base_url: str = ""
    model: str = ""


BASE_URL, MODEL, KEY = "OPENAI_BASE_URL", "TEZO_MODEL", "OPENAI_API_KEY"
"""Variables of the environment in a call of a scorer that asks a server itself: its address, a model, and a key."""
KEY_OF_SERVER = "VLLM_API_KEY"
"""Variable of the environment: the key of the server, where it has one."""
NAMED = ("base_url", "model")
"""Parameters of such a scorer beside the row."""


@contextmanager
def _asking(sample: Sample) -> Iterator[None]:
    """Sets the variables for calls on a sample, and puts them back."""
    if not sample.base_url:
        yield
        return
    key = os.environ.get(KEY_OF_SERVER) or os.environ.get(KEY) or "none"  # clients ask for one
    values = {BASE_URL: sample.base_url, MODEL: sample.model, KEY: key}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def takes_batch(function: Callable[..., Any]) -> bool:
    """Returns whether a function scores all completions of a batch at once, as reward functions of TRL do."""
    return "completions" in _names(function)


def _names(function: Callable[..., Any]) -> list[str]:
    """Returns the names of its parameters but for *args and **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


OF_OTHER_FORMS = ("prompt", "prompts", "completion")
"""Names that a function's only parameter cannot have: it would get what they do not say."""


def check_form(scorer: Score, name: str) -> None:
    """Raises a `RequestError` where a scorer called `name` cannot be called in one of the forms."""
    for function in scorer if isinstance(scorer, tuple) else (scorer,):
        names = [] if takes_batch(function) else _names(function)
        one = len(names) == 1
        if not takes_batch(function) and (
            (one and names[0] in OF_OTHER_FORMS) or not _takes(function, 1 if one else 3)
        ):
            raise RequestError(
                f"train.reward: {name} takes ({', '.join(names)}); write f(prompt, completion, row), f(sample) of one "
                "dictionary of these, or f(completions, **columns) of a whole batch."
            )


def check_asks(scorer: Score, name: str) -> None:
    """Raises a `RequestError` where a scorer called `name`, which asks a server itself, cannot be called with a row."""
    for function in scorer if isinstance(scorer, tuple) else (scorer,):
        names = _names(function)
        of_texts = any(each in ("completions", *OF_OTHER_FORMS) for each in names[:1])
        if of_texts or not _takes(function, 1, *(each for each in NAMED if each in names[1:])):
            raise RequestError(
                f"train.serve: {name} takes ({', '.join(names)}); write f(row), or f(row, base_url, model), which asks "
                "the model itself, or leave train.serve out."
            )


def _takes(function: Callable[..., Any], count: int, *names: str) -> bool:
    """Returns whether a function can be called with so many arguments, and others by their names."""
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def call_on(function: Callable[..., Any], sample: Sample) -> Callable[[], Any]:
    """Returns the call of a function of one sample.

    It gets (prompt, completion, fields), or a dictionary of them; one that asks a server itself a dictionary without a
    completion of the model's, and those of `NAMED` that it has.
    """
    if sample.base_url:
        given = {name: getattr(sample, name) for name in NAMED if name in _names(function)[1:]}
        return partial(function, {"prompt": sample.prompt, **sample.fields}, **given)
    if len(_names(function)) == 1:
        return partial(function, {**sample.fields, "prompt": sample.prompt, "completion": sample.completion})
    return partial(function, sample.prompt, sample.completion, dict(sample.fields))


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Returns the arguments of a function of a batch: prompts, completions, and every field of the rows as a list.

    Those of a conversation are messages, as TRL has them.
    """
    names = dict.fromkeys(name for sample in samples for name in sample.fields)
    found = {name: [sample.fields.get(name) for sample in samples] for name in names}
    prompts = [[dict(message) for message in s.messages] if s.messages else s.prompt for s in samples]
    answers = [[{"role": "assistant", "content": s.completion}] if s.messages else s.completion for s in samples]
    return found | {"prompts": prompts, "completions": answers}


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


def scored(scorer: Score, samples: Sequence[Sample]) -> list[Scored]:
    """Returns the score of each sample, by this process. A call that fails is made up to `TRIES` times.

    Samples that a scorer asks a server for are of one model.

    The values of several functions are parts of a score, by their names. Where one of them fails, the sum is not known,
    and the score is missing; where one returns None, its part is.

    What a function prints goes to standard error: a command's answer alone goes to standard output.
    """
    with redirect_stdout(sys.stderr), _asking(samples[0]):
        if isinstance(scorer, tuple):
            values = _together(function_names(scorer), [_values(function, samples) for function in scorer])
        else:
            values = _values(scorer, samples)
        return [value if isinstance(value, Scored) else score_of(value) for value in values]


def function_names(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Returns names of functions, all different."""
    found: list[str] = []
    for function in functions:
        inner = function.func if isinstance(function, partial) else function
        name = getattr(inner, "__name__", type(inner).__name__)
        count = sum(key == name or key.startswith(f"{name} ") for key in found)
        found.append(f"{name} {count + 1}" if count else name)
    return found


def _together(names: Sequence[str], found: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns a mapping of named parts for each sample, of the values that each function gives; or a failure."""
    together: list[Any] = []
    for values in zip(*found, strict=True):
        failed = next((value for value in values if isinstance(value, Scored)), None)
        parts: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            inside = value if isinstance(value, Mapping) else {"": value}
            parts |= {f"{name}.{part}" if part else name: value for part, value in inside.items()}
        together.append(parts if failed is None else failed)
    return together


def _values(function: Callable[..., Any], samples: Sequence[Sample]) -> list[Any]:
    """Returns what a function gives for each sample; a `Scored` where a call fails."""
    if takes_batch(function):
        given, parameters = columns(samples), _names(function)
        taken = {key: value for key, value in given.items() if key in parameters or _takes_any(function)}
        values = _tried(lambda: _listed(_done(function(**taken))))
        if isinstance(values, Scored):
            return [values] * len(samples)
        if not isinstance(values, Sequence) or len(values) != len(samples):
            return [missing(f"returned {shown(values)}, not a list of {len(samples)} scores")] * len(samples)
        return list(values)
    found = [_tried(call_on(function, sample)) for sample in samples]
    if not any(inspect.isawaitable(value) for value in found):
        return found
    try:
        return _run(_all(function, samples, found))
    finally:
        for value in found:
            if inspect.iscoroutine(value):  # which an interrupt has left
                value.close()


def _listed(values: Any) -> Any:
    """Returns the values of an array or tensor as a list; other values as they are."""
    return values.tolist() if hasattr(values, "tolist") else values


def _takes_any(function: Callable[..., Any]) -> bool:
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


async def _all(function: Callable[..., Any], samples: Sequence[Sample], begun: Sequence[Any]) -> list[Any]:
    async def one(sample: Sample, first: Any) -> Any:
        for attempt in range(TRIES):
            try:
                with _ending_copies():
                    value: Any = call_on(function, sample)() if attempt else first
                    return await value if inspect.isawaitable(value) else value
            except KeyboardInterrupt:
                raise
            except GeneratorExit as error:  # which this coroutine may be asked to end by
                return raised(error)
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # not by the scorer: the loop ends
                    raise
                failure = raised(error)
        return failure

    return list(await asyncio.gather(*(one(*pair) for pair in zip(samples, begun, strict=True))))


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, in a separate thread where this one has a loop, as a notebook has."""
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
    """Returns what a call returns, or a `Scored` that says how the last of its tries failed.

    Code that would end this process is at fault as any other is, and so are exceptions beside `Exception`, as of
    extensions in Rust.
    """
    for _ in range(TRIES):
        try:
            with _ending_copies():
                return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = raised(error)
    return failure
