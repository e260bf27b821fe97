"""Losses and scores, against plain computations on the full logits, one row at a time, without padding."""

import copy
import math

import peft
import pytest
import torch
from folders import (
    CAUSAL,
    bpe_tokenizer,
    completion_rows,
    is_closing,
    label_rows,
    qwen_tokenizer,
    tiny_model,
    tokenizer_for,
    words_tokenizer,
)
from torch.nn import functional

from tezo.errors import RequestError
from tezo.models import LoadedModel
from tezo.objectives import CausalObjective, EncoderObjective, MaskedObjective, objective_for
from tezo.objectives.encoder import SCALE
from tezo.objectives.logits import logits_at
from tezo.tasks import Example

CPU = torch.device("cpu")
HEADED = (*CAUSAL, "roberta", "xlm-roberta")
OPTIONS = (" good", " bad", " not so good", " very quite bad film")


def labelled(options=OPTIONS, count: int = 7) -> list[Example]:
    rows = label_rows(count, seed=3)
    return [
        Example(f"{row['text']}\nLabel:", options[i % len(options)], options, i % len(options), f"line {i}")
        for i, row in enumerate(rows)
    ]


def free_text(count: int = 5) -> list[Example]:
    return [Example(row["prompt"], row["completion"], (), None, "a line") for row in completion_rows(count, seed=3)]


def slotted(text: str, options=(" good", " bad"), label: int = 0, where: str = "a line") -> Example:
    """The example of a prompt with {mask} in it."""
    before, after = text.split("{mask}")
    return Example(before + after, options[label], options, label, where, slot=len(before))


def masked_texts(count: int = 6) -> list[str]:
    return [f"{row['text']} It was {{mask}}." for row in label_rows(count, seed=3)]


def masked_examples() -> list[Example]:
    options = (" good", " bad", " fresh")
    return [slotted(text, options, i % 3, f"line {i}") for i, text in enumerate(masked_texts())]


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
    scores = objective.scores(model, batch)
    expected = [[plain_score(model, tokenizer, e.prompt, option) for option in OPTIONS] for e in examples]
    close(scores.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
    loss = functional.cross_entropy(torch.tensor(expected), torch.tensor([e.label for e in examples]))
    close(objective.loss(model, batch), loss, atol=1e-5)


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
        assert float(objective.loss(model, objective.collate([one]))) == pytest.approx(own, abs=1e-5)
        total, tokens = total + own * one.answers[0], tokens + one.answers[0]
    assert len({one.answers[0] for one in encoded}) > 1
    for parts in ([objective.collate(encoded)], objective.batches(encoded), [objective.collate([e]) for e in encoded]):
        assert float(objective.loss(model, *parts)) == pytest.approx(total / tokens, abs=1e-5)


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
    close(objective.scores(model, batch), torch.stack(expected), atol=1e-5)
    loss = functional.cross_entropy(torch.stack(expected), torch.tensor([e.label for e in examples]))
    close(objective.loss(model, batch), loss, atol=1e-5)


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
    close(objective.scores(model, batch), expected, atol=1e-4)
    close(objective.loss(model, batch), functional.cross_entropy(expected, batch.labels_B), atol=1e-4)
    model.embeddings.word_embeddings.weight.mul_(0.5)  # descriptions are encoded by the model as it now is
    fresh = EncoderObjective(tokenizer, CPU, 100, options)
    close(objective.loss(model, batch), fresh.loss(model, batch), atol=0)


def case(family: str):
    """(model, objective, examples) of a family."""
    tokenizer = tokenizer_for(family)
    model = tiny_model(family, len(tokenizer))
    examples = masked_examples() if family == "roberta" else labelled()
    if family == "bert":
        examples = [Example(e.prompt, e.answer, e.options, e.label, e.where) for e in examples]
    kind = {"roberta": "masked", "bert": "encoder"}.get(family, "causal")
    return model, objective_for(LoadedModel(model, tokenizer, kind), examples[0].options), examples


@pytest.mark.parametrize("family", [*CAUSAL, "roberta", "bert"])
@torch.no_grad()
def test_a_row_scores_the_same_in_whatever_company(family):
    model, objective, examples = case(family)
    encoded = [objective.encode(example) for example in examples]
    assert len({one.length for one in encoded}) > 1, "no row is padded"
    together = objective.scores(model, objective.collate(encoded))
    alone = torch.cat([objective.scores(model, objective.collate([one])) for one in encoded])
    backwards = objective.scores(model, objective.collate(encoded[::-1])).flip(0)
    close(together, alone, atol=1e-5)
    close(together, backwards, atol=1e-5)
    assert together.shape == (len(examples), len(examples[0].options))
    losses = [float(objective.loss(model, objective.collate([one]))) for one in encoded]
    mean = pytest.approx(sum(losses) / len(losses), abs=1e-5)
    for parts in ([objective.collate(encoded)], objective.batches(encoded), [objective.collate([e]) for e in encoded]):
        assert float(objective.loss(model, *parts)) == mean


@pytest.mark.parametrize("family", [*CAUSAL, "roberta", "bert"])
@torch.no_grad()
def test_the_loss_is_float32_for_a_half_precision_model_and_close_to_the_full_one(family):
    model, objective, examples = case(family)
    batch = objective.collate([objective.encode(example) for example in examples])
    expected = objective.loss(model, batch)
    for dtype in (torch.bfloat16, torch.float64):
        loss = objective.loss(copy.deepcopy(model).to(dtype), batch)
        assert loss.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
        assert float(loss) == pytest.approx(float(expected), rel=5e-2)


@pytest.mark.parametrize("make", [words_tokenizer, bpe_tokenizer, qwen_tokenizer])
@pytest.mark.parametrize("length", [24, 40, 60])
def test_cutting_keeps_the_answer_and_the_first_token_and_counts_what_went(make, length):
    tokenizer = make()
    prompt = "a film " * 40 + "was very"
    long = Example(prompt, " not so good", (), None, "rows.jsonl, line 7")
    whole = CausalObjective(tokenizer, CPU, 10_000, ()).encode(long)
    objective = CausalObjective(tokenizer, CPU, length, ())
    cut = objective.encode(long)
    count = cut.answers[0]
    bos = 1 if whole.sequences[0][0] == tokenizer.bos_token_id else 0
    assert (cut.length, cut.answers) == (length, whole.answers)
    assert cut.sequences[0][bos:] == whole.sequences[0][bos + whole.length - length :]
    assert cut.sequences[0][:bos] == whole.sequences[0][:bos]
    assert tokenizer.decode(cut.sequences[0][-count:-1]).strip() == "not so good"
    assert (objective.cuts.rows, objective.cuts.tokens) == (1, whole.length - length)
    assert objective.cuts.examples == ["rows.jsonl, line 7"]
    objective.encode(Example("a film", " good", (), None, "rows.jsonl, line 8"))
    assert objective.cuts.rows == 1, "a row that fits is not cut"


def test_an_answer_that_the_tokenizer_joins_to_the_prompt_is_taken_by_itself():
    tokenizer = bpe_tokenizer()
    first, second = "the ga", "rden was good"
    prompt, answer = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (first, second))
    assert tokenizer(first + second, add_special_tokens=False)["input_ids"][: len(prompt)] != prompt
    encoded = CausalObjective(tokenizer, CPU, 40, ()).encode(Example(first, second, (), None, "a line"))
    assert list(encoded.sequences[0]) == [tokenizer.bos_token_id, *prompt, *answer, tokenizer.eos_token_id]
    assert encoded.answers == (len(answer) + 1,)


