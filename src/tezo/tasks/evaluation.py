"""Evaluation of a model on encoded examples, and prediction of answers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tezo.errors import RequestError
from tezo.models.loading import LoadedModel
from tezo.numerics.emulation import float32_on_emulating_cpu
from tezo.tasks import Measure, Row
from tezo.tasks.data_config import DataConfig
from tezo.tasks.objectives import CausalObjective, Encoded, Objective
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
) -> Metrics:
    """Metrics of a model over all examples.

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
    """
    return evaluate_and_answer(
        model,
        objective,
        encoded,
        batch_size,
        measures=measures,
        max_new_tokens=max_new_tokens,
        calibrate=calibrate,
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
) -> tuple[Metrics, list[str]]:
    """(what `evaluate` returns, the answer to each example as `predict` gives it); no answers to unmeasured text."""
    objective.adapt(model, encoded)
    with objective.sharing(model), float32_on_emulating_cpu(model):
        if encoded[0].example.options:
            scores = option_scores(model, objective, encoded, batch_size, calibrate=calibrate)
            best = [int(row.argmax()) for row in scores]
            metrics = choice_metrics(scores, best, encoded, shared=bool(objective.options))
            answers = [e.example.name_of(option) for e, option in zip(encoded, best, strict=True)]
        else:
            assert isinstance(objective, CausalObjective)
            metrics = _evaluate_text(model, objective, encoded, batch_size)
            answers = _texts(model, objective, encoded, batch_size, max_new_tokens) if measures else []
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
    """
    form = with_shots(make_format(data, loaded, rows), data, loaded, shots, seed)
    objective = make_objective(data, loaded, form)
    encoded = [objective.encode(form.example(row)) for row in rows]
    new = form.max_new_tokens or 0
    metrics = evaluate(
        loaded.model, objective, encoded, batch_size, measures=form.measures, max_new_tokens=new, calibrate=calibrate
    )
    return metrics, token_notices(objective)


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
            return _texts(model, objective, encoded, batch_size, max_new_tokens)
        scores = option_scores(model, objective, encoded, batch_size)
        return [e.example.name_of(int(row.argmax())) for e, row in zip(encoded, scores, strict=True)]


def _texts(
    model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, max_new_tokens: int
) -> list[str]:
    answers = [""] * len(encoded)
    for part in by_length(encoded, batch_size):
        texts = _generate(model, objective, [encoded[i] for i in part], max_new_tokens)
        for i, text in zip(part, texts, strict=True):
            answers[i] = text
    return answers


_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
}
"""Options of greedy decoding; they override the model's own generation_config."""


def _generate(model: Any, objective: Objective, encoded: Sequence[Encoded], max_new_tokens: int) -> list[str]:
    tokenizer = objective.tokenizer
    prompts = [e.sequences[0][: len(e.sequences[0]) - e.answers[0]] for e in encoded]
    length = max(map(len, prompts))
    padded = [(tokenizer.pad_token_id,) * (length - len(p)) + tuple(p) for p in prompts]
    mask = [[0] * (length - len(p)) + [1] * len(p) for p in prompts]
    one_line = not encoded[0].example.ends
    stop = {"stop_strings": ["\n"], "tokenizer": tokenizer} if one_line else {}
    output = model.generate(
        input_ids=torch.tensor(padded, device=objective.device),
        attention_mask=torch.tensor(mask, device=objective.device),
        max_new_tokens=max_new_tokens,
        **_GREEDY,
        pad_token_id=tokenizer.pad_token_id,
        **stop,
    )
    texts = [str(text) for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)]
    return [(text.partition("\n")[0] if one_line else text).strip() for text in texts]


def by_length(encoded: Sequence[Encoded], batch_size: int) -> Iterator[list[int]]:
    """Indices of the examples in batches of similar length, which keeps padding short."""
    order = sorted(range(len(encoded)), key=lambda i: encoded[i].length)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def macro_f1(predictions: Sequence[int], labels: Sequence[int | None]) -> float:
    """Mean of the F1 scores of the labels that occur among predictions or labels."""
    classes = sorted({c for c in (*predictions, *labels) if c is not None})
    pairs = list(zip(predictions, labels, strict=True))
    scores = []
    for c in classes:
        hits = sum(p == c and t == c for p, t in pairs)
        scores.append(2 * hits / (sum(p == c for p, _ in pairs) + sum(t == c for _, t in pairs)))
    return sum(scores) / len(scores)
