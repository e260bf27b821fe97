"""Evaluation of a model on encoded examples, and prediction of answers."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tezo.directions.outputs import Outputs
from tezo.directions.products import float32_on_emulating_cpu
from tezo.models.loading import LoadedModel
from tezo.system.errors import NonFiniteModelError, RequestError
from tezo.system.progress import ENCODING, EVALUATING, WRITING, current, tracked
from tezo.tasks.calibration import Bin, calibration_error, probabilities, reliability
from tezo.tasks.evaluated import Evaluated
from tezo.tasks.examples import Measure, Row, check_answers
from tezo.tasks.generation import by_length, completions
from tezo.tasks.notices import token_notices
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.objective import Encoded, Objective
from tezo.tasks.rewards import EVALUATION, Reward, prompt_of
from tezo.tasks.row_files import DataConfig
from tezo.tasks.setup import make_format, make_objective, with_shots

Metrics = dict[str, float]

CALIBRATION_ERROR = "calibration_error"
"""The metric of rows with options that is the expected calibration error of their probabilities."""


@torch.no_grad()
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
) -> Evaluated:
    """Returns metrics of a model over all examples, the answer to each as `predict` gives it, and losses of examples.

    With a reward they are those of `Reward.measure`, and the answers are the completions that it scored.

    Examples with options: "loss" (mean cross-entropy over the options), "accuracy", "calibration_error" (see
    `tezo.tasks.calibration`), and, if all examples have the same options, "macro_f1" (mean over the labels that occur
    among answers or predictions). Free text: "loss" (mean
    negative log-likelihood per answer token, in nats) and "token_accuracy" (fraction of answer tokens that are the
    most likely token, given those before); there are no answers to text that is not measured.

    Args:
        model: the model.
        objective: of the model.
        encoded: examples with their answers, or, with a reward, those of `prompt_of`.
        batch_size: examples per batch.
        measures: metrics that compare the answer (best option or greedy continuation) with the references of an
            example; their means are returned as well.
        max_new_tokens: maximum length of a continuation in tokens.
        calibrate: see `option_scores`.
        reward: measured in place of the answers.
        step: whose random numbers the reward samples with.
    """
    objective.adapt(model, encoded)
    with objective.evaluator.sharing(model), float32_on_emulating_cpu(model):
        if reward is not None:
            return reward.measure(model, objective, encoded, batch_size, step)
        scores: Sequence[Tensor] = ()
        if encoded[0].example.options:
            scores = option_scores(model, objective, encoded, batch_size, calibrate=calibrate)
            best = [int(row.argmax()) for row in scores]
            metrics = choice_metrics(scores, best, encoded, shared=bool(objective.options))
            answers = [e.example.name_of(option) for e, option in zip(encoded, best, strict=True)]
            row_losses = choice_losses(scores, encoded)
        else:
            assert isinstance(objective, CausalObjective)
            metrics, answers, row_losses, _ = _evaluate_text(model, objective, encoded, batch_size)
            if measures:
                with current().phase(WRITING):
                    answers = completions(model, objective, encoded, batch_size, max_new_tokens)
    return Evaluated(metrics | _measured(measures, answers, encoded), answers, row_losses, scores)


def evaluated_by(outputs: Outputs, encoded: Sequence[Encoded], *, shared: bool) -> Evaluated:
    """Returns the result of `evaluate`, without answers, from the outputs of these examples.

    Args:
        outputs: of all examples.
        encoded: the examples.
        shared: whether all have the same options.
    """
    scores_TC = outputs.scores_TC.double().cpu()
    if encoded[0].example.options:
        order = outputs.example_T.cpu().argsort()
        scores = [row[: len(e.example.options)] for row, e in zip(scores_TC[order], encoded, strict=True)]
        metrics = choice_metrics(scores, [int(row.argmax()) for row in scores], encoded, shared=shared)
        return Evaluated(metrics, [], choice_losses(scores, encoded), scores)
    likeliest_T = scores_TC[:, 0] >= scores_TC[:, 1:-1].amax(1)
    metrics = {"loss": -float(scores_TC[:, 0].mean()), "token_accuracy": float(likeliest_T.double().mean())}
    sums_B = scores_TC.new_zeros(len(encoded)).index_add_(0, outputs.example_T.cpu(), -scores_TC[:, 0])
    return Evaluated(metrics, [], _parts(sums_B.tolist(), len(scores_TC)))


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
    """Returns (metrics, notices for the user) of a model on rows with answers, which a reward does not need.

    `shots` training rows, chosen by `seed`, are shown before each question. See `evaluate` for the metrics.
    """
    form = with_shots(make_format(data, loaded, rows), data, loaded, shots, seed)
    new = reward.max_new_tokens if reward is not None else form.max_new_tokens or 0
    objective = make_objective(data, loaded, form, new)
    examples = [form.example(row) if reward is None else prompt_of(form, row) for row in rows]
    if reward is None:
        check_answers(examples)
    with current().phase(ENCODING):
        encoded = [objective.encode(example) for example in tracked(examples)]
    with current().phase(EVALUATING):
        metrics, *_ = evaluate(
            loaded.model,
            objective,
            encoded,
            batch_size,
            measures=form.measures,
            max_new_tokens=new,
            calibrate=calibrate,
            reward=reward,
        )
    check_finite(metrics, loaded.model)
    return metrics, [*form.notices, *token_notices(objective)]


def check_finite(metrics: Metrics, model: Any) -> None:
    """Raises an error where a metric of a model is NaN or infinite."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NonFiniteModelError(f"the model's {name} of these rows", value, model.dtype)


