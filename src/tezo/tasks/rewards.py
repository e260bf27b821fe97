"""Rewards: any function that scores a completion, as what a run maximises."""

import hashlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tezo.system.errors import RequestError
from tezo.tasks.examples import Example, Row
from tezo.tasks.generation import Sampling, completions
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.rows import Format

Score = Callable[[str, str, dict[str, Any]], float]
"""(prompt, completion, fields of the row) -> score; higher is better."""

EVALUATION = -1
"""The step whose random numbers evaluations sample with, always the same."""


@dataclass(frozen=True)
class Reward:
    """The mean score of the completions that a model writes.

    Attributes:
        score: the scorer, and its name for messages.
        digest: of the file that the scorer is in, or of its name where it is an object.
        max_new_tokens: maximum length of a completion in tokens.
        temperature: of sampling with `seed`; 0: greedy.
    """

    score: Score
    name: str
    digest: str
    max_new_tokens: int
    temperature: float
    seed: int

    def measure(
        self, model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, step: int = EVALUATION
    ) -> tuple[float, list[str]]:
        """Returns (mean score over examples made by `prompt_of`, the completion of each that was scored).

        A causal model writes each completion by a forward pass for each token, sampled with the random numbers of
        `step`.

        Raises:
            RequestError: the scorer raised an error, or returned something other than a finite number.
        """
        sampling = Sampling(self.temperature, self.seed, step) if self.temperature else None
        written = completions(model, objective, encoded, batch_size, self.max_new_tokens, sampling)
        texts = [text.strip() for text in written]
        scores = [self._scored(e.example, text) for e, text in zip(encoded, texts, strict=True)]
        return sum(scores) / len(scores), texts

    def _scored(self, example: Example, text: str) -> float:
        try:
            value = float(self.score(example.prompt, text, dict(example.fields)))
        except Exception as error:
            raise RequestError(
                f"train.reward: {self.name} raised {type(error).__name__} ({error}) for {example.where}; correct it."
            ) from error
        if not math.isfinite(value):
            raise RequestError(f"train.reward: {self.name} returned {value} for {example.where}; return finite scores.")
        return value


def prompt_of(form: Format, row: Row) -> Example:
    """Returns the example of a row whose completion is scored, without its answer; `RequestError` unless free text."""
    example = form.example(row, answered=False)
    if example.options:
        raise RequestError(
            f"train.reward scores free text, and {row.where} has options to choose among; give rows with a prompt, or "
            "leave it out."
        )
    return replace(example, fields=row.fields)


def load_score(text: str) -> tuple[Score, str]:
    """Returns (the function that FILE.py:FUNCTION names, digest of the file). The file's code runs.

    Raises:
        RequestError: there is no such file or function, or the file cannot be run.
    """
    file, colon, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not colon or not name.isidentifier() or not path.is_file():
        raise RequestError(f"train.reward: {text} is not FILE.py:FUNCTION of a file that exists; check the path.")
    spec = importlib.util.spec_from_file_location(f"tezo_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RequestError(f"train.reward: {path} is not a Python file; give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RequestError(f"train.reward: {path} cannot be run ({type(error).__name__}: {error}).") from error
    score = getattr(module, name, None)
    if not callable(score):
        raise RequestError(f"train.reward: {path} has no function {name!r}; define it there.")
    return score, hashlib.sha256(path.read_bytes()).hexdigest()


def name_of(score: Score) -> str:
    """Returns the qualified name of a scorer that is an object."""
    named = score if hasattr(score, "__qualname__") else type(score)
    return f"{named.__module__}.{named.__qualname__}"
