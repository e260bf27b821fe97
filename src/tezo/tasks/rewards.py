"""Rewards: any function that scores a completion, as what a run maximises."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any, ClassVar

import torch
from torch import Tensor

from tezo.directions.products import float32_on_emulating_cpu
from tezo.optim.closures import Answers, RowAnswers, RowLosses
from tezo.system.errors import RequestError
from tezo.tasks.evaluated import Evaluated
from tezo.tasks.examples import Example, Row
from tezo.tasks.generation import LEARNT, Sampling, Turn, continuations, texts_of
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.rows import Format
from tezo.tasks.scorer_identity import Identity
from tezo.tasks.scores import Scored
from tezo.tasks.scoring import MISSING_SCORES, REWARD, Sample, Score, check_form, scored, takes_batch
from tezo.tasks.scoring_processes import Processes

MOST_WRITING = 128
"""Completions that are written side by side in torch, at most: those of several models to the same prompts."""

FAILED = "failed"
"""The key of an answer whose scorer failed, and ended the run: the reason."""
MISSING, LACKING = "missing", "lacking"
GAPS = {
    MISSING: "scores are missing, and left out of the means",
    LACKING: "parts of scores are missing, and left out of the sums",
}
"""Kind of what is missing -> in words."""

LEARNT_AT_ONCE = 32
"""Answers of a pass that is learnt from, at most."""

EVALUATION = -1
"""The step whose random numbers evaluations sample with, always the same."""


class ScorerError(RequestError):
    """A scorer gave no score for any of several answers, which ends a run.

    Attributes:
        lines: JSON for each answer, with `FAILED`, the reason.
    """

    def __init__(self, message: str, lines: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message)
        self.lines = lines


@dataclass(frozen=True)
class Reward:
    """The mean score of the completions that a model writes.

    Attributes:
        score: the scorer, and its name for messages.
        identity: of the scorer, as it is before the first call.
        in_file: whether the scorer is a function of a file, which calls do not change.
        max_new_tokens: maximum length of a completion in tokens.
        temperature: of sampling with `seed`; 0: greedy.
        processes: where it is called; None: in this process.
        gaps: what is missing of scores: a sentence for each kind, of the first that was so; see `GAPS`.
    """

    score: Score
    name: str
    identity: Identity
    max_new_tokens: int
    temperature: float
    seed: int
    processes: Processes | None = None
    in_file: bool = False
    gaps: dict[str, str] = field(default_factory=dict)

    scores_texts: ClassVar[bool] = True
    """Whether the scorer is given what the model writes, so that the log has all that a score is of."""

    def __post_init__(self) -> None:
        check_form(self.score, self.name)

    def close(self) -> None:
        """Ends what was started for the scorer."""
        if self.processes is not None:
            self.processes.close()

    @property
    def notice(self) -> str:
        """What an evaluation takes, for the user."""
        return (
            f"train.reward: an evaluation of {self.name} writes up to {self.max_new_tokens} tokens for each row, each "
            "by a forward pass; num_forward_passes counts the evaluation as one."
        )

    @property
    def way_on(self) -> str:
        """How a run goes on whose scorer failed and was mended."""
        return f"--resume --reward {quote(self.name)}" if self.in_file else "reward=... and resume=True"

    def most_copies(self, objective: Objective, rows: int) -> int:
        """Returns the number of models that are scored on so many rows side by side, at most."""
        of_engine = objective.evaluator.most_copies
        return max(1, MOST_WRITING // rows) if of_engine is None else of_engine

    def measure(
        self, model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, step: int = EVALUATION
    ) -> Evaluated:
        """Returns metrics of examples made by `prompt_of`, the completion of each that was scored, and minus its score.

        A causal model writes each completion by a forward pass for each token, sampled with the random numbers of
        `step`. Metrics are "reward", the mean score, "loss", minus that, and, where scores are missing and so left out
        of the mean, "missing_scores", their share.

        Raises:
            RequestError: all scores are missing.
        """
        ((texts, scores),) = self.scored(model, objective, encoded, batch_size, step, 1)
        known = [one.value for one in scores if one.failure is None]
        mean, missing = sum(known) / len(known), 1 - len(known) / len(scores)
        metrics = {"loss": -mean, REWARD: mean} | ({MISSING_SCORES: missing} if missing else {})
        return Evaluated(metrics, texts if self.scores_texts else [], [-one.value for one in scores])

    def sampling(self, step: int) -> Sampling | None:
        """Returns how completions are sampled at a step; None: they are greedy."""
        return Sampling(self.temperature, self.seed, step) if self.temperature else None

    @torch.no_grad()
    def own_answers(
        self, model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int
    ) -> list[list[int]]:
        """Returns the tokens that a model writes to each prompt in an evaluation."""
        with objective.evaluator.sharing(model), float32_on_emulating_cpu(model):
            sampling = self.sampling(EVALUATION)
            (tokens,) = continuations(model, objective, encoded, batch_size, self.max_new_tokens, sampling, 1)
        return tokens

    def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        """Returns the score of each sample, missing ones among them, where the scorer is called."""
        if self.processes is None:
            return scored(self.score, samples)
        assert not isinstance(self.score, tuple)  # objects have no processes
        return self.processes.scored(samples, batch=takes_batch(self.score))

    def scored(
        self, model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, step: int, copies: int
    ) -> list[tuple[list[str], list[Scored]]]:
        """Returns (completions, their scores) of each of `copies` models, which hooks may perturb differently.

        Raises:
            RequestError: as `measure`.
        """
        sampling, longest = self.sampling(step), self.max_new_tokens
        every = continuations(model, objective, encoded, batch_size, longest, sampling, copies)
        samples = [
            sample_of(e, text.strip())
            for written in every
            for e, text in zip(encoded, texts_of(objective, encoded, written), strict=True)
        ]
        return self._of_models(samples, self.scores(samples), len(encoded))

    def sampled(
        self, model: Any, objective: Objective, encoded: Sequence[Encoded], step: int, first: int
    ) -> tuple[list[list[Turn]], list[str], list[Scored]]:
        """Returns (turns, texts, scores) of a completion of each prompt, sampled at `LEARNT`.

        `first`: number of the first of these prompts, by which random numbers differ.

        Scores that are missing are, even if it is all of them.
        """
        sampling = Sampling(LEARNT, self.seed, step, first)
        (tokens,) = continuations(model, objective, encoded, MOST_WRITING, self.max_new_tokens, sampling, 1)
        texts = texts_of(objective, encoded, tokens)
        samples = [sample_of(e, text.strip()) for e, text in zip(encoded, texts, strict=True)]
        scores = self.scores(samples)
        turns: list[list[Turn]] = [[(e.prompt, written)] for e, written in zip(encoded, tokens, strict=True)]
        return turns, [s.completion for s in samples], scores

    def _of_models(
        self, samples: Sequence[Sample], found: Sequence[Scored], size: int
    ) -> list[tuple[list[str], list[Scored]]]:
        """Returns (completions, scores) of each model, of all samples, `size` of a model; notes what is missing."""
        self.check_some(samples, found)
        return [
            ([s.completion for s in samples[i : i + size]], [*found[i : i + size]]) for i in range(0, len(found), size)
        ]

    def check_some(self, samples: Sequence[Sample], found: Sequence[Scored]) -> None:
        """Notes scores that are missing.

        Raises:
            ScorerError: all are.
        """
        failures = [(one.failure, s.where) for one, s in zip(found, samples, strict=True) if one.failure is not None]
        if len(failures) == len(found):
            why, where = failures[0]
            lines = [
                {"row": s.where, "completion": s.completion, "score": None, FAILED: one.failure}
                for one, s in zip(found, samples, strict=True)
            ]
            raise ScorerError(
                f"train.reward: {self.name} gave none of {len(found)} scores; for {where} it {why}. Mend it; a run "
                f"that has begun goes on with {self.way_on}.",
                lines,
            )
        if failures:
            self.gaps.setdefault(MISSING, f"{self.name} {failures[0][0]} for {failures[0][1]}")
        lacks = [(", ".join(one.lacks), s.where) for one, s in zip(found, samples, strict=True) if one.lacks]
        if lacks:
            self.gaps.setdefault(LACKING, f"{self.name} gave no {lacks[0][0]} for {lacks[0][1]}")


def sample_of(encoded: Encoded, completion: str) -> Sample:
    """Returns a completion of the prompt of an example of `prompt_of`, to be scored."""
    example = encoded.example
    return Sample(example.prompt, completion, dict(example.fields), example.where, example.messages)


class RewardRows(RowLosses, RowAnswers):
    """Minus the mean score of what the model writes to some prompts, as what a step minimises.

    Args:
        reward: scores it.
        model: writes.
        objective: of the model.
        encoded: the prompts, by `prompt_of`.
        step: whose random numbers it samples with.

    Attributes:
        written: (completions, scores) of each model that was evaluated so far, in order.
    """

    def __init__(self, reward: Reward, model: Any, objective: Objective, encoded: Sequence[Encoded], step: int) -> None:
        self._reward, self._model, self._objective, self._encoded, self._step = reward, model, objective, encoded, step
        self.written: list[tuple[list[str], list[Scored]]] = []

    @property
    def prompts(self) -> int:
        return len(self._encoded)

    @torch.no_grad()
    def write(self, prompts: Sequence[int], count: int) -> Answers:
        model, objective = self._model, self._objective
        asked = [self._encoded[i] for i in prompts for _ in range(count)]
        with objective.evaluator.sharing(model), float32_on_emulating_cpu(model):
            turns, texts, scores = self._reward.sampled(model, objective, asked, self._step, prompts[0] * count)
        self.written = self.written or [([], []) for _ in range(count)]
        for turn, (of_turn, their_scores) in enumerate(self.written):
            of_turn += texts[turn::count]
            their_scores += scores[turn::count]
        answer_X = [i for i, of_answer in enumerate(turns) for _, tokens in of_answer if tokens]
        every = [turn for of_answer in turns for turn in of_answer if turn[1]]
        texts_X = [
            replace(asked[i], sequences=((*prompt, *tokens),), answers=(len(tokens),))
            for i, (prompt, tokens) in zip(answer_X, every, strict=True)
        ]
        shown = objective.shown()
        rows = shown.closure(model, shown.batches(texts_X, LEARNT_AT_ONCE)) if texts_X else None
        prompt_E = torch.tensor([i for i in prompts for _ in range(count)])
        return Answers(rows, torch.tensor(answer_X, dtype=torch.int64), prompt_E, _values(scores))

    def written_loss(self) -> float:
        samples = [
            sample_of(e, text) for texts, _ in self.written for e, text in zip(self._encoded, texts, strict=False)
        ]
        every = [one for _, scores in self.written for one in scores]
        if not every:
            raise RequestError("the model has written no answers for this closure; give each step a new one.")
        self._reward.check_some(samples, every)
        return -float(_values(every).nanmean())

    @property
    def are_alike(self) -> bool:
        if not self.written:
            return False
        scores_PN = torch.stack([_values(scores) for _, scores in self.written])
        lowest_N, highest_N = scores_PN.nan_to_num(math.inf).amin(0), scores_PN.nan_to_num(-math.inf).amax(0)
        return len(scores_PN) > 1 and not bool((highest_N > lowest_N).any())

    @property
    def tokens(self) -> int:
        return len(self._encoded)

    @property
    def examples(self) -> int:
        return len(self._encoded)

    @property
    def most_copies(self) -> int:
        return self._reward.most_copies(self._objective, len(self._encoded))

    @torch.no_grad()
    def example_losses(self, copies: int) -> Tensor:
        with self._objective.evaluator.sharing(self._model, copies), float32_on_emulating_cpu(self._model):
            found = self._reward.scored(self._model, self._objective, self._encoded, MOST_WRITING, self._step, copies)
        self.written += found
        return -torch.stack([_values(scores) for _, scores in found])

    def losses(self, copies: int) -> Tensor:
        return self.example_losses(copies).nanmean(1)

    @property
    def told(self) -> dict[str, Any]:
        """JSON: the mean of each named part of the scores; empty where they have none."""
        found: dict[str, list[float]] = {}
        for _, scores in self.written:
            for one in scores:
                for name, value in one.parts.items():
                    found.setdefault(name, []).append(value)
        return {"parts": {name: statistics.fmean(values) for name, values in found.items()}} if found else {}

    def lines(self) -> list[dict[str, Any]]:
        """Returns JSON for each completion: step from 1, model, row, text, and score (null where it is missing)."""
        return [
            {"step": self._step + 1, "member": member, "row": e.example.where, "completion": text,
             "score": None if one.failure else one.value, **({"parts": dict(one.parts)} if one.parts else {})}
            for member, (texts, scores) in enumerate(self.written)
            for e, text, one in zip(self._encoded, texts, scores, strict=True)
        ]  # fmt: skip

    def example_passes(self) -> list[list[int]]:
        raise RequestError("a reward is measured on whole batches; set method.directions=shared.")


def _values(scores: Sequence[Scored]) -> Tensor:
    return torch.tensor([one.value for one in scores], dtype=torch.float64)


def answered(encoded: Sequence[Encoded], tokens: Sequence[Sequence[int]]) -> list[Encoded]:
    """Returns the examples of `prompt_of` with what a model wrote to the first of them, in its tokens."""
    return [
        replace(row, sequences=((*row.prompt, *written),), answers=(len(written),))
        for row, written in zip(encoded, tokens, strict=False)
        if written
    ]


def prompt_of(form: Format, row: Row) -> Example:
    """Returns the example of a row whose completion is scored, without its answer; `RequestError` unless free text."""
    example = form.example(row, answered=False)
    if example.options:
        raise RequestError(
            f"train.reward scores free text, and {row.where} has options to choose among; give rows with a prompt, or "
            "leave it out."
        )
    return replace(example, answer="", fields=row.fields)