def option_scores(
    model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, *, calibrate: bool = False
) -> list[Tensor]:
    """Returns for each example the scores of its options, (O,) in float64 on the CPU.

    With `calibrate` a score compares the option after the prompt with the option after the null prompt, the prompt
    without the row's text (surface form competition, Holtzman et al. 2021):

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
    prior = dict(zip(nulls, _sums(_plain_scores(model, objective, blank, batch_size), blank), strict=True))
    return [s - prior[e.example.null, e.example.options] for s, e in zip(_sums(scores, encoded), encoded, strict=True)]


def _sums(means: Sequence[Tensor], encoded: Sequence[Encoded]) -> list[Tensor]:
    """Returns the log-probabilities of whole options from the means over their tokens."""
    return [row * torch.tensor(e.answers) for row, e in zip(means, encoded, strict=True)]


def _plain_scores(model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for part in by_length(encoded, batch_size):
        batch = objective.collate([encoded[i] for i in part])
        (scores_BO,) = objective.evaluator.option_scores(model, batch)
        found |= zip(part, scores_BO.double().cpu(), strict=True)
    return [found[i][: len(e.example.options)] for i, e in enumerate(encoded)]


def choice_metrics(
    scores: Sequence[Tensor], best: Sequence[int], encoded: Sequence[Encoded], *, shared: bool
) -> Metrics:
    """Returns the metrics of examples with options; "macro_f1" is among them if all have the same (`shared`).

    `scores` and `best` hold for each example the scores of its options and the index of the best one.
    """
    labels = [e.example.label for e in encoded]
    loss = sum(choice_losses(scores, encoded))
    hits = [e.example.is_right(option) for e, option in zip(encoded, best, strict=True)]
    metrics = {"loss": loss / len(encoded), "accuracy": sum(hits) / len(encoded)}
    metrics |= {"macro_f1": macro_f1(best, labels)} if shared else {}
    return metrics | {CALIBRATION_ERROR: calibration_error(reliability_of(scores, encoded))}


def reliability_of(scores: Sequence[Tensor], encoded: Sequence[Encoded], temperature: float = 1.0) -> list[Bin]:
    """Returns the bins of the answers with the highest scores, by their probabilities at a temperature."""
    sure = [float(row.max()) for row in probabilities(scores, temperature)]
    right = [e.example.is_right(int(row.argmax())) for e, row in zip(encoded, scores, strict=True)]
    return reliability(sure, right)


def choice_losses(scores: Sequence[Tensor], encoded: Sequence[Encoded]) -> list[float]:
    """Returns the cross-entropy of each example over its options, by their scores."""
    return [-float(row.log_softmax(0)[e.example.label]) for row, e in zip(scores, encoded, strict=True)]


def _evaluate_text(model: Any, objective: CausalObjective, encoded: Sequence[Encoded], batch_size: int) -> Evaluated:
    loss, right, tokens = 0.0, 0, 0
    sums: dict[int, float] = {}
    for part in by_length(encoded, batch_size):
        batch = objective.collate([encoded[i] for i in part])
        log_probs_SK, hits_SK = objective.evaluator.token_hits(model, batch)
        loss -= float(log_probs_SK.sum(dtype=torch.float64))
        sums |= zip(part, (-log_probs_SK.sum(1, dtype=torch.float64)).tolist(), strict=True)
        right += int(hits_SK.sum())
        tokens += batch.num_terms
    metrics = {"loss": loss / tokens, "token_accuracy": right / tokens}
    return Evaluated(metrics, [], _parts([sums[i] for i in range(len(encoded))], tokens))


def _parts(sums: Sequence[float], tokens: int) -> list[float]:
    """Returns the part of each example in a mean over tokens, by the sums over its tokens."""
    return [each * len(sums) / tokens for each in sums]


def _measured(measures: Sequence[Measure], answers: Sequence[str], encoded: Sequence[Encoded]) -> Metrics:
    sums: Metrics = {}
    for answer, e in zip(answers, encoded, strict=True) if measures else ():
        for measure in measures:
            for name, value in measure(answer, e.example.references).items():
                sums[name] = sums.get(name, 0.0) + value
    return {name: total / len(encoded) for name, total in sums.items()}


@torch.no_grad()
def predict(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    batch_size: int,
    max_new_tokens: int,
    heard: Callable[[str], None] | None = None,
) -> list[str]:
    """Returns the answer to each example: the name of the best option, or for free text the greedy continuation.

    `heard` is called with each new piece of a continuation, of one example.
    """
    if encoded[0].example.options:
        return likeliest(checked_scores(model, objective, encoded, batch_size), encoded)
    objective.adapt(model, encoded)
    with (
        objective.evaluator.sharing(model),
        float32_on_emulating_cpu(model),
        current().phase(WRITING),
        # a token is found among scores of any kind, NaN too
        model.register_forward_hook(lambda *found: _check_scores(found[-1].logits[:, -1].amax(-1), model)),
    ):
        return completions(model, objective, encoded, batch_size, max_new_tokens, heard=heard)


@torch.no_grad()
def checked_scores(model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int) -> list[Tensor]:
    """Returns for each example the finite scores of its options, (O,) in float64 on the CPU."""
    objective.adapt(model, encoded)
    with objective.evaluator.sharing(model), float32_on_emulating_cpu(model), current().phase(WRITING):
        scores = option_scores(model, objective, encoded, batch_size)
    _check_scores(torch.stack([row.amax() for row in scores]), model)
    return scores


def likeliest(scores: Sequence[Tensor], encoded: Sequence[Encoded]) -> list[str]:
    """Returns the name of the option with the highest score of each example."""
    return [e.example.name_of(int(row.argmax())) for e, row in zip(encoded, scores, strict=True)]


def _check_scores(highest: Tensor, model: Any) -> None:
    wrong = highest[~highest.isfinite()]
    if len(wrong):
        raise NonFiniteModelError("the model's score of an answer", float(wrong[0]), model.dtype)


def macro_f1(predictions: Sequence[int], labels: Sequence[int | None]) -> float:
    """Returns the mean of the F1 scores of the labels that occur among predictions or labels."""
    said, true = Counter(predictions), Counter(label for label in labels if label is not None)
    hits = Counter(p for p, t in zip(predictions, labels, strict=True) if p == t)
    scores = [2 * hits[c] / (said[c] + true[c]) for c in sorted({*said, *true})]
    return sum(scores) / len(scores)