def test_an_answer_that_does_not_fit_is_refused():
    tokenizer = words_tokenizer()
    objective = CausalObjective(tokenizer, CPU, 8, ())
    with pytest.raises(RequestError, match="a line: the answer"):
        objective.encode(Example("a film", " good" * 7, (), None, "a line"))
    fits = objective.encode(Example("a film was", " good" * 5, (), None, "a line"))  # BOS, one word, five, EOS
    assert (fits.length, fits.answers) == (8, (6,))


@pytest.mark.parametrize("text", ["{} It was {{mask}} .", "It was {{mask}} : {}", "a film {} {{mask}} and {}"])
def test_cutting_keeps_the_mask_and_both_ends(text):
    tokenizer = words_tokenizer(closing=True)
    objective = MaskedObjective(tokenizer, CPU, 16, (" good", " bad"))
    ids = objective.encode(slotted(text.format("very " * 30, "quite " * 5))).sequences[0]
    assert len(ids) == 16
    assert ids.count(tokenizer.mask_token_id) == 1
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert objective.cuts.rows == 1


def test_cutting_a_text_for_an_encoder_keeps_its_beginning_and_both_ends():
    tokenizer = words_tokenizer(closing=True)
    objective = EncoderObjective(tokenizer, CPU, 10, ("good", "bad"))
    example = Example("a film was very good " * 9, "", ("good", "bad"), 0, "a line")
    whole = tokenizer(example.prompt)["input_ids"]
    assert list(objective.encode(example).sequences[0]) == [*whole[:9], whole[-1]]
    assert objective.cuts.tokens == len(whole) - 10


@pytest.mark.parametrize("family", [*CAUSAL, "roberta", "xlm-roberta", "bert"])
@torch.no_grad()
def test_the_longest_input_that_is_let_through_can_be_run(family):
    tokenizer = tokenizer_for(family)
    tokenizer.model_max_length = 10**30  # as tokenizers say that know no bound
    model = tiny_model(family, len(tokenizer))
    masked = family.endswith("roberta")
    kind = "masked" if masked else "encoder" if is_closing(family) else "causal"
    objective = objective_for(LoadedModel(model, tokenizer, kind), (" good", " bad"))
    text = "very " * 400
    plain = Example(text, " good", (" good", " bad"), 0, "a line")
    one = objective.encode(slotted(text + "It was {mask}") if masked else plain)
    assert objective.cuts.rows == 1
    assert one.length >= 150
    assert bool(torch.isfinite(objective.loss(model, objective.collate([one]))))
