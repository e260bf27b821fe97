"""Scoring a model on encoded examples, and answering new ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from tezo.kernels import wide_products
from tezo.objectives import CausalObjective, Encoded, Objective
from tezo.tasks import Measure

Metrics = dict[str, float]


@torch.no_grad()
def evaluate(
    model: Any,
    objective: Objective,
    encoded: Sequence[Encoded],
    batch_size: int,
    *,
    measures: Sequence[Measure] = (),
    max_new_tokens: int = 0,
) -> Metrics:
    """Metrics over all examples.

    Options: "loss" (mean cross-entropy over the options), "accuracy", and where all examples have the same options
    "macro_f1" (mean over the labels that occur among answers or predictions). Free text: "loss" (mean negative
    log-likelihood of an answer token, in nats) and "token_accuracy" (share of answer tokens that are the likeliest,
    given those before).

    Args:
        model: to be measured.
        objective: of its kind.
        encoded: examples with their answers.
        batch_size: examples of a batch.
        measures: for examples with references: what compares them with the answer, which is the best option or
            the greedy continuation; their means are metrics too.
        max_new_tokens: longest continuation.
    """
    objective.adapt(model, encoded)
    with objective.sharing(model), wide_products(model):
        if encoded[0].example.options:
            metrics, best = _evaluate_options(model, objective, encoded, batch_size)
            answers = [e.example.name_of(option) for e, option in zip(encoded, best, strict=True)]
        else:
            assert isinstance(objective, CausalObjective)
            metrics = _evaluate_text(model, objective, encoded, batch_size)
            answers = _texts(model, objective, encoded, batch_size, max_new_tokens) if measures else []
    return metrics | _measured(measures, answers, encoded)


def _evaluate_options(
    model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int
) -> tuple[Metrics, list[int]]:
    loss, best = 0.0, [0] * len(encoded)
    for part in by_length(encoded, batch_size):
        batch = objective.collate([encoded[i] for i in part])
        assert batch.labels_B is not None
        scores = objective.scores(model, batch)
        loss += float(functional.cross_entropy(scores, batch.labels_B, reduction="sum"))
        for i, option in zip(part, scores.argmax(1).tolist(), strict=True):
            best[i] = option
    hits = [e.example.is_right(option) for e, option in zip(encoded, best, strict=True)]
    metrics = {"loss": loss / len(encoded), "accuracy": sum(hits) / len(encoded)}
    if objective.options:
        metrics["macro_f1"] = macro_f1(best, [e.example.label for e in encoded])
    return metrics, best


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
    """The answers, in order: the name of the best option, or for free text the greedy continuation."""
    objective.adapt(model, encoded)
    with objective.sharing(model), wide_products(model):
        if not encoded[0].example.options:
            return _texts(model, objective, encoded, batch_size, max_new_tokens)
        answers = [""] * len(encoded)
        for part in by_length(encoded, batch_size):
            best = objective.scores(model, objective.collate([encoded[i] for i in part])).argmax(1).tolist()
            for i, option in zip(part, best, strict=True):
                answers[i] = encoded[i].example.name_of(option)
        return answers


def _texts(
    model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, max_new_tokens: int
) -> list[str]:
    answers = [""] * len(encoded)
    for part in by_length(encoded, batch_size):
        texts = _generate(model, objective, [encoded[i] for i in part], max_new_tokens)
        for i, text in zip(part, texts, strict=True):
            answers[i] = text
    return answers


def _generate(model: Any, objective: Objective, encoded: Sequence[Encoded], max_new_tokens: int) -> list[str]:
    tokenizer = objective.tokenizer
    prompts = [e.sequences[0][: len(e.sequences[0]) - e.answers[0]] for e in encoded]
    length = max(map(len, prompts))
    padded = [(tokenizer.pad_token_id,) * (length - len(p)) + tuple(p) for p in prompts]
    mask = [[0] * (length - len(p)) + [1] * len(p) for p in prompts]
    a_line = not encoded[0].example.ends
    stop = {"stop_strings": ["\n"], "tokenizer": tokenizer} if a_line else {}
    output = model.generate(
        input_ids=torch.tensor(padded, device=objective.device),
        attention_mask=torch.tensor(mask, device=objective.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        **stop,
    )
    texts = [str(text) for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)]
    return [(text.partition("\n")[0] if a_line else text).strip() for text in texts]


def by_length(encoded: Sequence[Encoded], batch_size: int) -> Iterator[list[int]]:
    """Indices in batches of like length, so that little is padded."""
    order = sorted(range(len(encoded)), key=lambda i: encoded[i].length)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def macro_f1(predictions: Sequence[int], labels: Sequence[int | None]) -> float:
    """Mean of the F1 scores of the labels that occur."""
    classes = sorted({c for c in (*predictions, *labels) if c is not None})
    pairs = list(zip(predictions, labels, strict=True))
    scores = []
    for c in classes:
        hits = sum(p == c and t == c for p, t in pairs)
        scores.append(2 * hits / (sum(p == c for p, _ in pairs) + sum(t == c for _, t in pairs)))
    return sum(scores) / len(scores)
