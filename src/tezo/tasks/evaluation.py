"""Evaluation of a model on encoded examples, and prediction of answers."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tezo.errors import NonFiniteModelError, RequestError
from tezo.models.loading import LoadedModel
from tezo.numerics.emulation import float32_on_emulating_cpu
from tezo.progress.meter import ENCODING, EVALUATING, WRITING, current, tracked
from tezo.tasks import Measure, Row
from tezo.tasks.data_config import DataConfig
from tezo.tasks.examples import check_answers
from tezo.tasks.generation import by_length, completions
from tezo.tasks.objectives import CausalObjective, Encoded, Objective
from tezo.tasks.rewards import EVALUATION, Reward, prompt_of
from tezo.tasks.setup import make_format, make_objective, with_shots
from tezo.tasks.token_notices import token_notices

Metrics = dict[str, float]


def evaluate(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    batch_size: int,
    *,
    measures: Sequence[Measure] = (),
    max_new_tokens: int = 0,
    calibrate: bool = False,
    reward: Reward | None = None,
    step: int = EVALUATION,
) -> Metrics:
    """Metrics of a model over all examples.

    With a reward: "reward" (mean score of the completions) and "loss" (minus that), nothing else.

    Examples with options: "loss" (mean cross-entropy over the options), "accuracy", and, if all examples have the same
    options, "macro_f1" (mean over the labels that occur among answers or predictions). Free text: "loss" (mean
    negative log-likelihood per answer token, in nats) and "token_accuracy" (fraction of answer tokens that are the
    most likely token, given those before).

    Args:
        model: the model to evaluate.
        objective: the objective of the model's kind.
        encoded: examples with their answers.
        batch_size: examples per batch.
        measures: metrics that compare the answer (best option or greedy continuation) with the references of an
            example; their means are returned as well.
        max_new_tokens: maximum length of a continuation in tokens.
        calibrate: see `option_scores`.
        reward: what is measured in place of the answers; the examples are those of `prompt_of`.
        step: whose random numbers the reward samples with.
    """
    return evaluate_and_answer(
        model,
        objective,
        encoded,
        batch_size,
        measures=measures,
        max_new_tokens=max_new_tokens,
        calibrate=calibrate,
        reward=reward,
        step=step,
    )[0]


@torch.no_grad()
def evaluate_and_answer(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    batch_size: int,
    *,
    measures: Sequence[Measure] = (),
    max_new_tokens: int = 0,
    calibrate: bool = False,
    reward: Reward | None = None,
    step: int = EVALUATION,
) -> tuple[Metrics, list[str]]:
    """(what `evaluate` returns, the answer to each example as `predict` gives it).

    With a reward the answers are the completions that it scored. There are no answers to text that is not measured.
    """
    objective.adapt(model, encoded)
    with objective.sharing(model), float32_on_emulating_cpu(model):
        if reward is not None:
            mean, texts = reward.mean_and_completions(model, objective, encoded, batch_size, step)
            return {"loss": -mean, "reward": mean}, texts
        if encoded[0].example.options:
            scores = option_scores(model, objective, encoded, batch_size, calibrate=calibrate)
            best = [int(row.argmax()) for row in scores]
            metrics = choice_metrics(scores, best, encoded, shared=bool(objective.options))
            answers = [e.example.name_of(option) for e, option in zip(encoded, best, strict=True)]
        else:
            assert isinstance(objective, CausalObjective)
            metrics = _evaluate_text(model, objective, encoded, batch_size)
            answers = []
            if measures:
                with current().phase(WRITING):
                    answers = completions(model, objective, encoded, batch_size, max_new_tokens)
    return metrics | _measured(measures, answers, encoded), answers


def measure(
    data: DataConfig,
    loaded: LoadedModel,
    rows: Sequence[Row],
    *,
    batch_size: int,
    seed: int = 0,
    shots: int = 0,
    calibrate: bool = False,
    reward: Reward | None = None,
) -> tuple[Metrics, list[str]]:
    """(metrics, notices for the user) of a model on rows with answers.

    Args:
        data: format of the rows.
        loaded: the model.
        rows: rows with their answers.
        batch_size: examples per batch.
        seed: seed of the choice of demonstrations.
        shots: number of training rows shown, with their answers, before each question.
        calibrate: see `option_scores`.
        reward: what is measured in place of the answers, which rows then need not have.
    """
    form = with_shots(make_format(data, loaded, rows), data, loaded, shots, seed)
    new = reward.max_new_tokens if reward is not None else form.max_new_tokens or 0
    objective = make_objective(data, loaded, form, new)
    examples = [form.example(row) if reward is None else prompt_of(form, row) for row in rows]
    options: dict[str, Any] = {"measures": form.measures, "max_new_tokens": new, "calibrate": calibrate}
    if reward is None:
        check_answers(examples)
    with current().phase(ENCODING):
        encoded = [objective.encode(example) for example in tracked(examples)]
    with current().phase(EVALUATING):
        metrics = evaluate(loaded.model, objective, encoded, batch_size, reward=reward, **options)
    check_finite(metrics, loaded.model)
    return metrics, token_notices(objective)


def check_finite(metrics: Metrics, model: Any) -> None:
    """An error where a metric of a model is NaN or infinite."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NonFiniteModelError(f"the model's {name} of these rows", value, model.dtype)


