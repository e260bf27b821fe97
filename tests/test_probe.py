"""Linear probing: the regression's minimum, what it reads, and the command."""

import json

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, refused, tezo, write_rows
from questions import case
from torch.nn import functional

from tezo.tasks.untuned import features, fit


def test_the_fit_is_the_minimum_of_the_penalised_loss():
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(40, 6, generator=draw, dtype=torch.float64), torch.randint(3, (40,), generator=draw)
    weight, bias = fit(x, labels, 3)
    probabilities = (x @ weight.T + bias).softmax(1)
    error = probabilities - functional.one_hot(labels, 3)
    # the loss is convex: where its gradient is zero is its one minimum, up to a shift common to all biases
    torch.testing.assert_close(error.T @ x + weight, torch.zeros(3, 6, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(error.sum(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["opt", "gpt2", "roberta", "bert"])
@torch.no_grad()
def test_what_is_read_is_the_state_the_answer_comes_from_and_alike_in_any_company(family):
    model, objective, examples = case(family)
    encoded = [objective.encode(example) for example in examples]
    together, alone = features(model, objective, encoded, 100), features(model, objective, encoded, 1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    if family == "bert":
        return
    first = encoded[0]
    answer = first.answers[0] if family != "roberta" else 0
    ids = torch.tensor([first.sequences[0][: len(first.sequences[0]) - answer]])
    place = -1 if family != "roberta" else first.sequences[0].index(objective.tokenizer.mask_token_id)
    head = model.get_output_embeddings()
    logits = head(together[:1].to(head.weight.dtype))
    torch.testing.assert_close(logits[0], model(input_ids=ids).logits[0, place], rtol=1e-3, atol=1e-4)


def test_a_probe_learns_what_words_tell(tmp_path):
    rows = label_rows(400, seed=1)
    write_rows(tmp_path / "train.jsonl", rows[:200])
    write_rows(tmp_path / "test.jsonl", rows[200:])
    always = ("eval", model_folder(tmp_path, "bert"), "--set", f"data.train={tmp_path / 'train.jsonl'}")
    done = tezo(*always, "--set", f"data.test={tmp_path / 'test.jsonl'}", "--probe", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["rows"] == {"train": 200, "test": 200}
    assert found["accuracy"] > 0.65  # of a random model's features; guessing gets there once in 100 000


def test_rows_without_labels_in_common_have_no_probe(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", completion_rows(6))
    done = tezo("eval", model_folder(tmp_path, "opt"), "--set", f"data.train={rows}", "--probe")
    refused(done, "probe", "labelled rows")
