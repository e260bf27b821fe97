"""Linear probing: the regression's minimum, what it reads, and the command."""

import json

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, refused, tezo, write_rows
from questions import case
from torch.nn import functional

from tezo.tasks.evaluation import evaluate, option_scores
from tezo.tasks.untuned import fit, probed, read, untuned
from tezo.training.job import prepare
from tezo.training.settings import parse_config
from tezo.training.summary import against_untuned


def test_the_fit_is_the_minimum_of_the_penalised_loss():
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(40, 6, generator=draw, dtype=torch.float64), torch.randint(3, (40,), generator=draw)
    weight, bias = fit(x, labels, 3)
    probabilities = (x @ weight.T + bias).softmax(1)
    error = probabilities - functional.one_hot(labels, 3)
    # the loss is convex: where its gradient is zero is its one minimum, up to a shift common to all biases
    torch.testing.assert_close(error.T @ x + weight, torch.zeros(3, 6, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(error.sum(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_probe_of_one_row_or_of_a_label_with_one_is_a_number():
    draw = torch.Generator().manual_seed(1)
    x, rows = torch.randn(9, 4, generator=draw, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 2])
    for count in (1, 9):
        assert bool(probed(x[:count], labels[:count], 3, rows).isfinite().all())


@pytest.mark.parametrize("family", ["opt", "gpt2", "roberta", "bert"])
@torch.no_grad()
def test_what_is_read_is_the_state_the_answer_comes_from_and_alike_in_any_company(family):
    model, objective, examples = case(family)
    encoded = [objective.encode(example) for example in examples]
    scores, together = read(model, objective, encoded, 100)
    torch.testing.assert_close(together, read(model, objective, encoded, 1)[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores, torch.stack(option_scores(model, objective, encoded, 100)), rtol=1e-5, atol=1e-6)
    if family == "bert":
        return
    first = encoded[0]
    answer = first.answers[0] if family != "roberta" else 0
    ids = torch.tensor([first.sequences[0][: len(first.sequences[0]) - answer]])
    place = -1 if family != "roberta" else first.sequences[0].index(objective.tokenizer.mask_token_id)
    head = model.get_output_embeddings()
    logits = head(together[:1].to(head.weight.dtype))
    torch.testing.assert_close(logits[0], model(input_ids=ids).logits[0, place], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_bias_for_each_label_is_the_best_there_is_on_the_rows_it_is_fitted_to(tmp_path):
    job = labelled_job(tmp_path)
    found = untuned(job.model, job.objective, job.train, job.train, 8)
    plain, *_ = evaluate(job.model, job.objective, job.train, 8)
    scores = torch.stack(option_scores(job.model, job.objective, job.train, 8))
    labels = torch.tensor([e.example.label for e in job.train])
    shifts = [torch.tensor([shift, 0.0]) for shift in torch.arange(-9, 9, 0.01)]
    best = min(float(functional.cross_entropy(scores + shift, labels)) for shift in shifts)
    assert found["bias"]["loss"] == pytest.approx(best, abs=1e-4) and best < plain["loss"]
    assert found["probe"]["loss"] < best


def labelled_job(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(60, seed=2))
    config = parse_config({"model": {"name": str(model_folder(tmp_path, "opt"))}, "data": {"train": str(rows)},
                           "method": {"name": "tezo", "rank": 2}, "train": {"steps": 1}})  # fmt: skip
    return prepare(config)


@pytest.mark.parametrize(
    ("method", "end", "said"),
    [
        ("gauss-newton", 0.9, "ends at 90.0 %, above the untuned model, the bias and the probe."),
        ("gauss-newton", 0.832, "ends at 83.2 %, above the untuned model and the bias, level with the probe."),
        ("tezo", 0.76, "ends at 76.0 %, above the bias, below the untuned model and the probe."),
        ("gauss-newton", 0.6, "and the probe. `--method probe` writes a probe into the model."),
        ("probe", 0.6, "ends at 60.0 %, below the untuned model, the bias and the probe."),
        ("tezo", None, ""),
    ],
)
def test_a_run_says_where_it_ends_beside_the_untuned_model(method, end, said):
    after = {} if end is None else {"accuracy": end}
    summary = {
        "method": method,
        "before": {"accuracy": 0.8},
        "after": after,
        "untuned": {"bias": {"accuracy": 0.75}, "probe": {"accuracy": 0.832}},
    }
    found = against_untuned(summary)
    assert found.endswith(said) and (not said or all(part in found for part in ("80.0 %,", "75.0 %", "83.2 %")))


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
