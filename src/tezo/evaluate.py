"""Scoring a model on encoded examples, and answering new ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from tezo.kernels import wide_products
from tezo.objectives import CausalObjective, Encoded, Objective

Metrics = dict[str, float]


@torch.no_grad()
def evaluate(model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int) -> Metrics:
    """Metrics over all examples.

    Labelled data: "loss" (mean cross-entropy over the options), "accuracy", "macro_f1" (mean over the labels
    that occur among answers or predictions). Free text: "loss" (mean negative log-likelihood of an answer
    token, in nats) and "token_accuracy" (share of answer tokens that are the likeliest, given those before).
    """
    objective.adapt(model, encoded)
    if objective.options:
        with objective.sharing(model), wide_products(model):
            return _evaluate_options(model, objective, encoded, batch_size)
    assert isinstance(objective, CausalObjective)
    with wide_products(model):
        return _evaluate_text(model, objective, encoded, batch_size)


def _evaluate_options(model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int) -> Metrics:
    loss = 0.0
    predictions, labels = [], []
    for part in by_length(encoded, batch_size):
        batch = objective.collate([encoded[i] for i in part])
        assert batch.labels_B is not None
        scores = objective.scores(model, batch)
        loss += float(functional.cross_entropy(scores, batch.labels_B, reduction="sum"))
        predictions += scores.argmax(1).tolist()
        labels += batch.labels_B.tolist()
    accuracy = sum(p == t for p, t in zip(predictions, labels, strict=True)) / len(labels)
    return {"loss": loss / len(labels), "accuracy": accuracy, "macro_f1": macro_f1(predictions, labels)}


def _evaluate_text(model: Any, objective: CausalObjective, encoded: Sequence[Encoded], batch_size: int) -> Metrics:
    loss, right, tokens = 0.0, 0, 0
    for part in by_length(encoded, batch_size):
        batch = objective.collate([encoded[i] for i in part])
        chosen, hits = objective.log_probs(model, batch)
        loss -= float(chosen.sum(dtype=torch.float64))
        right += int(hits.sum())
        tokens += int(batch.valid_SK.sum())
    return {"loss": loss / tokens, "token_accuracy": right / tokens}


@torch.no_grad()
def predict(
    model: Any, objective: Objective, encoded: Sequence[Encoded], batch_size: int, max_new_tokens: int
) -> list[str | int]:
    """For labelled data the index of the best option, for free text the greedy continuation, in order."""
    objective.adapt(model, encoded)
    answers: dict[int, str | int] = {}
    with objective.sharing(model), wide_products(model):
        for part in by_length(encoded, batch_size):
            chosen = [encoded[i] for i in part]
            if objective.options:
                best: Sequence[str | int] = objective.scores(model, objective.collate(chosen)).argmax(1).tolist()
            else:
                best = _generate(model, objective, chosen, max_new_tokens)
            answers.update(zip(part, best, strict=True))
    return [answers[i] for i in range(len(encoded))]


def _generate(model: Any, objective: Objective, encoded: Sequence[Encoded], max_new_tokens: int) -> list[str]:
    tokenizer = objective.tokenizer
    prompts = [e.sequences[0][: len(e.sequences[0]) - e.answers[0]] for e in encoded]
    length = max(map(len, prompts))
    padded = [(tokenizer.pad_token_id,) * (length - len(p)) + tuple(p) for p in prompts]
    mask = [[0] * (length - len(p)) + [1] * len(p) for p in prompts]
    output = model.generate(
        input_ids=torch.tensor(padded, device=objective.device),
        attention_mask=torch.tensor(mask, device=objective.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return [str(text).strip() for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)]


def by_length(encoded: Sequence[Encoded], batch_size: int) -> Iterator[list[int]]:
    """Indices in batches of like length, so that little is padded."""
    order = sorted(range(len(encoded)), key=lambda i: encoded[i].length)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def macro_f1(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Mean of the F1 scores of the labels that occur."""
    classes = sorted(set(predictions) | set(labels))
    pairs = list(zip(predictions, labels, strict=True))
    scores = []
    for c in classes:
        hits = sum(p == c and t == c for p, t in pairs)
        scores.append(2 * hits / (sum(p == c for p, _ in pairs) + sum(t == c for _, t in pairs)))
    return sum(scores) / len(scores)
