"""An opened model put to rows: its metrics where they have answers, its own answers where they have none."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tezo.errors import RequestError
from tezo.files import write_file
from tezo.models.loading import LoadedModel
from tezo.progress.meter import ENCODING, current, tracked
from tezo.tasks import Row
from tezo.tasks.evaluation import Metrics, measure, predict
from tezo.tasks.rewards import Score
from tezo.tasks.setup import make_format, make_objective
from tezo.tasks.token_notices import token_notices
from tezo.training.configuration.recipe import REWARD, Config
from tezo.training.preparation.reward_setup import make_reward

STANDARD = "-"
"""In the place of a file's name: standard input or output."""

ANSWER = "prediction"
"""The field that a row gains in a file of answers."""

MAX_NEW_TOKENS = 64
"""Longest answer of free text in tokens, where neither the user nor the task says."""


def measure_rows(
    config: Config,
    loaded: LoadedModel,
    rows: Sequence[Row],
    *,
    shots: int = 0,
    calibrate: bool = False,
    score: Score | None = None,
) -> tuple[Metrics, list[str]]:
    """(metrics, notices for the user) of a model on rows with answers.

    Args:
        config: how rows are read, and how many make a batch.
        loaded: the model.
        rows: as they were read.
        shots: number of training rows shown before each question.
        calibrate: see `tezo.tasks.evaluation.option_scores`.
        score: scorer of completions that is an object. With it, or with train.reward, the reward is what is measured.
    """
    sizes = {"batch_size": config.train.eval_batch_size, "seed": config.train.seed}
    given = score is not None or config.train.reward is not None
    reward = make_reward(config, score) if given else None
    metrics, notices = measure(config.data, loaded, rows, **sizes, shots=shots, calibrate=calibrate, reward=reward)
    if not given and config.train.objective == REWARD:
        notices = [
            *notices,
            "the run maximised a reward, which --reward FILE.py:FUNCTION measures (in Python, reward=...).",
        ]
    return metrics, notices


def check_new_tokens(count: int | None) -> None:
    """An error where `count` is no length of an answer."""
    if count is not None and count < 1:
        raise RequestError(f"max_new_tokens is {count}; it must be at least 1.")


def answer_rows(
    config: Config, loaded: LoadedModel, rows: Sequence[Row], max_new_tokens: int | None = None
) -> tuple[list[str], list[str]]:
    """(an answer to each row, notices for the user); answers that rows may have are not looked at.

    Args:
        config: how rows are read, and how many make a batch.
        loaded: the model.
        rows: as they were read.
        max_new_tokens: longest answer of free text; None: the task's, or `MAX_NEW_TOKENS`.
    """
    check_new_tokens(max_new_tokens)
    form = make_format(config.data, loaded, rows)
    new = 0 if form.options else max_new_tokens or form.max_new_tokens or MAX_NEW_TOKENS
    objective = make_objective(config.data, loaded, form, new)
    with current().phase(ENCODING):
        encoded = [objective.encode(form.example(row, answered=False)) for row in tracked(rows)]
    answers = predict(loaded.model, objective, encoded, config.train.eval_batch_size, new)
    return answers, token_notices(objective, new)


def check_answer_file(output: Path) -> None:
    """An error where a file of answers cannot be written, is there already, or has the name of another format."""
    if str(output) == STANDARD:
        return
    if output.suffix.lower() not in ("", ".jsonl", ".json"):
        raise RequestError(f"output is {output}, but answers are written as JSONL; give a file that ends in .jsonl.")
    if output.exists():
        raise RequestError(f"output: {output} exists; give another --output, or delete it first.")
    above = next(folder for folder in output.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise RequestError(f"output: nothing can be written in {above}; give another --output.")


def check_no_answers(rows: Sequence[Row]) -> None:
    """An error where a row has a field of the name that its answer gets in a file."""
    for row in rows:
        if ANSWER in row.fields:
            raise RequestError(f"{row.where}: there is a field {ANSWER!r} already; rename it, or take it out.")


def write_answers(output: Path, rows: Sequence[Row], answers: Sequence[str]) -> None:
    """Writes JSONL: each row with its answer, in order; a file whole or not at all.

    Raises:
        RunError: it cannot be written.
    """
    pairs = zip(rows, answers, strict=True)
    lines = (json.dumps({**row.fields, ANSWER: answer}, ensure_ascii=False, default=str) for row, answer in pairs)
    text = "".join(line + "\n" for line in lines)
    if str(output) == STANDARD:
        sys.stdout.write(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, text.encode())
