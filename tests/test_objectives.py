"""Losses and scores, against plain computations on the full logits, one row at a time, without padding."""

import copy
import math

import peft
import pytest
import torch
from folders import CAUSAL, label_rows, tiny_model, tokenizer_for, words_tokenizer
from questions import CPU, OPTIONS, case, free_text, labelled, loss_of, masked_examples, masked_texts, scores_of
from torch.nn import functional

from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.encoder import SCALE, EncoderObjective
from tezo.tasks.objectives.evaluators import logits_at
from tezo.tasks.objectives.masked import MaskedObjective

HEADED = (*CAUSAL, "roberta", "xlm-roberta")


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", HEADED)
@torch.no_grad()
def test_the_needed_logits_are_the_full_logits_at_those_positions(family, tied):
    model = tiny_model(family, 120, tie_word_embeddings=tied)
    ids = torch.randint(5, 120, (4, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:], mask[3, 2:] = 0, 0
    ids[mask == 0] = 1
    positions = torch.tensor([[0, 5, 10], [5, 3, 3], [9, 1, 0], [0, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    full = model(**inputs).logits
    expected = torch.stack([row[where] for row, where in zip(full, positions, strict=True)])
    for _ in range(2):  # and nothing stays behind on the model
        picked = logits_at(model, inputs, positions)
        assert picked.shape == (4, 3, 120)
        close(picked, expected)
        close(model(**inputs).logits, full, atol=0)


@pytest.mark.parametrize("family", HEADED)
@torch.no_grad()
def test_the_head_sees_only_the_needed_positions(family):
    model = tiny_model(family, 120)
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call[2].shape[:-1]))
    ids = torch.full((2, 9), 7)
    logits_at(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.tensor([[3, 4], [0, 1]]))
    assert seen == [(2, 2)]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
@pytest.mark.parametrize("family", CAUSAL)
@torch.no_grad()
def test_a_causal_model_keeps_no_keys_and_values(family, wrapped):
    model = tiny_model(family, 20)
    model.config.use_cache = True
    base, caches = model, []
    if wrapped:
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules="all-linear", fan_in_fan_out=family == "gpt2")
        )
    base.register_forward_hook(lambda _module, _args, output: caches.append(output.get("past_key_values")))
    ids = torch.arange(1, 7).view(1, 6)
    base(input_ids=ids)
    assert caches.pop() is not None, "the model would keep them by itself"
    logits_at(model, {"input_ids": ids}, torch.tensor([[5]]))
    assert caches == [None]


def plain_score(model, tokenizer, prompt: str, option: str) -> float:
    """Mean log-probability of the option's tokens, from one unpadded row's full logits."""
    start = len(tokenizer(prompt)["input_ids"])
    ids = tokenizer(prompt + option)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    log_probs = logits.log_softmax(-1)
    terms = [float(log_probs[at - 1, ids[at]]) for at in range(start, len(ids))]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("family", CAUSAL)
