"""Options that share a row: the scores of plain rows, for fewer tokens, and only where the model heeds the mask."""

import pytest
import torch
import transformers
from folders import GOOD, PLAIN, POSITIONS, label_rows, tiny_model, tokenizer_for, words_tokenizer
from questions import loss_of, scores_of
from torch import nn

from tezo.tasks.evaluation import evaluate, predict
from tezo.tasks.examples import Example
from tezo.tasks.notices import token_notices
from tezo.tasks.objectives.batch import MOST_TOKENS, like_lengths, packed_tree, tree_mask
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.closure import option_places
from tezo.tasks.objectives.packing import takes_packed

CPU = torch.device("cpu")
TREES = ("opt", "llama", "qwen2", "qwen3", "gpt2", "gemma", "gemma2", "neox", "phi")
SETS = {
    "unequal": (" good", " bad", " not so good", " very quite bad film"),
    "one token": (" good", " bad", " fresh"),
    "shared beginning": (" not so good", " not so bad", " not so", " not fresh"),
    "equal": (" not so good", " not so good"),
}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON = {"vocab_size": 320, "initializer_range": 0.2, "max_position_embeddings": POSITIONS}
TOKENS = [0, 9, 30, 12, 7, 41, 22, 15, 33, 8, 19, 27]


def build(family: str, vocabulary: int = 320, **changes) -> nn.Module:
    others = {
        "neox": ("GPTNeoX", SMALL | COMMON),
        "phi": ("Phi", SMALL | COMMON),
        "qwen3": ("Qwen3", SMALL | COMMON | {"head_dim": 8, "num_key_value_heads": 1}),
        "gemma": ("Gemma", SMALL | COMMON | {"head_dim": 8, "num_key_value_heads": 1}),
        "bloom": ("Bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 320, "initializer_range": 0.2}),
        "mistral": ("Mistral", SMALL | COMMON | {"num_key_value_heads": 1}),
        "mamba": ("Mamba", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 320, "initializer_range": 0.2}),
        "falcon": ("Falcon", SMALL | COMMON | {"alibi": True}),
    }
    if family not in others:
        return tiny_model(family, vocabulary, **changes)
    name, settings = others[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, name + "Config")(**(settings | changes))
        return getattr(transformers, name + "ForCausalLM")(config).eval()


def examples(options, count: int = 7) -> list[Example]:
    rows = label_rows(count, seed=3)
    return [
        Example(f"{row['text']}\nLabel:", options[i % len(options)], options, i % len(options), f"line {i}")
        for i, row in enumerate(rows)
    ]


def pair(family: str, options, **changes):
    """(model, objective that packs if the model lets it, one that never does, encoded examples)."""
    tokenizer = tokenizer_for(family)
    model = build(family, len(tokenizer), **changes)
    packing, plain = (CausalObjective(tokenizer, CPU, 150, options) for _ in range(2))
    encoded = [packing.encode(example) for example in examples(options)]
    packing.adapt(model, encoded)
    return model, packing, plain, encoded


