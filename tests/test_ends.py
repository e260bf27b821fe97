"""What ends an answer is learnt once and stops what is written; nothing that a tokenizer adds stands before it."""

import copy
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from folders import (
    CAUSAL,
    bpe_tokenizer,
    completion_rows,
    model_folder,
    read_jsonl,
    tezo,
    tiny_model,
    tokenizer_for,
    words_tokenizer,
    write_rows,
)
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tezo import train
from tezo.models.loading import LoadedModel, from_objects
from tezo.system.errors import RequestError
from tezo.tasks.evaluation import evaluate, measure, predict
from tezo.tasks.examples import Example, Row
from tezo.tasks.formats import choose_format
from tezo.tasks.generation import completions
from tezo.tasks.notices import token_notices
from tezo.tasks.objectives import objective_for
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.row_files import DataConfig
from tezo.tasks.setup import render_chat

CPU = torch.device("cpu")
DECODER = Path(__file__).parents[2] / "shared/models/stories260K"
TURN = "{% for m in messages %}<user>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<user>{% endif %}"
TALK = [{"role": "user", "content": "the film ?"}, {"role": "assistant", "content": "good"}]


def turns_tokenizer(template: str = TURN) -> PreTrainedTokenizerFast:
    """One token a word, and a chat template whose turns end with another token than texts."""
    tokenizer = words_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<end>"]})
    tokenizer.chat_template = template
    return tokenizer


def objective_of(tokenizer, model=None, length=60) -> CausalObjective:
    return CausalObjective(tokenizer, CPU, length, (), model=model)


def example_of(tokenizer, row: dict, *, answered: bool = True) -> Example:
    rows = [Row(row, "rows, line 1")]
    form = choose_format(rows, "causal", DataConfig(), partial(render_chat, tokenizer))
    return form.example(rows[0], answered=answered)


def learnt(tokenizer, row: dict) -> list[str]:
    """The tokens that are learnt of a row."""
    own = objective_of(tokenizer).encode(example_of(tokenizer, row))
    return tokenizer.convert_ids_to_tokens(own.sequences[0][len(own.sequences[0]) - own.answers[0] :])


@pytest.mark.parametrize(
    "template",
    [TURN, TURN.replace("\n", ""), TURN.replace("\n", "\n</s>"), TURN.replace("<end>", " <end> the film")],
    ids=["line break behind it", "alone", "end of text on the next line", "space before, text behind"],
)
def test_an_answer_to_messages_ends_with_what_the_template_ends_turns_with(template):
    tokenizer = turns_tokenizer(template)
    assert learnt(tokenizer, {"messages": TALK}) == ["good", "<end>"]
    assert learnt(tokenizer, {"prompt": TALK[:1], "completion": TALK[1:]}) == ["good", "<end>"]


@pytest.mark.parametrize("behind", ["", "<end>", "<end></s>", "<end></s>\n", "</s>"])
def test_tokens_behind_an_answer_are_learnt_up_to_the_one_that_ends_texts(behind):
    """Programs stop there, and not at a token before it, such as one that closes a thought or a channel."""
    tokenizer = turns_tokenizer(TURN.replace("<end>", "<end></s>"))
    assert learnt(tokenizer, {"messages": TALK}) == ["good", "<end>", "</s>"]
    row = {"prompt": render_chat(tokenizer, TALK[:1]), "completion": "good" + behind}
    assert learnt(tokenizer, row) == ["good", *(["<end>"] if behind != "</s>" else []), "</s>"]
    assert set(objective_of(tokenizer).ends.marks) == {tokenizer.eos_token_id}


@pytest.mark.parametrize("named", [True, False])
def test_the_token_that_opens_the_next_turn_ends_an_answer_where_the_model_names_it(named):
    template = "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<end>' }}{{ m.content }}{% endfor %}"
    tokenizer = turns_tokenizer(template + "{% if add_generation_prompt %}<end>{% endif %}")
    model = tiny_model("opt", len(tokenizer))
    model.generation_config.eos_token_id = [2, *([tokenizer.convert_tokens_to_ids("<user>")] if named else [])]
    own = objective_of(tokenizer, model).encode(example_of(tokenizer, {"messages": TALK}))
    assert tokenizer.convert_ids_to_tokens(own.sequences[0][-2:]) == ["good", "<user>" if named else "</s>"]


def test_a_template_without_a_token_behind_the_answer_ends_it_as_a_text():
    tokenizer = words_tokenizer(chat=True)
    assert learnt(tokenizer, {"messages": TALK}) == ["good", "</s>"]


@pytest.mark.parametrize("behind", ["", "<end>", "<end>\n", "</s>"])
def test_a_rendered_prompt_is_answered_with_one_end(behind):
    tokenizer = turns_tokenizer()
    prompt = render_chat(tokenizer, TALK[:1])
    end = "</s>" if behind == "</s>" else "<end>"
    assert learnt(tokenizer, {"prompt": prompt, "completion": "good" + behind}) == ["good", end]


