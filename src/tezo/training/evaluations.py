"""The evaluations of a run: made once, logged, told to its listeners; and what is kept of the answers to test rows.

The steps log has the answers of the evaluations before and after, so that a run that goes on still knows those before;
answers.json has what `compare` makes of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from tezo.optim.optimizer import PER_EXAMPLE
from tezo.runs.environment import memory_for
from tezo.runs.folder import RunFolder
from tezo.runs.reader import OUTCOMES
from tezo.system.errors import NonFiniteModelError, RequestError, nearest
from tezo.system.files import json_text
from tezo.tasks.calibration import calibration_error, fitted_temperature
from tezo.tasks.evaluated import Evaluated
from tezo.tasks.evaluation import (
    CALIBRATION_ERROR,
    Metrics,
    checked_scores,
    evaluate,
    evaluated_by,
    predict,
    reliability_of,
)
from tezo.tasks.examples import Example
from tezo.tasks.objectives.objective import Encoded
from tezo.tasks.paired import chance, kept_losses
from tezo.tasks.rewards import EVALUATION, Reward, answered
from tezo.tasks.untuned import BIAS, MOST_ROWS, PROBE, untuned
from tezo.training.job import Job
from tezo.training.listeners import Listener
from tezo.training.settings import LOSS

UNTUNED_ANSWERS, UNTUNED_ROWS = "own answers", 32
"""Split of the untuned model's answers to test prompts, and how many there are."""
SAMPLES, SAMPLE_TOKENS = 2, 40
"""Rows of free text whose answers are kept, and the longest answer in tokens where no metric asks for a length."""
MOST_BYTES = 1 << 19
"""Bytes of the answers of one evaluation; of more rows the first are kept."""
MOST_CHARACTERS = 600
"""Characters of a text in answers.json; of a longer one its two ends."""
SHOWN_OF_OUTCOME = 2


@dataclass(frozen=True)
class InCommon:
    """Two evaluations by a reward, on the rows that have a score in both.

    Attributes:
        rows: number of these rows.
        of: number of all rows.
        before: mean loss of these rows in the first evaluation, NaN where there are none.
        after: the same in the second.
    """

    rows: int
    of: int
    before: float
    after: float

    @property
    def rise(self) -> float:
        """By how much the second loss is higher."""
        return self.after - self.before