def same(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


ATTENTIONS = [(f, a) for f in TREES for a in ("sdpa", "eager") if (f, a) != ("gemma2", "sdpa")]  # it has no sdpa


@pytest.mark.thinned
@pytest.mark.parametrize("options", SETS.values(), ids=SETS)
@pytest.mark.parametrize(("family", "attention"), ATTENTIONS)
@torch.no_grad()
def test_packed_scores_and_losses_are_those_of_plain_rows(family, options, attention):
    model, packing, plain, encoded = pair(family, options, attn_implementation=attention)
    assert packing.packs
    for some in (encoded, encoded[:1]):
        batch = packing.collate(some)
        assert len(batch.passes[0].example_R) == len(some)
        same(packing.evaluator.option_scores(model, batch)[0], scores_of(model, plain, some))
    assert len({len(packing.trees([one])[0][0].tokens) for one in encoded}) > 1, "no row is padded"
    expected = loss_of(model, plain, encoded)
    same(loss_of(model, packing, encoded), expected)
    same(packing.closure(model, packing.batches(encoded))(), expected)
    same(packing.closure(model, packing.batches(encoded)).losses(3), expected.expand(3))


@pytest.mark.parametrize("family", ["bloom", "mamba", "falcon"])
@torch.no_grad()
def test_a_model_that_does_not_take_such_a_mask_keeps_plain_rows(family):
    model, packing, plain, encoded = pair(family, SETS["unequal"])
    assert packing.packs is False
    batch, expected = packing.collate(encoded), plain.collate(encoded)
    assert torch.equal(batch.passes[0].inputs["input_ids"], expected.passes[0].inputs["input_ids"])
    assert torch.equal(scores_of(model, packing, encoded), scores_of(model, plain, encoded))


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", ["none", "positions", "mask", "both"])
@pytest.mark.parametrize("family", TREES)
def test_a_model_that_drops_the_mask_or_the_positions_is_found_out(family, fault, dtype):
    model = build(family).to(dtype)

    def drop(module, args, kwargs):
        inputs = dict(kwargs)
        if fault in ("mask", "both") and inputs["attention_mask"].ndim == 4:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if fault in ("positions", "both"):
            length = inputs["input_ids"].shape[1]
            inputs["position_ids"] = torch.arange(length).expand(len(inputs["input_ids"]), -1)
        return args, inputs

    model.register_forward_pre_hook(drop, with_kwargs=True)
    assert takes_packed(model, TOKENS) == (fault == "none")


def test_a_small_difference_that_is_more_than_rounding_is_found_out():
    model = build("llama")

    def tilt(module, args, kwargs, output):
        if kwargs["attention_mask"].ndim == 4:
            output.logits = output.logits + torch.linspace(0, 0.1, output.logits.shape[-1])
        return output

    model.register_forward_hook(tilt, with_kwargs=True)
    assert not takes_packed(model, TOKENS)


def test_a_model_that_drops_tokens_at_random_is_not_trusted():
    assert not takes_packed(build("opt").train(), TOKENS)


@torch.no_grad()
def test_rows_longer_than_a_sliding_window_stay_plain():
    model, packing, plain, encoded = pair("mistral", SETS["unequal"], sliding_window=14)
    assert packing.packs
    assert {len(packing.trees([one])[0]) == 4 for one in encoded} == {False, True}
    assert all(len(row.tokens) <= 14 or len(own) == 4 for one in encoded for own in packing.trees([one]) for row in own)
    assert max(one.length for one in encoded) > 14
    same(scores_of(model, packing, encoded), scores_of(model, plain, encoded))


@pytest.mark.parametrize("family", ["opt", "llama"])
@torch.no_grad()
def test_company_does_not_change_packed_scores(family):
    model, packing, _, encoded = pair(family, SETS["shared beginning"])
    together = scores_of(model, packing, encoded)
    alone = torch.cat([scores_of(model, packing, [one]) for one in encoded])
    same(together, alone)
    same(scores_of(model, packing, encoded[::-1]).flip(0), together)


@pytest.mark.parametrize("options", SETS.values(), ids=SETS)
@torch.no_grad()
def test_the_model_sees_the_prompt_once_and_no_last_token(options):
    model, packing, plain, encoded = pair("opt", options)
    seen = []
    model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"].numel()), with_kwargs=True)
    for one in encoded:
        seen.clear()
        scores_of(model, packing, [one])
        assert seen == [len({s[:stop] for s in one.sequences for stop in range(1, len(s))})]
        seen.clear()
        scores_of(model, plain, [one])
        assert seen == [len(one.sequences) * one.length]
    assert packing.closure(model, packing.batches(encoded)).tokens < plain.closure(model, plain.batches(encoded)).tokens


@torch.no_grad()
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("options", "shared"), [*zip(SETS.values(), (0, 0, 1, 2), strict=True)], ids=SETS)
def test_a_label_has_its_place_where_its_options_begin_to_differ(options, shared, packs):
    _, packing, plain, encoded = pair("llama", options)
    batch = (packing if packs else plain).collate(encoded)
    (found,), (rows,) = option_places(batch, 0, causal=True), batch.passes
    ids = rows.inputs["input_ids"]
    for example, row, position, stop in zip(encoded, found.row_P, found.position_P, found.stop_P, strict=True):
        common = example.sequences[0][: len(example.prompt) + shared]
        assert tuple(ids[row, : position + 1].tolist()) == common and stop == len(common)


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2"])
@torch.no_grad()
def test_the_features_of_a_probe_decide_between_options_that_differ_in_their_last_token(family):
    model, packing, plain, encoded = pair(family, (" not so good", " not so bad", " not so fresh"))
    last = [sequence[-1] for sequence in encoded[0].sequences]
    for objective in (packing, plain):
        scores, features = objective.evaluator.scores_and_features(model, objective.collate(encoded))
        expected = model.get_output_embeddings()(features)[:, last] / 3  # a score is a mean over three tokens
        same(*(part - part.mean(1, keepdim=True) for part in (scores, expected)))