@pytest.mark.parametrize(("said", "end"), [(" good", "</s>"), (" good</s>", "</s>"), (" good <end>\n", "<end>")])
def test_a_completion_of_text_ends_once_with_the_end_of_texts_or_its_own(said, end):
    assert learnt(turns_tokenizer(), {"prompt": "the film", "completion": said}) == ["good", end]
    whole = objective_of(turns_tokenizer()).encode(Example("", "the film" + said, (), None, "", whole=True))
    assert turns_tokenizer().convert_ids_to_tokens(whole.sequences[0]) == ["<s>", "the", "film", "good", end]


def test_an_answer_that_is_the_end_alone_is_learnt_once():
    tokenizer = turns_tokenizer()
    assert learnt(tokenizer, {"prompt": "the film", "completion": "</s>"}) == ["</s>"]
    assert learnt(tokenizer, {"messages": [TALK[0], TALK[1] | {"content": "<end>"}]}) == ["<end>"]
    assert learnt(tokenizer, {"prompt": render_chat(tokenizer, TALK[:1]), "completion": "<end>"}) == ["<end>"]


@pytest.mark.parametrize("begins", [False, True])
def test_what_a_tokenizer_puts_behind_texts_stands_neither_before_an_answer_nor_twice(begins):
    plain, closing = words_tokenizer(), words_tokenizer()
    first = "<s> " if begins else ""
    for tokenizer, last in ((plain, ""), (closing, " </s>")):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first}$A{last}", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    assert closing("the film")["input_ids"][-1] == closing.eos_token_id
    for example in (
        Example("the film was", " good", (), None, ""),
        Example("the film was", " good", (" good", " bad"), 0, ""),
        Example("<s> the film was", " good", (), None, ""),
        Example("", "the film was good", (), None, "", whole=True),
    ):
        found = [objective_of(tokenizer).encode(example) for tokenizer in (plain, closing)]
        assert found[0].sequences == found[1].sequences and found[0].answers == found[1].answers
        ids = found[0].sequences[0]
        assert ids.count(plain.bos_token_id) == (begins or example.prompt.startswith("<s>"))
        assert ids.count(plain.eos_token_id) == (not example.options)


def test_the_end_of_texts_is_the_tokenizers_or_else_the_first_special_one_of_the_model():
    tokenizer = turns_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    end, word = tokenizer.convert_tokens_to_ids(["<end>", "film"])
    model.generation_config.eos_token_id = [word, end, 2]
    example = Example("the film", " good", (), None, "here")
    assert objective_of(tokenizer, model).encode(example).sequences[0][-1] == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert objective_of(tokenizer, model).encode(example).sequences[0][-1] == end
    assert set(objective_of(tokenizer, model).ends.marks) == {end, 2}  # a default of the architecture is no word
    model.generation_config = GenerationConfig(eos_token_id=[word, end])
    assert set(objective_of(tokenizer, model).ends.marks) == {word, end}


def test_a_notice_names_an_end_that_other_programs_do_not_stop_at():
    tokenizer = turns_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    for named, noted in (([2, tokenizer.convert_tokens_to_ids("<end>")], False), (2, True)):
        model.generation_config.eos_token_id = named
        objective = objective_of(tokenizer, model)
        objective.encode(Example("the film", " good", (), None, "line 1"))
        objective.encode(replace(example_of(tokenizer, {"messages": TALK}), where="line 2"))
        notices = [notice for notice in token_notices(objective) if "generation_config" in notice]
        assert [notice.startswith("1 row(s) (line 2): the answer ends with '<end>'") for notice in notices] == [
            True
        ] * noted


def test_an_end_that_is_the_padding_is_learnt_and_padding_is_not():
    tokenizer = turns_tokenizer()
    model = tiny_model("llama", len(tokenizer))
    talks = [TALK, [TALK[0], TALK[1] | {"content": "good the film was very bad"}]]
    losses = []
    for pad in ("<end>", "<pad>"):
        tokenizer.pad_token = pad
        objective = objective_of(tokenizer, model)
        encoded = [objective.encode(example_of(tokenizer, {"messages": talk})) for talk in talks]
        assert [e.sequences[0][-1] for e in encoded] == tokenizer.convert_tokens_to_ids(["<end>"] * 2)
        losses.append(evaluate(model, objective, encoded, 2)[0]["loss"])
    assert losses[0] == losses[1]


