"""`tezo.closure`: transformers' own loss, in the forms that a step can share a pass by."""

import pytest
import torch
from tiny import tiny_gpt2, tiny_llama, tiny_moe, tiny_opt, tiny_roberta
from torch import Tensor
from torch.nn.functional import cross_entropy

import tezo
from tezo.methods import METHODS
from tezo.optim.closures import RowLosses
from tezo.system.errors import RequestError

FAMILIES = {"opt": tiny_opt, "llama": tiny_llama, "gpt2": tiny_gpt2, "roberta": tiny_roberta, "moe": tiny_moe}


def batch(rows: int = 4, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Padded rows, a few labels in each at places of their own."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 90, (rows, length), generator=draw)
    mask = (torch.arange(length) < length - torch.arange(rows).unsqueeze(1)).long()
    counted = (torch.rand(rows, length, generator=draw) < 0.5) & mask.bool()
    counted[:, 1] = True
    ids = ids.where(mask.bool(), 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(counted, -100)}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_loss_of_transformers(family):
    model = FAMILIES[family]().eval()
    made = tezo.closure(model, batch())
    assert isinstance(made, RowLosses)
    with torch.no_grad():
        stock = model(**batch()).loss
        torch.testing.assert_close(made().to(stock.dtype), stock, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(made.losses(3), made().expand(3))
        torch.testing.assert_close(made.example_losses(2).mean(1), made().expand(2))


def plain(model, given: dict[str, Tensor]) -> Tensor:
    """The same loss in float64; transformers computes it in float32."""
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())


@pytest.mark.parametrize("name", ["tezo", "head-feedback", "mezo", "tezo-adam"])
def test_a_step_is_that_of_the_plain_closure(name):
    model, twin = tiny_opt(), tiny_opt()
    optimizer, reference = (METHODS[name].build(own, lr=1e-2, seed=3) for own in (model, twin))
    for seed in range(4):
        given = batch(seed=seed)
        expected = reference.step(lambda given=given: plain(twin, given))
        assert optimizer.step(tezo.closure(model, given)) == pytest.approx(expected, rel=1e-9)


def test_rows_have_directions_of_their_own():
    model = tiny_opt()
    optimizer = tezo.tezo(model, lr=1e-2, rank=4, directions="per-example")
    optimizer.step(tezo.closure(model, batch()))
    assert len(optimizer.last_step.probes) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.pop("labels"), "no tensor 'labels'.*counts every token"),
        (lambda b: b.pop("input_ids"), "no tensor 'input_ids'"),
        (lambda b: b["labels"].fill_(-100), "row 0 .*no label"),
        (lambda b: b.update(labels=b["labels"][:, 1:]), "both must be"),
        (lambda b: b.update(position_ids=torch.arange(9)), "position_ids has no entry"),
        (lambda b: b.update(labels=b["labels"].tolist()), r"labels is list.*torch\.as_tensor"),
        (lambda b: b.update(use_cache=False), "use_cache has no entry"),
    ],
)
def test_other_batches_are_refused_in_a_sentence(change, words):
    given = batch()
    change(given)
    with pytest.raises(RequestError, match=words):
        tezo.closure(tiny_opt(), given)
    with pytest.raises(RequestError, match="the batch is list; give a dictionary"):
        tezo.closure(tiny_opt(), [batch()])


def test_a_model_of_another_kind_is_refused():
    encoder = tiny_roberta().roberta
    with pytest.raises(RequestError, match="no causal or masked"):
        tezo.closure(encoder, batch())