def test_parts_of_like_length_are_cut_by_the_rows_that_are_run():
    model, packing, _, encoded = pair("opt", SETS["unequal"])
    del model
    for batch in packing.batches(encoded * 4):
        (rows,) = batch.passes
        lengths = (rows.ends_RL > 0).sum(1)
        assert rows.inputs["input_ids"].shape == (batch.shape_BO[0], lengths.max())
    costs = like_lengths([len(own[0].tokens) for own in packing.trees(encoded * 40)], [1] * (40 * len(encoded)), CPU)
    assert [batch.shape_BO[0] for batch in packing.batches(encoded * 40)] == [len(part) for part in costs]


def test_a_row_is_a_tree():
    first, second, third = (1, 2, 3, 4, 5), (1, 2, 3, 6), (1, 2, 7, 8, 9)
    row = packed_tree([first, second, third], [[1, 2, 3], [1, 2], [1, 2, 3]])
    assert list(row.tokens) == [1, 2, 3, 4, 7, 8]
    assert list(row.positions) == [0, 1, 2, 3, 2, 3]
    assert list(row.ends) == [6, 6, 4, 4, 6, 6]
    assert list(row.reads) == [1, 2, 3, 4, 5]
    assert [list(slots) for slots in row.slots] == [[0, 1, 2], [0, 1], [0, 3, 4]]
    visible = tree_mask(torch.tensor([[*row.ends, 0, 0]]), torch.float32)[0, 0] == 0
    above = [[], [0], [0, 1], [0, 1, 2], [0, 1], [0, 1, 4], [], []]
    assert [row.nonzero().flatten().tolist() for row in visible] == [[*own, i] for i, own in enumerate(above)]
    assert bool(visible.any(1).all()), "a row of the mask with nothing to see gives NaN"


@torch.no_grad()
def test_evaluation_and_prediction_pack_of_themselves():
    model, _, plain, encoded = pair("llama", SETS["unequal"])
    tokenizer = words_tokenizer()
    objective = CausalObjective(tokenizer, CPU, 150, SETS["unequal"])
    assert objective.packs is None
    scores = scores_of(model, plain, encoded)
    assert predict(model, objective, encoded, 3, 1) == [
        e.example.name_of(i) for e, i in zip(encoded, scores.argmax(1).tolist(), strict=True)
    ]
    assert objective.packs
    labels = torch.tensor([e.example.label for e in encoded])
    metrics = evaluate(model, objective, encoded, 3)[0]
    assert metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), rel=1e-4)


@torch.no_grad()
def test_another_model_is_tried_anew():
    _, packing, _, encoded = pair("opt", SETS["unequal"])
    assert packing.packs
    packing.adapt(build("bloom"), encoded)
    assert packing.packs is False


NUMBERS = tuple(f" {a} {b} {c}" for a in PLAIN for b in PLAIN[:4] for c in GOOD)


@pytest.mark.parametrize("family", ["opt", "bloom"])
@torch.no_grad()
def test_hundreds_of_options_are_scored_in_passes_of_bounded_size(family):
    model, packing, plain, encoded = pair(family, NUMBERS)
    seen = []
    model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"].shape), with_kwargs=True)
    batch = packing.collate(encoded[:2])
    scores = packing.evaluator.option_scores(model, batch, 2)
    assert packing.packs == (family == "opt")
    assert len(seen) > 1 or packing.packs
    assert any("times, once for each option" in notice for notice in token_notices(packing)) != packing.packs
    assert all(rows * length <= 2 * MOST_TOKENS for rows, length in seen)
    assert all(length <= POSITIONS for _, length in seen)
    expected = [scores_of(model, plain, [e]) for e in encoded[:2]]
    same(scores.flatten(0, 1), torch.cat(expected * 2))
    whole = sum(len(s) for e in encoded[:2] for s in e.sequences)
    prefixes = {s[:stop] for e in encoded[:2] for s in e.sequences for stop in range(1, len(s))}
    if packing.packs:
        assert len(prefixes) <= sum(rows.tokens for rows in batch.passes) <= 2 * len(prefixes) < whole / 10
    losses = packing.closure(model, packing.batches(encoded[:2])).losses(3)
    same(losses, loss_of(model, plain, encoded[:2]).expand(3))
