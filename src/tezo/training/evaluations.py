"""The evaluations of a run: made once, logged, and told to its listeners.

What a run keeps of the model's answers to its test rows, before and after: counts for each label, and a few rows.

The steps log has the answers of both evaluations, so that a run that goes on still knows those before; answers.json has
what `compare` makes of them.
"""

import math
from collections.abc import Sequence
from typing import Any

from tezo.runs.environment import memory_for
from tezo.runs.folder import RunFolder
from tezo.runs.reader import OUTCOMES
from tezo.system.errors import NonFiniteModelError
from tezo.system.files import json_text
from tezo.tasks.evaluation import Metrics, evaluate, predict
from tezo.tasks.examples import Example
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.rewards import EVALUATION
from tezo.training.job import Job
from tezo.training.listeners import Listener


class Evaluations:
    """Evaluates the rows of a job.

    Args:
        job: what is evaluated.
        folder: gets the metrics.
        listeners: told of them after the folder has them.

    Attributes:
        known: (split, step) -> metrics of the evaluations so far, those in the log of a run that goes on among them.
        answers: (split, step) -> answers to the first rows, of evaluations of the test rows.
    """

    def __init__(self, job: Job, folder: RunFolder, listeners: Sequence[Listener]) -> None:
        self.job = job
        self.folder = folder
        self.listeners = listeners
        self.known: dict[tuple[str, int], Metrics] = {}
        self.answers: dict[tuple[str, int], Sequence[str]] = {}

    def loss(self, split: str, step: int) -> float | None:
        """The loss of an evaluation that was made; None: there was none."""
        metrics = self.known.get((split, step))
        return None if metrics is None else metrics["loss"]

    def of(self, split: str, step: int) -> Metrics:
        """Metrics of the "dev" or "test" rows after `step` steps."""
        encoded = self.job.test if split == "test" else self.job.dev
        longest = sorted(encoded, key=lambda row: row.length)[-self.job.config.train.eval_batch_size :]
        metrics = self.known.get((split, step))
        if metrics is None:
            with memory_for(f"the evaluation before step {step}", longest, "train.eval_batch_size"):
                metrics, answers = self._measured(encoded, written=split == "test")
                if step == 0 and not math.isfinite(metrics["loss"]):
                    dtype = self.job.model.dtype
                    raise NonFiniteModelError(f"the untuned model's loss of the {split} rows", metrics["loss"], dtype)
                if split == "test":
                    self.answers[split, step] = answers_to_keep(self.job, answers)
        self.known[split, step] = metrics
        self.folder.append_evaluation(split, step, metrics, self.answers.get((split, step), ()))
        for listener in self.listeners:
            listener.evaluated(split, step, metrics)
        return metrics

    def metrics(self, encoded: Sequence[Encoded], *, written: bool, step: int = EVALUATION) -> Metrics:
        """Metrics of the model on some rows.

        Args:
            encoded: the rows.
            written: whether answers are generated and measured, which takes a pass for each token.
            step: whose random numbers a reward samples with.
        """
        return self._measured(encoded, written=written, step=step)[0]

    def _measured(
        self, encoded: Sequence[Encoded], *, written: bool, step: int = EVALUATION
    ) -> tuple[Metrics, list[str]]:
        """(metrics, answers to the rows)."""
        job, form = self.job, self.job.format
        measures = form.measures if written else ()
        new = form.max_new_tokens or 0
        size = job.config.train.eval_batch_size
        return evaluate(
            job.model,
            job.objective,
            encoded,
            size,
            measures=measures,
            max_new_tokens=new,
            reward=job.reward,
            step=step,
        )


SAMPLES, SAMPLE_TOKENS = 2, 40
"""Rows of free text whose answers are kept, and the longest answer in tokens where no metric asks for a length."""
MOST_BYTES = 1 << 19
"""Bytes of the answers of one evaluation; of more rows the first are kept."""
MOST_CHARACTERS = 600
"""Characters of a text in answers.json; of a longer one its two ends."""
SHOWN_OF_OUTCOME = 2