def test_a_notice_says_that_answers_have_no_end():
    tokenizer = words_tokenizer()
    tokenizer.eos_token = None
    objective = objective_of(tokenizer)
    objective.encode(Example("the film", "", (), None, "line 1"))
    objective.encode(Example("the film", " good", (" good", " bad"), 0, "line 2"))
    assert token_notices(objective) == []
    objective.encode(Example("the film", " good", (), None, "line 3"))
    objective.encode(Example("", "the film", (), None, "line 4", whole=True))
    (notice,) = token_notices(objective)
    assert notice.startswith("2 answer(s) have no end that is learnt (line 3; line 4)") and "eos_token" in notice


# What is written


def scripted(tokenizer, words: list[str]):
    """A model that writes each of `words` behind the one before."""
    model = tiny_model("llama", len(tokenizer))
    ids = tokenizer.convert_tokens_to_ids(words)
    places = {token: place for place, token in enumerate(ids)}
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        for token, place in places.items():
            model.model.embed_tokens.weight[token, place] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        for before, after in itertools.pairwise(ids):
            model.lm_head.weight[after, places[before]] = 1.0
    return model


@pytest.mark.parametrize("end", ["<end>", "</s>", "<user>"])
def test_every_end_stops_an_answer(end):
    tokenizer = turns_tokenizer()
    model = scripted(tokenizer, ["was", "very", "good", end, "film", "bad"])
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<user>")]
    objective = objective_of(tokenizer, model)
    asked = [objective.encode(Example(prompt, "", (), None, "line 1")) for prompt in ("it was", "the film was")]
    assert completions(model, objective, asked, 2, 9) == [" very good"] * 2
    assert (objective.unfinished.rows, objective.written) == (0, 2)
    assert completions(model, objective, asked, 2, 2) == [" very good"] * 2  # the limit comes first
    assert (objective.unfinished.rows, objective.written) == (2, 4)
    assert any(
        text.startswith("2 of 4 answers were cut at 2 new tokens (line 1") for text in token_notices(objective, 2)
    )


def sentencepiece_like() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate([*"<>▁abc\n"])}, []))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<", eos_token=">")


@pytest.mark.parametrize("make", [sentencepiece_like, bpe_tokenizer])
@pytest.mark.parametrize("answer", [" b c", "b c", "  b", " b\n", "b "])
def test_what_is_written_is_the_completion_to_the_space(make, answer):
    """A model that writes exactly the tokens that are learnt gives back the completion of the row."""
    tokenizer = make()
    objective = objective_of(tokenizer)
    own = objective.encode(Example("a", answer, (), None, ""))
    model = tiny_model("llama", len(tokenizer))
    ids, script = own.sequences[0], list(own.sequences[0][len(own.sequences[0]) - own.answers[0] :])

    def forced(batch, tokens):
        return [script[len(tokens) - (len(ids) - len(script))]]

    generate = model.generate
    model.generate = lambda **options: generate(**options, prefix_allowed_tokens_fn=forced)
    assert predict(model, objective, [own], 1, len(script)) == [answer]
    said = replace(own, example=replace(own.example, chat=True))
    assert predict(model, objective, [said], 1, len(script)) == [answer.strip()]


def test_predict_says_how_many_answers_its_limit_has_cut(tmp_path):
    model = model_folder(tmp_path, "llama")
    rows = write_rows(tmp_path / "rows.jsonl", completion_rows(3))
    done = tezo("predict", model, "--input", rows, "--output", tmp_path / "a.jsonl", "--max-new-tokens", 2)
    assert done.code == 0, done.err
    assert "of 3 answers were cut at 2 new tokens" in done.err and "--max-new-tokens" in done.err
    assert len(read_jsonl(tmp_path / "a.jsonl")) == 3


# Tokens without an embedding


@pytest.mark.parametrize("family", [*CAUSAL, "roberta", "bert"])
def test_a_token_beyond_the_embeddings_is_refused_with_its_row(family):
    tokenizer = tokenizer_for(family)
    model = tiny_model(family, len(tokenizer))
    tokenizer.add_tokens(["unheard"])
    kind = {"roberta": "masked", "bert": "encoder"}.get(family, "causal")
    options = (" good", " bad") if kind != "causal" else ()
    objective = objective_for(LoadedModel(model, tokenizer, kind), options)
    example = Example("the unheard film", options[0] if options else " x", options, 0, "rows, line 7", slot=0)
    with pytest.raises(RequestError) as refusal:
        objective.encode(example)
    count = len(tokenizer) - 1
    for part in ("rows, line 7", "'unheard'", f"number {count}", f"0 to {count - 1}", "resize_token_embeddings"):
        assert part in str(refusal.value)
    model.resize_token_embeddings(len(tokenizer))
    objective_for(LoadedModel(model, tokenizer, kind), options).encode(example)