@torch.no_grad()
def test_an_options_score_is_the_mean_log_probability_of_its_tokens(family):
    tokenizer = tokenizer_for(family)
    model = tiny_model(family, len(tokenizer))
    objective = CausalObjective(tokenizer, CPU, 150, OPTIONS)
    examples = labelled()
    batch = objective.collate([objective.encode(example) for example in examples])
    scores = objective.evaluator.option_scores(model, batch)[0]
    expected = [[plain_score(model, tokenizer, e.prompt, option) for option in OPTIONS] for e in examples]
    close(scores.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
    loss = functional.cross_entropy(torch.tensor(expected), torch.tensor([e.label for e in examples]))
    close(objective.closure(model, [batch])(), loss, atol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
@torch.no_grad()
def test_the_loss_of_free_text_is_the_models_own_with_the_prompt_masked(family):
    tokenizer = tokenizer_for(family)
    model = tiny_model(family, len(tokenizer))
    objective = CausalObjective(tokenizer, CPU, 150, ())
    total, tokens = 0.0, 0
    encoded = [objective.encode(example) for example in free_text()]
    for one in encoded:
        ids = torch.tensor([one.sequences[0]])
        assert one.sequences[0][-1] == tokenizer.eos_token_id, "the end of the answer is learnt too"
        labels = ids.clone()
        labels[:, : ids.shape[1] - one.answers[0]] = -100
        own = float(model(input_ids=ids, labels=labels).loss)
        assert float(loss_of(model, objective, [one])) == pytest.approx(own, abs=1e-5)
        total, tokens = total + own * one.answers[0], tokens + one.answers[0]
    assert len({one.answers[0] for one in encoded}) > 1
    for parts in ([objective.collate(encoded)], objective.batches(encoded), [objective.collate([e]) for e in encoded]):
        assert float(objective.closure(model, parts)()) == pytest.approx(total / tokens, abs=1e-5)


def test_an_answer_does_not_vanish_in_a_prompt_that_ends_in_an_unknown_word():
    tokenizer = tokenizer_for("llama")
    objective = CausalObjective(tokenizer, CPU, 150, ())
    encoded = objective.encode(Example("once upon a t", "ime", (), None, "row 1"))
    answer = encoded.sequences[0][-encoded.answers[0] :]
    assert answer == (tokenizer.unk_token_id, tokenizer.eos_token_id)
    assert (objective.split.rows, objective.unknown.rows) == (1, 1)
    (plain,) = CausalObjective(tokenizer, CPU, 150, ()).encode(Example("once", " ", (), None, "row 2")).answers
    assert plain == 1  # an answer that is a space has no token besides the end


@torch.no_grad()
def test_a_masked_models_scores_are_the_logits_of_the_words_at_the_mask():
    tokenizer = words_tokenizer(closing=True)
    model = tiny_model("roberta", len(tokenizer))
    examples = masked_examples()
    objective = MaskedObjective(tokenizer, CPU, 100, examples[0].options)
    batch = objective.collate([objective.encode(example) for example in examples])
    words = [tokenizer.convert_tokens_to_ids(option.strip()) for option in examples[0].options]
    expected = []
    for text in masked_texts():
        ids = tokenizer(text.replace("{mask}", "<mask>"), return_tensors="pt")["input_ids"]
        at = int((ids[0] == tokenizer.mask_token_id).nonzero())
        expected.append(model(input_ids=ids).logits[0, at, words])
    close(objective.evaluator.option_scores(model, batch)[0], torch.stack(expected), atol=1e-5)
    loss = functional.cross_entropy(torch.stack(expected), torch.tensor([e.label for e in examples]))
    close(objective.closure(model, [batch])(), loss, atol=1e-5)


@torch.no_grad()
def test_an_encoders_scores_are_scaled_cosines_of_mean_states():
    tokenizer = words_tokenizer(closing=True)
    model = tiny_model("bert", len(tokenizer))
    options = ("good", "a bad stale meal")
    examples = [Example(r["text"], "", options, i % 2, "a line") for i, r in enumerate(label_rows(5, seed=3))]
    objective = EncoderObjective(tokenizer, CPU, 100, options)
    batch = objective.collate([objective.encode(example) for example in examples])

    def mean_state(text: str) -> torch.Tensor:
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double().mean(0)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))

    expected = torch.tensor([[SCALE * cosine(mean_state(e.prompt), mean_state(o)) for o in options] for e in examples])
    close(objective.evaluator.option_scores(model, batch)[0], expected, atol=1e-4)
    close(objective.closure(model, [batch])(), functional.cross_entropy(expected, batch.labels_B), atol=1e-4)
    model.embeddings.word_embeddings.weight.mul_(0.5)  # descriptions are encoded by the model as it now is
    fresh = EncoderObjective(tokenizer, CPU, 100, options)
    close(objective.closure(model, [batch])(), fresh.closure(model, [batch])(), atol=0)


@pytest.mark.parametrize("family", [*CAUSAL, "roberta", "bert"])
@torch.no_grad()
def test_a_row_scores_the_same_in_whatever_company(family):
    model, objective, examples = case(family)
    encoded = [objective.encode(example) for example in examples]
    assert len({one.length for one in encoded}) > 1, "no row is padded"
    together = scores_of(model, objective, encoded)
    alone = torch.cat([scores_of(model, objective, [one]) for one in encoded])
    backwards = scores_of(model, objective, encoded[::-1]).flip(0)
    close(together, alone, atol=1e-5)
    close(together, backwards, atol=1e-5)
    assert together.shape == (len(examples), len(examples[0].options))
    losses = [float(loss_of(model, objective, [one])) for one in encoded]
    mean = pytest.approx(sum(losses) / len(losses), abs=1e-5)
    for parts in ([objective.collate(encoded)], objective.batches(encoded), [objective.collate([e]) for e in encoded]):
        assert float(objective.closure(model, parts)()) == mean


@pytest.mark.parametrize("family", [*CAUSAL, "roberta", "bert"])
@torch.no_grad()
def test_the_loss_is_float32_for_a_half_precision_model_and_close_to_the_full_one(family):
    model, objective, examples = case(family)
    batch = objective.collate([objective.encode(example) for example in examples])
    expected = objective.closure(model, [batch])()
    for dtype in (torch.bfloat16, torch.float64):
        loss = objective.closure(copy.deepcopy(model).to(dtype), [batch])()
        assert loss.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
        assert float(loss) == pytest.approx(float(expected), rel=5e-2)