def answers_to_keep(job: Job, answers: Sequence[str]) -> list[str]:
    """The answers of an evaluation of the test rows that are kept: those to its first rows.

    Args:
        job: with the model as it was evaluated.
        answers: what the evaluation gave, one for each row; empty where it has no answers.
    """
    if not job.test[0].example.options:
        return list(answers[:SAMPLES]) or _sampled(job)
    kept: list[str] = []
    room = MOST_BYTES
    for answer in answers:
        room -= len(json_text(answer).encode(errors="surrogatepass")) + 2
        if room < 0:
            break
        kept.append(answer)
    return kept


def _sampled(job: Job) -> list[str]:
    """Answers to the first rows of free text, of a model that one process can run."""
    if job.format.shape not in ("completion", "messages") or job.config.model.placement == "shards":
        return []
    rows = job.test[:SAMPLES]
    longest = max(len(row.sequences[0]) - row.answers[0] for row in rows)
    new = min(SAMPLE_TOKENS, job.loaded.max_length - longest)
    return predict(job.model, job.objective, rows, len(rows), new) if new > 0 else []


def compare(rows: Sequence[Encoded], before: Sequence[str], after: Sequence[str]) -> dict[str, Any] | None:
    """The content of answers.json; None where there are no answers from before and after, or no right ones to compare.

    "rows" is the number of rows that were answered, the first ones, and "of" that of all. "shown" has some of them,
    with their text, the right answer and both answers. Of rows with options "outcomes" counts them by `OUTCOMES`, and
    "shown" has the first of each. Where all rows have the same options, "labels" has for each label the number of rows
    whose right answer it is and, before and after, how often it was answered and how often that was right.

    Args:
        rows: the test rows.
        before: answers to the first of them before the first step.
        after: answers with the parameters that were kept.
    """
    examples = [row.example for row in rows[: min(len(before), len(after))]]
    right = [_right_answers(example) for example in examples]
    if not examples or not all(right):
        return None
    answered = list(zip(before, after, strict=False))
    found: dict[str, Any] = {"rows": len(examples), "of": len(rows)}
    if not examples[0].options:
        shown = [_shown(*row) for row in zip(examples, right, answered, strict=True)]
        return found | {"shown": shown[:SAMPLES]}
    outcomes = [OUTCOMES[was in r, now in r] for (was, now), r in zip(answered, right, strict=True)]
    places = [place for outcome in OUTCOMES.values() for place in _first(outcomes, outcome)]
    return found | {
        "outcomes": {outcome: outcomes.count(outcome) for outcome in OUTCOMES.values()},
        "labels": _labels(examples, before, after),
        "shown": [_shown(examples[i], right[i], answered[i]) | {"outcome": outcomes[i]} for i in places],
    }


def _right_answers(example: Example) -> list[str]:
    """The correct answers, or those of free text that the answer is compared with; empty if they are unknown."""
    if not example.options:
        return list(example.references) or [example.answer]
    indices = example.right or (() if example.label is None else (example.label,))
    return [example.name_of(index) for index in indices]


def _first(outcomes: Sequence[str], wanted: str) -> list[int]:
    return [place for place, outcome in enumerate(outcomes) if outcome == wanted][:SHOWN_OF_OUTCOME]


def _shown(example: Example, right: Sequence[str], answered: tuple[str, str]) -> dict[str, str]:
    texts = {"text": example.prompt, "right": " or ".join(right), "before": answered[0], "after": answered[1]}
    return {"row": example.where} | {key: _ends_of(text.strip()) for key, text in texts.items()}


def _ends_of(text: str) -> str:
    """The text, or both ends of one that is too long."""
    end = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:end]} \N{HORIZONTAL ELLIPSIS} {text[-end:]}"


def _labels(examples: Sequence[Example], before: Sequence[str], after: Sequence[str]) -> list[dict[str, Any]]:
    """Counts for each label; empty where rows have options of their own, or several correct ones."""
    first = examples[0]
    if any(example.options != first.options or len(example.right) > 1 for example in examples):
        return []
    right = [_right_answers(example)[0] for example in examples]
    return [
        {"label": name, "rows": right.count(name)}
        | {when: _counts(name, right, answers) for when, answers in (("before", before), ("after", after))}
        for name in (first.name_of(index) for index in range(len(first.options)))
    ]


def _counts(label: str, right: Sequence[str], answers: Sequence[str]) -> dict[str, int]:
    given = [right_one for right_one, answer in zip(right, answers, strict=False) if answer == label]
    return {"answered": len(given), "right": given.count(label)}