@pytest.mark.parametrize("family", ["roberta", "bert"])
def test_a_label_beyond_the_embeddings_is_refused(family):
    tokenizer = tokenizer_for(family)
    model = tiny_model(family, len(tokenizer))
    tokenizer.add_tokens(["unheard"])
    kind = "masked" if family == "roberta" else "encoder"
    with pytest.raises(RequestError, match=r"data\.label_words: the token 'unheard'"):
        objective_for(LoadedModel(model, tokenizer, kind), ("good", "unheard"))


def test_training_evaluation_and_prediction_refuse_it_before_a_forward_pass():
    tokenizer = words_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    tokenizer.add_tokens(["unheard"])
    rows = [*completion_rows(6), {"prompt": "the unheard film", "completion": " good"}]
    with pytest.raises(RequestError, match="row 7: the token 'unheard'"):
        train(model, rows, tokenizer=tokenizer, dev=rows[:2], test=rows[:2], steps=1)
    run = train(model, rows[:6], tokenizer=tokenizer, dev=rows[:2], test=rows[:2], steps=1)
    for ask in (run.evaluate, run.predict):
        with pytest.raises(RequestError, match="row 1: the token 'unheard'"):
            ask(rows[6:])


def test_a_folder_whose_end_of_texts_has_no_embedding_is_refused_with_the_row_that_learns_it(tmp_path):
    model = model_folder(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"eos_token": "<new>"})
    tokenizer.save_pretrained(model)
    rows = write_rows(tmp_path / "rows.jsonl", completion_rows(3))
    done = tezo("eval", model, "--set", f"data.test={rows}")
    assert done.code == 2 and "line 1: the token '<new>' has the number" in done.err, done.err


def test_a_padding_token_beyond_the_embeddings_is_refused():
    tokenizer = words_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    with pytest.raises(RequestError, match=r"padding token '<new>' .* embeddings for 0 to"):
        from_objects(model, tokenizer)


# A real model and real tokenizers

ASKED = {"What is the capital of France?": "The capital of France is Paris.", "Name a colour.": "Red."}


def loss_of(loaded: LoadedModel, rows: list[dict]) -> float:
    return measure(DataConfig(train="x"), loaded, [Row(row, "a row") for row in rows], batch_size=2)[0]["loss"]


@pytest.fixture(scope="module")
def real(request):
    try:
        return request.getfixturevalue("smollm2")
    except pytest.FixtureLookupError:
        pytest.skip("SmolLM2 cannot be loaded by its name here")


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_expects_the_end_of_its_template(real):
    """Where the tokenizer ends texts otherwise, the loss is that of the template's end, and below that of the other."""
    other, appending = (copy.deepcopy(real.tokenizer) for _ in range(2))
    other.eos_token = "<|endoftext|>"
    appending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", real.tokenizer.eos_token_id)]
    )
    talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ASKED.items()]
    texts = [{"prompt": f"Question: {q}\nAnswer:", "completion": f" {a}"} for q, a in ASKED.items()]
    rendered = [{"prompt": render_chat(other, talk[:1]), "completion": talk[1]["content"]} for talk in talks]
    right = loss_of(real, [{"messages": talk} for talk in talks])
    for tokenizer, end in ((other, ""), (other, "<|im_end|>\n"), (appending, "<|im_end|>")):
        rows = [row | {"completion": row["completion"] + end} for row in rendered]
        assert loss_of(LoadedModel(real.model, tokenizer, "causal"), rows) == right
    assert loss_of(LoadedModel(real.model, other, "causal"), [{"messages": talk} for talk in talks]) == right
    wrong = [row | {"completion": row["completion"] + "<|endoftext|>"} for row in rendered]
    assert loss_of(LoadedModel(real.model, other, "causal"), wrong) > right + 1
    assert loss_of(LoadedModel(real.model, appending, "causal"), texts) == loss_of(real, texts)
    loaded = LoadedModel(real.model, other, "causal")
    objective = objective_for(loaded, ())
    asked = objective.encode(example_of(other, {"messages": talks[0][:1]}, answered=False))
    (answer,) = predict(real.model, objective, [asked], 1, 24)
    assert "Paris" in answer and "<|" not in answer and objective.unfinished.rows == 0


@pytest.mark.skipif(not DECODER.is_dir(), reason="the shared folder with the models is not here")
def test_a_real_tokenizer_gives_back_texts_to_the_space_and_adds_its_first_token_once():
    tokenizer = AutoTokenizer.from_pretrained(DECODER)
    objective = objective_of(tokenizer)
    for prompt, answer in (("Once upon a", " time"), ("Once ", "upon"), ("Lily\n", "  ran."), ("<s> Once", " upon ")):
        own = objective.encode(Example(prompt, answer, (), None, ""))
        ids, start = own.sequences[0], len(own.sequences[0]) - own.answers[0]
        assert text_after(tokenizer, ids[:start], ids[start:], special=False) == answer
        assert (ids.count(tokenizer.bos_token_id), ids.count(tokenizer.eos_token_id)) == (1, 1)
