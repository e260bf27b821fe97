"""Scorers as a user gives them: a function of a Python file, or an object."""

import importlib.util
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tezo.system.errors import RequestError
from tezo.tasks.scorer_identity import Identity, identity_of, identity_of_file
from tezo.tasks.scores import raised, shown
from tezo.tasks.scoring import Score, function_names


def load_score(text: str) -> tuple[Score, Identity]:
    """Returns (the function that FILE.py:FUNCTION names, its identity). The file's code runs.

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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RequestError(f"train.reward: {path} cannot be run (it {raised(error).failure}); mend it.") from error
    score = getattr(module, name, None)
    if not callable(score):
        raise RequestError(f"train.reward: {path} has no function {name!r}; define it there.")
    return score, identity_of_file(path, name)


def as_scorer(given: Any) -> Score | str | None:
    """Returns what a caller gave as a reward: a function, a tuple of several, FILE.py:FUNCTION, or None.

    Raises:
        RequestError: it is something else.
    """
    if given is None or isinstance(given, str) or callable(given):
        scorer: Score | str | None = given
        return scorer
    ways = "give a function, a list of functions, whose scores are added, or FILE.py:FUNCTION"
    if not isinstance(given, list | tuple) or not given:
        raise RequestError(f"reward is {shown(given)}; {ways}.")
    for one in given:
        if not callable(one):
            raise RequestError(f"reward has {shown(one)} in a list; {ways}.")
    return tuple(given) if len(given) > 1 else as_scorer(given[0])


def name_of(score: Score) -> str:
    """Returns the qualified name of a scorer that is an object; of several their names."""
    if isinstance(score, tuple):
        return " + ".join(function_names(score))
    named = score if hasattr(score, "__qualname__") else type(score)
    return f"{named.__module__}.{named.__qualname__}"


def identity(scorer: Score | str) -> Identity:
    """Returns the identity of a scorer that is an object, or of the one that FILE.py:FUNCTION names."""
    return load_score(scorer)[1] if isinstance(scorer, str) else identity_of(scorer)
