"""Evaluation and prediction: what they share between batches, and that they agree."""

import pytest
import torch
from questions import case, scores_of

from tezo.tasks.evaluation import evaluate, macro_f1, predict
from tezo.tasks.objectives.encoder import EncoderInTorch


@pytest.mark.parametrize("run", [evaluate, lambda *parts: predict(*parts, 1)], ids=["evaluate", "predict"])
def test_descriptions_are_encoded_once_however_many_batches(run):
    model, objective, examples = case("bert")
    assert isinstance(objective.evaluator, EncoderInTorch)
    encoded = [objective.encode(example) for example in examples]
    seen = []
    model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"]), with_kwargs=True)
    run(model, objective, encoded, 2)
    assert len(seen) == 1 + -(-len(encoded) // 2)
    assert sum(torch.equal(ids, objective.evaluator.descriptions["input_ids"]) for ids in seen) == 1


@pytest.mark.parametrize("family", ["opt", "gemma2", "roberta", "bert"])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_predictions_are_in_order_and_have_the_accuracy_that_is_measured(family, batch_size):
    model, objective, examples = case(family)
    encoded = [objective.encode(example) for example in examples]
    answers = predict(model, objective, encoded, batch_size, 1)
    with torch.no_grad():
        best = scores_of(model, objective, encoded).argmax(1).tolist()
    assert answers == [example.name_of(i) for example, i in zip(examples, best, strict=True)]
    right = sum(i == example.label for example, i in zip(examples, best, strict=True))
    metrics = evaluate(model, objective, encoded, batch_size)[0]
    assert metrics["accuracy"] == pytest.approx(right / len(encoded))
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(float(objective.closure(model, objective.batches(encoded))()), rel=1e-5)


def test_macro_f1_is_the_mean_of_the_labels_f1():
    assert macro_f1([0, 0, 1, 1], [0, 0, 1, 1]) == 1.0
    assert macro_f1([0, 0, 0, 0], [0, 0, 1, 1]) == pytest.approx((2 * 2 / (4 + 2) + 0) / 2)
    assert macro_f1([0, 1, 2, 2], [0, 2, 2, 1]) == pytest.approx((1 + 0 + 2 / 4) / 3)