class Evaluations:
    """The evaluations of the rows of a job; listeners are told of them after the folder has them.

    Attributes:
        known: (split, step) -> metrics of the evaluations so far, those in the log of a run that goes on among them.
        answers: (split, step) -> answers to the first rows, of evaluations of the test rows and of those by a reward.
        row_losses: (split, step) -> losses of the first rows, see `Evaluated.row_losses`.
        earlier: (split, step) of evaluations by an earlier scorer, which gave other scores than the present one.
    """

    def __init__(self, job: Job, folder: RunFolder, listeners: Sequence[Listener]) -> None:
        self.job = job
        self.folder = folder
        self.listeners = listeners
        self.known: dict[tuple[str, int], Metrics] = {}
        self.answers: dict[tuple[str, int], Sequence[str]] = {}
        self.row_losses: dict[tuple[str, int], Sequence[float]] = {}
        self.earlier: frozenset[tuple[str, int]] = frozenset()
        self._scores: dict[int, Sequence[Tensor]] = {}  # of the options of the test rows, measured last

    def loss(self, split: str, step: int) -> float | None:
        """Returns the loss of an evaluation that was made; None if there was none."""
        metrics = self.known.get((split, step))
        return None if metrics is None else metrics["loss"]

    def of(self, split: str, step: int) -> Metrics:
        """Returns metrics of the "dev" or "test" rows after `step` steps."""
        metrics = self.known.get((split, step))
        if metrics is None:
            encoded = self.job.test if split == "test" else self.job.dev
            longest = sorted(encoded, key=lambda row: row.length)[-self.job.config.train.eval_batch_size :]
            memory = memory_for(f"the evaluation before step {step}", longest, "train.eval_batch_size")
            with memory, self.job.loaded.files.unchanged():
                metrics, answers, row_losses, scores = self._of_rows(split, encoded)
                if step == 0 and not math.isfinite(metrics["loss"]):
                    dtype = self.job.model.dtype
                    raise NonFiniteModelError(f"the untuned model's loss of the {split} rows", metrics["loss"], dtype)
                self.row_losses[split, step] = kept_losses(row_losses)
                if split == "test" or self.job.reward is not None:
                    self.answers[split, step] = answers_to_keep(self.job, answers)
                if split == "test":
                    self._scores = {step: scores}
        self._tell(split, step, metrics)
        return metrics

    def chance(self, split: str, step: int, *, chosen: bool) -> dict[str, Any] | None:
        """Returns whether the loss of the rows of `split` fell by more than their noise, as JSON.

        "rows" is the number of rows that are compared, "states" that of the states, and "p" what `chance` of
        `tezo.tasks.paired` returns. None: the losses of the rows are not known.

        Args:
            split: "dev" or "test".
            step: number of steps that the kept state has taken.
            chosen: whether these rows chose it among all states that were evaluated.
        """
        first = self.row_losses.get(self._key(split, 0))
        states = {after: losses for (name, after), losses in self.row_losses.items() if name == split and after > 0}
        if step == 0 and first is not None:
            return {"rows": len(first), "states": len(states), "p": 1.0}
        if first is None or step not in states:
            return None
        compared = states if chosen else {step: states[step]}
        p = chance(first, [*compared.values()], [*compared].index(step))
        return {"rows": len(first), "states": len(compared), "p": p}

    def in_common(self, split: str, before: int, after: int) -> InCommon | None:
        """Compares the evaluations of "dev" or "test" rows after two numbers of steps; None: no score is missing."""
        first, second = (self.row_losses.get(self._key(split, step), ()) for step in (before, after))
        if not any(map(math.isnan, (*first, *second))):
            return None
        pairs = [pair for pair in zip(first, second, strict=True) if not any(map(math.isnan, pair))]
        means = [math.fsum(losses) / len(pairs) for losses in zip(*pairs, strict=True)] if pairs else [math.nan] * 2
        return InCommon(len(pairs), len(first), *means)

    def by_one_scorer(self, split: str, before: int, after: int) -> bool:
        """Returns whether two evaluations of "dev" or "test" rows are by one scorer, so that they can be compared."""
        first, last = (self._key(split, step) in self.earlier for step in (before, after))
        return first == last

    def _key(self, split: str, step: int) -> tuple[str, int]:
        """Returns the key of an evaluation: dev rows that are the test rows are measured once before the first step."""
        return ("test" if step == 0 and self.job.dev is self.job.test else split), step

    def _of_rows(self, split: str, encoded: Sequence[Encoded]) -> Evaluated:
        held_out = self.job.held_out
        if split != "dev" or held_out is None:
            return self._measured(encoded, written=split == "test")
        return evaluated_by(held_out.evaluated(), encoded, shared=bool(self.job.objective.options))

    def _tell(self, split: str, step: int, metrics: Metrics) -> None:
        self.known[split, step] = metrics
        key = split, step
        self.folder.append_evaluation(split, step, metrics, self.answers.get(key, ()), self.row_losses.get(key, ()))
        for listener in self.listeners:
            listener.evaluated(split, step, metrics)

    def untuned(self, steps: int) -> dict[str, Metrics]:
        """Returns name -> metrics of the test rows, by what is fitted to the untuned model; see `tezo.tasks.untuned`.

        Empty where there is no such thing to compare with, or nobody has measured it before the `steps` taken.
        """
        if (PROBE, 0) not in self.known and steps == 0 and compares_with_untuned(self.job):
            job, batch_size = self.job, self.job.config.train.eval_batch_size
            longest = sorted([*job.train[:MOST_ROWS], *job.test], key=lambda row: row.length)[-batch_size:]
            memory = memory_for("the evaluation of the untuned model", longest, "train.eval_batch_size")
            with memory, job.loaded.files.unchanged(), suppress(RequestError):  # of a head that cannot be read
                found = untuned(job.model, job.objective, job.train[:MOST_ROWS], job.test, batch_size)
                self.known |= {(name, 0): metrics for name, metrics in found.items()}
        known = {name: self.known[name, 0] for name in (BIAS, PROBE) if (name, 0) in self.known}
        for name, metrics in known.items():
            self._tell(name, 0, metrics)
        return known

    def calibration(self, steps: int) -> dict[str, Any] | None:
        """Returns how far the probabilities of the model at hand can be trusted, as JSON; None: rows have no options.

        "temperature" is fitted to the dev rows, "dev_rows" in number; None where there are none, or they determine
        none. "after" is the expected calibration error of the test rows without it and "calibrated" with it, "before"
        that of the untuned model, and "bins" has the test rows by their probability, with it where there is one.
        "same_rows" says that there are no test rows but the dev rows.
        """
        job = self.job
        if not job.test[0].example.options or job.reward is not None:
            return None
        scores = self._scores.get(steps) or self._scores_of(job.test)
        same, temperature = job.dev is job.test, None
        if job.dev:
            of_dev = scores if same else self._scores_of(job.dev)
            labels = [e.example.label for e in job.dev]
            temperature = fitted_temperature(of_dev, [label for label in labels if label is not None])
        bins = reliability_of(scores, job.test, temperature or 1.0)
        return {
            "temperature": temperature,
            "dev_rows": len(job.dev),
            "same_rows": same,
            "before": self.known["test", 0].get(CALIBRATION_ERROR),
            "after": calibration_error(reliability_of(scores, job.test)),
            "calibrated": None if temperature is None else calibration_error(bins),
            "bins": [asdict(each) for each in bins],
        }

    def _scores_of(self, encoded: Sequence[Encoded]) -> Sequence[Tensor]:
        job, size = self.job, self.job.config.train.eval_batch_size
        longest = sorted(encoded, key=lambda row: row.length)[-size:]
        with memory_for("the calibration", longest, "train.eval_batch_size"), job.loaded.files.unchanged():
            return checked_scores(job.model, job.objective, encoded, size)

    def of_own_answers(self, step: int) -> float | None:
        """Returns the loss, per token, of what the untuned model wrote to the first test prompts; None: no reward.

        It is an estimate of the cross-entropy of the untuned model's text under the model at hand, so that its rise is
        one of the divergence between the two: how far the model has moved from what it said, wanted or not. The log
        has its tokens, as numbers in the place of a text.
        """
        job = self.job
        if job.reward is None or job.config.model.placement == "shards":
            return None
        if (UNTUNED_ANSWERS, step) not in self.known:
            with job.loaded.files.unchanged():
                loss = self._of_own_answers(job.reward, step)
            if loss is None:
                return None
            self.known[UNTUNED_ANSWERS, step] = loss
        self._tell(UNTUNED_ANSWERS, step, self.known[UNTUNED_ANSWERS, step])
        return self.known[UNTUNED_ANSWERS, step]["loss"]

    def _of_own_answers(self, reward: Reward, step: int) -> Metrics | None:
        job, size = self.job, self.job.config.train.eval_batch_size
        if step == 0:
            tokens = reward.own_answers(job.model, job.objective, job.test[:UNTUNED_ROWS], size)
            self.answers[UNTUNED_ANSWERS, 0] = [" ".join(map(str, answer)) for answer in tokens]
        known = self.answers.get((UNTUNED_ANSWERS, 0), ())
        if not known or not set("".join(known)) <= set(" 0123456789"):  # texts, of an earlier version
            return None
        rows = answered(job.test, [[int(token) for token in answer.split()] for answer in known])
        return evaluate(job.model, job.objective, rows, size).metrics

    def metrics(self, encoded: Sequence[Encoded], *, written: bool, step: int = EVALUATION) -> Metrics:
        """Returns metrics of the model on some rows.

        Args:
            encoded: the rows.
            written: whether answers are generated and measured, which takes a pass for each token.
            step: whose random numbers a reward samples with.
        """
        return self._measured(encoded, written=written, step=step).metrics

    def _measured(self, encoded: Sequence[Encoded], *, written: bool, step: int = EVALUATION) -> Evaluated:
        return evaluate(
            self.job.model,
            self.job.objective,
            encoded,
            self.job.config.train.eval_batch_size,
            measures=self.job.format.measures if written else (),
            max_new_tokens=self.job.format.max_new_tokens or 0,
            reward=self.job.reward,
            step=step,
        )