def option_scores(
    model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, *, calibrate: bool = False
) -> list[Tensor]:
    """For each example the scores of its options, (O,) in float64 on the CPU.

    With `calibrate` a score compares the option after the prompt with the option after the null prompt, the prompt
    without the row's own text (surface form competition, Holtzman et al. 2021):

        log p(option | prompt) - log p(option | null prompt).

    Raises:
        RequestError: `calibrate` is set, but the examples have no null prompt.
    """
    scores = _plain_scores(model, objective, encoded, batch_size)
    if not calibrate:
        return scores
    nulls = {(e.example.null, e.example.options): e.example for e in encoded}
    if any(null is None for null, _ in nulls) or not isinstance(objective, CausalObjective):
        raise RequestError("calibrate is set, but these rows have no prompt without their text; use it with a task "
                           "and a causal model.")  # fmt: skip
    blank = [objective.encode(replace(example, prompt=null or "")) for (null, _), example in nulls.items()]
    null_scores = _plain_scores(model, objective, blank, batch_size)
    prior = {key: _sums(row, e) for key, row, e in zip(nulls, null_scores, blank, strict=True)}
    pairs = zip(scores, encoded, strict=True)
    return [_sums(row, e) - prior[e.example.null, e.example.options] for row, e in pairs]


def _sums(means: Tensor, encoded: Encoded) -> Tensor:
    """Log-probabilities of whole options from the means over their tokens."""
    return means * torch.tensor(encoded.answers)


def _plain_scores(model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int) -> list[Tensor]:
    scores: dict[int, Tensor] = {}
    for part in by_length(encoded, batch_size):
        table = objective.scores(model, objective.collate([encoded[i] for i in part])).double().cpu()
        scores |= {i: row[: len(encoded[i].example.options)] for i, row in zip(part, table, strict=True)}
    return [scores[i] for i in range(len(encoded))]


def choice_metrics(
    scores: Sequence[Tensor], best: Sequence[int], encoded: Sequence[Encoded], *, shared: bool
) -> Metrics:
    """The metrics "loss", "accuracy" and, if `shared`, "macro_f1".

    Args:
        scores: for each example the scores of its options.
        best: for each example the index of its best option.
        encoded: the examples, with their labels.
        shared: whether all examples have the same options.
    """
    labels = [e.example.label for e in encoded]
    loss = sum(-float(row.log_softmax(0)[label]) for row, label in zip(scores, labels, strict=True))
    hits = [e.example.is_right(option) for e, option in zip(encoded, best, strict=True)]
    metrics = {"loss": loss / len(encoded), "accuracy": sum(hits) / len(encoded)}
    return metrics | ({"macro_f1": macro_f1(best, labels)} if shared else {})


def _evaluate_text(model: Any, objective: CausalObjective, encoded: Sequence[Encoded], batch_size: int) -> Metrics:
    loss, right, tokens = 0.0, 0, 0
    for part in by_length(encoded, batch_size):
        batch = objective.collate([encoded[i] for i in part])
        chosen, hits = objective.log_probs(model, batch)
        loss -= float(chosen.sum(dtype=torch.float64))
        right += int(hits.sum())
        tokens += int(batch.valid_SK.sum())
    return {"loss": loss / tokens, "token_accuracy": right / tokens}


def _measured(measures: Sequence[Measure], answers: Sequence[str], encoded: Sequence[Encoded]) -> Metrics:
    sums: Metrics = {}
    for answer, e in zip(answers, encoded, strict=True) if measures else ():
        for measure in measures:
            for name, value in measure(answer, e.example.references).items():
                sums[name] = sums.get(name, 0.0) + value
    return {name: total / len(encoded) for name, total in sums.items()}


@torch.no_grad()
def predict(
    model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, max_new_tokens: int
) -> list[str]:
    """The answer to each example, in order: the name of the best option, or for free text the greedy continuation."""
    objective.adapt(model, encoded)
    with objective.sharing(model), float32_on_emulating_cpu(model):
        if not encoded[0].example.options:
            with current().phase(WRITING), _checked_scores(model):
                return completions(model, objective, encoded, batch_size, max_new_tokens)
        with current().phase(WRITING):
            scores = option_scores(model, objective, encoded, batch_size)
        _check_scores(torch.stack([row.amax() for row in scores]), model)
        return [e.example.name_of(int(row.argmax())) for e, row in zip(encoded, scores, strict=True)]


@contextmanager
def _checked_scores(model: Any) -> Iterator[None]:
    """While open, scores of the next token that are NaN or infinite raise an error: a token is found in any."""
    hook = model.register_forward_hook(lambda *found: _check_scores(found[-1].logits[:, -1].amax(-1), model))
    try:
        yield
    finally:
        hook.remove()


def _check_scores(highest: Tensor, model: Any) -> None:
    wrong = highest[~highest.isfinite()]
    if len(wrong):
        raise NonFiniteModelError("the model's score of an answer", float(wrong[0]), model.dtype)


def macro_f1(predictions: Sequence[int], labels: Sequence[int | None]) -> float:
    """Mean of the F1 scores of the labels that occur among predictions or labels."""
    classes = sorted({c for c in (*predictions, *labels) if c is not None})
    pairs = list(zip(predictions, labels, strict=True))
    scores = []
    for c in classes:
        hits = sum(p == c and t == c for p, t in pairs)
        scores.append(2 * hits / (sum(p == c for p, _ in pairs) + sum(t == c for _, t in pairs)))
    return sum(scores) / len(scores)
