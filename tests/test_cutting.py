"""Inputs that are too long are cut to fit: what is kept, what is counted, what is refused."""

import pytest
import torch
from folders import CAUSAL, bpe_tokenizer, is_closing, qwen_tokenizer, tiny_model, tokenizer_for, words_tokenizer
from questions import CPU, loss_of, slotted
from tokenizers import processors
from transformers import OPTConfig, OPTForCausalLM

from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives import objective_for
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.encoder import EncoderObjective
from tezo.tasks.objectives.masked import MaskedObjective
from tezo.tasks.row_files import DataConfig
from tezo.tasks.rows import CompletionFormat
from tezo.tasks.setup import make_objective


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


def test_without_a_special_token_at_its_end_a_text_loses_its_end_and_an_empty_one_is_refused():
    tokenizer = words_tokenizer()  # begins a text, and does not end it
    objective = EncoderObjective(tokenizer, CPU, 10, ("good", "bad"))
    example = Example("a film was very good " * 9, "", ("good", "bad"), 0, "a line")
    assert list(objective.encode(example).sequences[0]) == tokenizer(example.prompt)["input_ids"][:10]
    bare = bpe_tokenizer()
    bare.backend_tokenizer.post_processor = processors.ByteLevel()
    assert bare("")["input_ids"] == []
    with pytest.raises(RequestError, match=r"rows.jsonl, line 3: its text has no token"):
        EncoderObjective(bare, CPU, 10, ("good", "bad")).encode(
            Example("", "", ("good", "bad"), 0, "rows.jsonl, line 3")
        )


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
    assert bool(torch.isfinite(loss_of(model, objective, [one])))


def test_the_length_that_is_asked_for_is_the_length_that_is_used():
    tokenizer = tokenizer_for("opt")
    tokenizer.model_max_length = 10**30
    sizes = {"hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "word_embed_proj_dim": 8}
    model = OPTForCausalLM(OPTConfig(vocab_size=len(tokenizer), max_position_embeddings=5000, **sizes))
    loaded, form = LoadedModel(model, tokenizer, "causal"), CompletionFormat("prompt", "completion", str)
    assert loaded.max_length == 5000

    def length(asked: int | None, new: int = 0) -> int:
        return make_objective(DataConfig(train="rows.jsonl", max_length=asked), loaded, form, new).max_length

    assert (length(None), length(None, 48)) == (2048, 2000)  # the default is bounded, what is asked for is not
    assert (length(4096), length(5000), length(5000, 48)) == (4096, 5000, 4952)
    with pytest.raises(RequestError, match=r"data\.max_length is 5001, but the model takes 5000 tokens"):
        length(5001)