def check_objective(job: Job, measured: Callable[[], Metrics]) -> None:
    """Raises an error where the objective is not a metric of these rows, or has no gradient and needs one.

    `measured` gives metrics of some of them.
    """
    name = job.config.train.objective
    if name == LOSS:
        return
    if job.optimizer.by_gradients:
        raise RequestError(f"train.objective is {name}, which has no gradient; use a zeroth-order method.")
    if job.config.method.options.get("directions") == PER_EXAMPLE:
        raise RequestError(
            f"method.directions is {PER_EXAMPLE}, and train.objective is {name}, which is measured on whole batches; "
            "set method.directions=shared."
        )
    known = measured()
    if name == CALIBRATION_ERROR:
        raise RequestError(f"train.objective is {name}, which is better when it is lower; give loss, which lowers it.")
    if name not in known:
        raise RequestError(f"train.objective: there is no metric {name!r} of these rows. " + nearest(name, known))


def compares_with_untuned(job: Job) -> bool:
    """Returns whether the untuned model is compared with: the rows have labels in common, and one process the model."""
    return bool(job.objective.options) and job.reward is None and job.config.model.placement != "shards"


def answers_to_keep(job: Job, answers: Sequence[str]) -> list[str]:
    """Returns those answers of an evaluation that are kept: those to its first rows.

    Of a reward all are kept for which there is room, since a changed scorer may be tried on them. Of other free text,
    where the evaluation gave none, they are generated by the model as it was evaluated.
    """
    if job.test[0].example.options or job.reward is not None:
        kept: list[str] = []
        room = MOST_BYTES
        for answer in answers:
            room -= len(json_text(answer).encode(errors="surrogatepass")) + 2
            if room < 0:
                break
            kept.append(answer)
        return kept
    # a model in shards is not one that one process can run
    if answers or job.format.shape not in ("completion", "messages") or job.config.model.placement == "shards":
        return list(answers[:SAMPLES])
    rows = job.test[:SAMPLES]
    longest = max(len(row.sequences[0]) - row.answers[0] for row in rows)
    new = min(SAMPLE_TOKENS, job.loaded.max_length - longest)
    return predict(job.model, job.objective, rows, len(rows), new) if new > 0 else []


def compare(rows: Sequence[Encoded], before: Sequence[str], after: Sequence[str]) -> dict[str, Any] | None:
    """Returns the content of answers.json; None without answers from before and after, or right ones to compare.

    "rows" is the number of rows that were answered, the first ones, and "of" that of all. "shown" has some of them,
    with their text, the right answer and both answers. Of rows with options "outcomes" counts them by `OUTCOMES`, and
    "shown" has the first of each. Where all rows have the same options, "labels" has for each label the number of rows
    whose right answer it is and, before and after, how often it was answered and how often that was right, and
    "confusion" has triples: the numbers of a label and of an answer in that list, and how often it was answered after.

    Args:
        rows: the test rows; both sequences of answers are to the first of them.
        before: answers before the first step.
        after: answers with the parameters that were kept.
    """
    examples = [row.example for row in rows[: min(len(before), len(after))]]
    right = [_right_answers(example) for example in examples]
    if not examples or not all(right):
        return None

    def shown(i: int) -> dict[str, str]:
        texts = {"text": examples[i].prompt, "right": " or ".join(right[i]), "before": before[i], "after": after[i]}
        return {"row": examples[i].where} | {key: _ends_of(text.strip()) for key, text in texts.items()}

    found: dict[str, Any] = {"rows": len(examples), "of": len(rows)}
    if not examples[0].options:
        return found | {"shown": [shown(i) for i in range(min(SAMPLES, len(examples)))]}
    places: dict[str, list[int]] = {outcome: [] for outcome in OUTCOMES.values()}
    for i, answers in enumerate(right):
        places[OUTCOMES[before[i] in answers, after[i] in answers]].append(i)
    first_right = [answers[0] for answers in right]
    labels = _labels(examples, first_right, {"before": before, "after": after})
    answered = Counter(zip(first_right, after, strict=False))
    names = [label["label"] for label in labels]
    return found | {
        "outcomes": {outcome: len(of) for outcome, of in places.items()},
        "labels": labels,
        "confusion": [
            [i, j, count]
            for i, label in enumerate(names)
            for j, answer in enumerate(names)
            if (count := answered[label, answer])
        ],
        "shown": [shown(i) | {"outcome": name} for name, of in places.items() for i in of[:SHOWN_OF_OUTCOME]],
    }


def _right_answers(example: Example) -> list[str]:
    """Returns the correct answers, or those of free text to compare the answer with; empty if they are unknown."""
    if not example.options:
        return list(example.references) or [example.answer]
    indices = example.right or (() if example.label is None else (example.label,))
    return [example.name_of(index) for index in indices]


def _ends_of(text: str) -> str:
    end = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:end]} \N{HORIZONTAL ELLIPSIS} {text[-end:]}"


def _labels(examples: Sequence[Example], right: Sequence[str], given: dict[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Returns counts for each label; empty where rows have per-row options, or several correct ones."""
    first = examples[0]
    if any(example.options != first.options or len(example.right) > 1 for example in examples):
        return []
    found = []
    for name in (first.name_of(index) for index in range(len(first.options))):
        entry: dict[str, Any] = {"label": name, "rows": right.count(name)}
        for when, answers in given.items():
            of = [label for label, answer in zip(right, answers, strict=False) if answer == name]
            entry[when] = {"answered": len(of), "right": of.count(name)}
        found.append(entry)
    return found
