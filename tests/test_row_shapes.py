"""The shapes that rows have elsewhere are read as if they were written in the plain ones, or refused in a sentence."""

import json
from functools import partial

import pytest
import torch
from folders import (
    completion_rows,
    label_rows,
    message_rows,
    model_folder,
    read_jsonl,
    refused,
    settings,
    tezo,
    tiny_model,
    tokenizer_for,
    train,
    words_tokenizer,
    write_rows,
)
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tezo import train as tezo_train
from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.tasks.evaluation import evaluate, measure
from tezo.tasks.examples import Example, Row, check_answers
from tezo.tasks.formats import choose_format
from tezo.tasks.notices import label_notices, rows_as_read, token_notices
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.row_files import DataConfig
from tezo.tasks.setup import make_format, make_objective, render_chat, with_shots
from tezo.tasks.splits import rows_of

CHAT = words_tokenizer(chat=True)
SYSTEM = {"role": "system", "content": "be kind"}
QUESTION = {"role": "user", "content": "the film ?"}
ANSWER = {"role": "assistant", "content": "fine"}
SHARED = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "the film ?"},
    {"from": "gpt", "value": "fine"},
]


def form_of(row: dict, kind: str = "causal", **fields):
    return choose_format([Row(row, "rows, line 1")], kind, DataConfig(**fields), partial(render_chat, CHAT))


def example(row: dict, *, answered: bool = True, **fields) -> Example:
    return form_of(row, **fields).example(Row(row, "rows, line 1"), answered=answered)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHARED},
        {"messages": SHARED},
        {"conversations": [SYSTEM, QUESTION, ANSWER]},
        {"prompt": [SYSTEM, QUESTION], "completion": [ANSWER]},
        {"prompt": SHARED[:2], "completion": SHARED[2:]},
    ],
    ids=["sharegpt", "sharegpt as messages", "roles as conversations", "trl", "trl in sharegpts words"],
)
def test_a_conversation_is_the_same_example_however_it_is_written(row):
    plain = {"messages": [SYSTEM, QUESTION, ANSWER]}
    assert example(row) == example(plain)
    asked = {name: value[:2] for name, value in row.items() if name != "completion"}
    assert example(asked, answered=False) == example({"messages": [SYSTEM, QUESTION]}, answered=False)


def test_an_instruction_is_put_in_alpacas_words():
    row = {"instruction": "Count to {input}.", "input": "three", "output": "1 2 3", "text": "all of it"}
    tail = "\n\n### Instruction:\nCount to {input}.\n\n### Input:\nthree\n\n### Response:\n"
    assert example(row).prompt.endswith("completes the request." + tail) and example(row).answer == "1 2 3"
    for empty in ("", None):
        assert example(row | {"input": empty}).prompt.endswith(tail.replace("### Input:\nthree\n\n", ""))
    bare = {"instruction": row["instruction"]}
    assert example(bare, answered=False).prompt == example(row | {"input": ""}).prompt


def test_the_shape_goes_by_the_fields():
    shapes = {
        "text": {"text": "a film"},
        "label": {"text": "a film", "instruction": "x", "label": "good"},
        "completion": {"prompt": "a", "completion": "b", "text": "a b"},
        "instruction": {"instruction": "a", "output": "b", "text": "a b"},
        "messages": {"conversations": SHARED, "text": "a b"},
    }
    more = label_rows(2)
    for shape, row in shapes.items():
        rows = [Row(row, "rows, line 1"), *(Row(other, "rows, line 2") for other in more if shape == "label")]
        assert choose_format(rows, "causal", DataConfig(), str).shape == shape
    words = {"label_words": {"good": "good", "bad": "bad"}}
    assert form_of({"text": "a film"}, **words).shape == "label", "a row without its label, which is asked for"


# Names of fields


NAMES = {
    "label": {"text": "the film", "label": "good"},
    "completion": {"prompt": "a", "completion": "b"},
    "instruction": {"instruction": "a", "input": "x", "output": "b"},
    "messages": {"conversations": SHARED},
    "text": {"text": "the film"},
}


@pytest.mark.parametrize("change", [str.title, str.upper, " {} ".format, lambda name: f"\t{name.title()}"])
@pytest.mark.parametrize("shape", NAMES)
def test_a_name_may_differ_in_case_and_blanks(shape, change):
    words = {"label_words": {"good": "good", "bad": "bad"}} if shape == "label" else {}
    row = NAMES[shape]
    changed = {change(name): value for name, value in row.items()}
    assert form_of(changed, **words).shape == shape
    assert example(changed, **words) == example(row, **words)
    exact = {**changed, **row} | {change(name): "no" for name in row}
    assert example(exact, **words) == example(row, **words), "the name itself comes first"


def test_two_names_that_differ_only_in_case_are_asked_about():
    with pytest.raises(RequestError, match="'Label' and 'LABEL' are both 'label'; rename one"):
        form_of({"text": "x", "Label": "a", "LABEL": "b"})


@pytest.mark.parametrize(
    ("row", "fields", "parts"),
    [
        *(({"text": "x", own: "a"}, {}, [repr(own), f"data.label={own}", "data.shape=text"])
          for own in ("labels", "Labels", " labels", "lable", "gold_label", "label-text")),
        ({"text": "x", "completion": "a"}, {}, ["data.prompt=text and data.completion=completion"]),
        ({"text": "x", "input": "y", "Outputs": "a"}, {}, ["data.completion=Outputs"]),
        ({"text": "x", "label": "a"}, {"label": "mood"}, ["data.label is 'mood'", "text, label"]),
        ({"text": "x", "reply": "a"}, {"completion": "answer"}, ["data.completion is 'answer'", "text, reply"]),
        ({"prompts": "x", "completions": "a"}, {}, ["did you mean data.prompt=prompts data.completion=completions?"]),
        ({"prompts": "x", "completion": "a"}, {}, ["did you mean data.prompt=prompts?"]),
        ({"completion": "a"}, {}, ["beside 'completion' there is no field 'prompt'", "data.text=completion"]),
        ({"question": "x", "Completion": "a"}, {}, ["no field 'prompt', but question, Completion; set data.prompt"]),
        ({"prompt": "x", "response": "a"}, {}, ["'completion'", "prompt, response", "set data.completion"]),
        ({"instruction": "x", "response": "a"}, {}, ["'output'", "data.prompt=instruction and data.completion"]),
    ],
)  # fmt: skip
def test_a_name_that_is_like_one_is_asked_about(row, fields, parts):
    with pytest.raises(RequestError) as refusal:
        example(row, **fields)
    assert all(part in str(refusal.value) for part in parts), refusal.value
    if "text" in row:
        assert example(row, shape="text").answer == "x", "the way out that the sentence names"


def test_other_fields_beside_a_text_are_not_answers():
    for own in ("id", "title", "context", "table", "url", "next", "source", "messages_count"):
        assert form_of({"text": "x", own: "a"}).shape == "text"


def test_a_field_beside_a_text_with_few_values_is_asked_about():
    def rows(values):
        return [Row({"text": "x", "id": i, "kind": value}, f"rows, line {i}") for i, value in enumerate(values)]

    def form(values, **fields):
        data = DataConfig(train="x", **fields)
        return choose_format(rows(values), "causal", data, lambda _: "")

    labels = ["bug", "wish", "question"] * 10
    with pytest.raises(RequestError, match=r"'kind' has 3 values .bug, wish, question.; set data.label=kind"):
        form(labels)
    assert form(labels, label="kind").labels == ("bug", "question", "wish")
    assert form(labels, shape="text").shape == "text"
    assert form(["one source"] * 30).shape == "text"
    assert form([f"title {n}" for n in range(30)]).shape == "text"


# What was read, shown


def as_read(rows: list[dict], family: str = "opt", *, scored: bool = False, **fields) -> tuple[str, str]:
    tokenizer = tokenizer_for(family)
    kind = "encoder" if family == "bert" else "masked" if family == "roberta" else "causal"
    loaded = LoadedModel(tiny_model(family, len(tokenizer)), tokenizer, kind)
    data = DataConfig(train="x", **fields)
    numbered = [Row(row, f"rows, line {n}") for n, row in enumerate(rows, start=1)]
    form = make_format(data, loaded, numbered)
    objective = make_objective(data, loaded, form)
    return rows_as_read(form, numbered[0], objective, objective.encode(form.example(numbered[0])), scored=scored)


def test_the_shape_the_fields_and_a_row_are_shown_with_what_is_learnt():
    rows = [{"id": 1, "text": "the film", " Label": "good"}, {"text": "a meal", " Label": "bad"}]
    shape, row = as_read(rows)
    assert shape == "label rows of text, label (here ' Label'); not read: id; labels: bad, good"
    assert row == "rows, line 1, as the model reads it (6 tokens, the last 1 learnt): '<s> the film Label :' -> ' good'"
    shape, row = as_read([{"prompt": "the film :", "completion": " very good"}])
    assert shape == "completion rows of prompt, completion"
    assert "(7 tokens, the last 3 learnt): '<s> the film :' -> ' very good </s>'" in row
    shape, row = as_read([{"text": "the film", "id": 7}])
    assert shape == "text rows of text; not read: id" and "'<s>' -> ' the film </s>'" in row
    assert as_read(rows, "bert")[1].endswith("(4 tokens): '<s> the film </s>' -> 'good'")
    assert as_read(rows, "roberta")[1].endswith("'<s> the film It was <mask> . </s>' -> ' good'")


@pytest.mark.parametrize("many", [3, 90])
def test_a_long_row_is_shown_in_part_with_all_of_its_tokens_counted(many):
    row = as_read([{"prompt": "the film " * many, "completion": "good bad " * (many // 3)}])[1]
    text = f"({2 + 2 * many + 2 * (many // 3)} tokens" if many == 3 else "(158 tokens"
    assert text in row and len(row) < 420 and ("..." in row) == (many > 3)


# Empty answers


@pytest.mark.parametrize("empty", ["", "  ", "\n", None, float("nan")])
@pytest.mark.parametrize("part", ["train", "dev", "test", "eval"])
def test_an_empty_answer_is_refused_with_the_rows(empty, part):
    rows = completion_rows(8)
    faulty = [*rows, *({"prompt": "the film", "completion": empty} for _ in range(4))]
    tokenizer = words_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    parts = {"train": rows, "dev": rows, "test": rows} | {part: faulty}
    with pytest.raises(RequestError, match=r"4 of \d+ rows have an empty answer \(.*, row 9; .*row 11 and 1 more\)"):
        if part == "eval":
            loaded = LoadedModel(model, tokenizer, "causal")
            measure(DataConfig(train="x"), loaded, rows_of(faulty, "data"), batch_size=4)
        else:
            tezo_train(model, parts["train"], tokenizer=tokenizer, dev=parts["dev"], test=parts["test"], steps=1)


def test_instructions_and_conversations_without_an_answer_are_refused():
    talk = [QUESTION, ANSWER | {"content": " "}]
    for row in ({"instruction": "x", "output": None}, {"messages": talk}, {"prompt": talk[:1], "completion": talk[1:]}):
        with pytest.raises(RequestError, match=r"1 of 1 rows have an empty answer .rows, line 1.; .*write the token"):
            check_answers([example(row)])
    check_answers([example({"prompt": "x", "completion": CHAT.eos_token})])  # asked for in words


# Plain text


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2", "qwen2"])
def test_the_loss_of_a_text_is_the_mean_over_all_tokens_after_the_first(family):
    tokenizer = tokenizer_for(family)  # Qwen's has no token in front
    model = tiny_model(family, len(tokenizer)).double()
    loaded = LoadedModel(model, tokenizer, "causal")
    rows = [Row({"text": row["text"]}, "rows") for row in label_rows(5)]
    form = make_format(DataConfig(train="x"), loaded, rows)
    objective = make_objective(DataConfig(train="x"), loaded, form)
    encoded = [objective.encode(form.example(row)) for row in rows]
    sums, counts = 0.0, 0
    for row, own in zip(rows, encoded, strict=True):
        ids = torch.tensor([[*tokenizer(row.fields["text"])["input_ids"], tokenizer.eos_token_id]])
        assert own.sequences == (tuple(ids[0].tolist()),) and own.answers == (ids.shape[1] - 1,)
        sums += model(input_ids=ids, labels=ids).loss.item() * own.answers[0]
        counts += own.answers[0]
    with torch.no_grad():
        assert float(objective.closure(model, [objective.collate(encoded)])()) == pytest.approx(sums / counts, rel=1e-5)
    assert evaluate(model, objective, encoded, 2)[0]["loss"] == pytest.approx(sums / counts, rel=1e-5)


def test_a_text_that_is_too_long_keeps_its_beginning_and_an_empty_one_is_refused():
    tokenizer = words_tokenizer()
    loaded = LoadedModel(tiny_model("opt", len(tokenizer)), tokenizer, "causal")
    rows = [Row({"text": "a film " * 20}, "rows, line 1")]
    data = DataConfig(train="x", max_length=12)
    form = make_format(data, loaded, rows)
    objective = make_objective(data, loaded, form)
    (kept,) = objective.encode(form.example(rows[0])).sequences
    assert list(kept) == tokenizer("a film " * 20)["input_ids"][:12]
    (notice,) = token_notices(objective)
    assert "rows, line 1" in notice and "30 tokens cut, the end of the text" in notice
    with pytest.raises(RequestError, match="line 2: the text is empty"):
        objective.encode(form.example(Row({"text": " "}, "rows, line 2")))
    with pytest.raises(RequestError, match="shots is 2, but texts"):
        with_shots(form, data, loaded, 2, 0)


# Refused


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"text": "x", "label": 3.5}, ["field 'label' is 3.5", "decimals", "a prompt and a completion"]),
        ({"text": "x", "label": ["a", "b"]}, ["several labels", "a row for each"]),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, ["preference", "data.completion=chosen"]),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION]}, ["preference", "data.messages=chosen"]),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, ["from 'narrator'", "human"]),
        ({"conversations": [{"from": "human"}]}, ["'conversations'", "not a list of"]),
        ({"prompt": [QUESTION], "completion": [ANSWER, QUESTION]}, ["'completion'", "one message"]),
        ({"prompt": [QUESTION], "completion": "fine"}, ["'completion'", "not a list of"]),
        ({"instruction": "x", "input": "y"}, ["'output'"]),
        ({"messages": [QUESTION, ANSWER | {"weight": 0}]}, ["weight 0", "remove that row"]),
        ({"prompt": [QUESTION, ANSWER], "completion": [ANSWER]}, ["'prompt'", "the assistant's", "another turn"]),
        ({"prompt": "half of \ud83d", "completion": "x"}, ["surrogate pair"]),
    ],
)
def test_rows_that_cannot_be_learnt_say_what_to_do(row, parts):
    with pytest.raises(RequestError) as refusal:
        example(row)
    assert "rows, line 1" in str(refusal.value)
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_what_was_chosen_is_learnt_where_it_is_named():
    pair = {"prompt": "x", "chosen": " a", "rejected": " b"}
    assert example(pair, completion="chosen").answer == " a"
    talk = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION]}
    assert example(talk, messages="chosen") == example({"messages": [QUESTION, ANSWER]})


# What a chat template makes of an answer

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
OPENED = "{% if add_generation_prompt %}<assistant>{% endif %}"
STRIPPED = TURN.replace("m.content", "m.content | trim") + OPENED
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
THOUGHTFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</s>{% endfor %}" + OPENED
)


@pytest.mark.parametrize(
    ("template", "prompt", "answer"),
    [
        (TURN + OPENED, "<user>the film ?</s><assistant>", "fine"),
        (STRIPPED, "<user>the film ?</s><assistant>", "fine"),
        (SPACED, "<s>[INST] the film ? [/INST]", " fine"),
        (TURN, "<user>the film ?</s><assistant>", "fine"),
        (THOUGHTFUL, "<user>the film ?</s><assistant>", "<think>a film</think>fine"),
    ],
    ids=["plain", "strips", "puts a space before it", "opens no turn in prompts", "writes its thought"],
)
def test_prompt_and_answer_are_the_beginning_of_what_the_template_writes(template, prompt, answer):
    tokenizer = words_tokenizer()
    tokenizer.chat_template = template
    said = ANSWER | {"reasoning_content": "a film"}
    if template is STRIPPED:
        said["content"] = "\n fine "
    row = Row({"messages": [QUESTION, said]}, "rows, line 1")
    form = choose_format([row], "causal", DataConfig(), partial(render_chat, tokenizer))
    found = form.example(row)
    assert (found.prompt, found.answer) == (prompt, answer)
    assert form.example(row, answered=False).prompt == prompt
    whole = tokenizer.apply_chat_template([QUESTION, said], tokenize=False)
    assert whole.removeprefix(prompt + answer).strip() == "</s>"


def test_what_a_template_leaves_out_is_refused():
    tokenizer = words_tokenizer()
    tokenizer.chat_template = TURN.replace("%}<{{", "if m.role in ('user', 'assistant') %}<{{") + OPENED
    rows = [Row({"messages": [{"role": "developer", "content": "be kind"}, QUESTION, ANSWER]}, "rows, line 1")]
    form = choose_format(rows, "causal", DataConfig(), partial(render_chat, tokenizer))
    with pytest.raises(RequestError, match=r"line 1: .* leaves out messages of the role 'developer'"):
        form.example(rows[0])


@pytest.mark.parametrize("more", ["{% if m.name is undefined %}{{ raise_exception('no name') }}{% endif %}", ""])
def test_where_a_template_cannot_be_tried_the_answer_is_what_was_said(more):
    tokenizer = words_tokenizer()
    tokenizer.chat_template = TURN.replace("%}<", f"%}}{more}<").replace("m.content", "m.content | upper") + OPENED
    row = Row({"messages": [message | {"name": "x"} for message in (QUESTION, ANSWER)]}, "rows, line 1")
    form = choose_format([row], "causal", DataConfig(), partial(render_chat, tokenizer))
    assert form.example(row).answer == "fine"


def test_a_thought_that_the_prompt_opens_is_neither_opened_twice_nor_left_open():
    tokenizer = words_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    )
    rows = [
        Row({"messages": [QUESTION, {"role": "assistant", "content": text}]}, "rows, line 1")
        for text in ("<think>\na film</think>fine", "a film</think>fine", "fine")
    ]
    form = choose_format(rows, "causal", DataConfig(), partial(render_chat, tokenizer))
    for row in rows[:2]:
        assert form.example(row).answer == "a film</think>fine"
        assert form.example(row).prompt.endswith("<assistant><think>\n")
    with pytest.raises(RequestError, match=r"line 1: .* opens a thought"):
        form.example(rows[2])


def test_a_null_of_a_table_of_several_shapes_is_no_field():
    pair = {"prompt": "a", "completion": " b"}
    assert example(pair | {"messages": None}) == example(pair)
    assert example({"messages": None, "conversations": SHARED, "prompt": None}) == example({"conversations": SHARED})


def test_an_answer_behind_a_space_gets_no_second_one():
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate([*"<>▁ab\n", "▁b"])}, [("▁", "b")]))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<", eos_token=">")
    objective = CausalObjective(tokenizer, torch.device("cpu"), 50, ())
    for prompt, answer in (("a ", "b"), ("a", " b"), ("a", "b"), ("a\n", "b b")):
        (tokens,) = objective.encode(Example(prompt, answer, (), None, f"{prompt!r}")).sequences
        assert tokenizer.decode(tokens, skip_special_tokens=True) == prompt + answer
    (notice,) = token_notices(objective)
    assert "1 prompt(s) end inside" in notice and "('a ')" in notice and "begin the answer with it" in notice


def test_a_prompt_that_begins_with_the_first_token_gets_no_second_one():
    loaded = LoadedModel(tiny_model("opt", len(CHAT)), CHAT, "causal")
    rows = [Row({"prompt": start + "the film ?", "completion": " fine"}, "rows, line 1") for start in ("", "<s>")]
    form = make_format(DataConfig(train="x"), loaded, rows)
    objective = make_objective(DataConfig(train="x"), loaded, form)
    plain, rendered = (objective.encode(form.example(row)).sequences for row in rows)
    assert plain == rendered and plain[0].count(CHAT.bos_token_id) == 1


def test_a_notice_says_where_an_answer_has_characters_that_the_tokenizer_does_not_know():
    loaded = LoadedModel(tiny_model("opt", len(CHAT)), CHAT, "causal")
    rows = [
        Row({"prompt": "the film", "completion": word}, f"rows, line {i}") for i, word in enumerate([" good", " 漢"])
    ]
    form = make_format(DataConfig(train="x"), loaded, rows)
    objective = make_objective(DataConfig(train="x"), loaded, form)
    objective.encode(form.example(Row({"prompt": "the 漢", "completion": " good"}, "rows, line 2")))
    assert token_notices(objective) == []
    objective.encode(form.example(rows[1]))
    (notice,) = token_notices(objective)
    assert "1 answer(s)" in notice and "rows, line 1" in notice and "<unk>" in notice


def test_measurements_are_no_labels_and_a_few_numbers_are():
    def labels(count):
        rows = [Row({"text": f"row {i}", "label": f"{i}.5"}, f"rows, line {i}") for i in range(count)]
        return choose_format(rows, "causal", DataConfig(), str).labels

    assert len(labels(10)) == 10
    with pytest.raises(RequestError, match="labels are 30 numbers with decimals"):
        labels(30)


@pytest.mark.parametrize("kind", ["masked", "encoder"])
def test_plain_text_needs_a_causal_model_or_labels(kind):
    with pytest.raises(RequestError, match=f"text rows need a causal model, but this model is {kind}.*label_words"):
        form_of({"text": "x"}, kind=kind)


# Through the command line


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt", chat=True)
    model_folder(root, "bert")
    return root


def shaped(name: str, count: int) -> list[dict]:
    pairs = [(row["prompt"], row["completion"].strip()) for row in completion_rows(count)]
    return {
        "text": [{"text": question + " " + answer} for question, answer in pairs],
        "instruction": [{"instruction": question, "output": answer} for question, answer in pairs],
        "sharegpt": [
            {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
            for question, answer in pairs
        ],
        "trl": [
            {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}],
            }
            for question, answer in pairs
        ],
    }[name]


@pytest.mark.parametrize("reward", [False, True])
@pytest.mark.parametrize("name", ["label", "completion", "messages", "text", "instruction", "sharegpt", "trl"])
def test_a_dry_run_shows_the_first_row_with_what_is_learnt_or_scored(home, tmp_path, name, reward):
    plain = {"label": label_rows, "completion": completion_rows, "messages": message_rows}
    rows = [row | {"id": n} for n, row in enumerate(plain[name](12) if name in plain else shaped(name, 12))]
    (tmp_path / "score.py").write_text("def length(prompt, completion, row):\n    return float(len(completion))\n")
    data = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ("--reward", f"{tmp_path}/score.py:length") if reward else ("--method", "tezo")
    done = tezo("train", "--model", home / "opt-chat", "--data", data, "--test", data, *flags, "--dry-run", "--json",
                *settings(data__hold_out=0))  # fmt: skip
    if name == "label" and reward:
        refused(done, "options to choose among")
        return
    assert done.code == 0, done.err
    shape, shown = json.loads(done.out)["rows_as_read"]
    (answer,) = {row["completion"] for row in completion_rows(1)}
    answer = " good" if name == "label" else answer
    question = "answer :" if name != "label" else "Label :"
    assert shown.startswith("rows.jsonl, line 1, as the model reads it (") and question in shown
    if reward:
        assert shown.endswith("' -> its text, which is scored") and "learnt" not in shown
        assert "; for the scorer: " in shape and shape.endswith("id")
        answered = {"completion": "completion", "instruction": "output", "trl": "completion"}.get(name)
        assert (f"for the scorer: {answered}, id" in shape) == (answered is not None), shape
        assert (answer.strip() in shown) == (name == "text")
    else:
        known = name != "instruction"  # whose words end with one that the tokenizer does not know
        assert f"{answer.rstrip()}" in shown.rpartition("->")[2] or not known
        assert "; not read: id" in shape


@pytest.mark.parametrize("name", ["text", "instruction", "sharegpt", "trl"])
def test_a_run_learns_each_shape_and_answers_rows_without_answers(home, tmp_path, name):
    rows = shaped(name, 12)
    done = train(home / "opt-chat", write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run")
    assert done.code == 0, done.err
    assert " rows of " in done.err and "as the model reads it (" in done.err
    asked = [
        {field: value[:1] if field == "conversations" else value for field, value in row.items()
         if field not in ("output", "completion")}
        for row in rows
    ]  # fmt: skip
    new, answers = write_rows(tmp_path / "new.jsonl", asked), tmp_path / "answers.jsonl"
    done = tezo("predict", tmp_path / "run", "--input", new, "--output", answers, "--max-new-tokens", 2)
    assert done.code == 0, done.err
    assert [set(row) - set(own) for row, own in zip(read_jsonl(answers), asked, strict=True)] == [{"prediction"}] * 12


@pytest.mark.parametrize("model", ["opt-chat", "bert"])
def test_a_base_model_answers_as_a_run_that_changed_nothing(home, tmp_path, model):
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(12))
    new = write_rows(tmp_path / "new.jsonl", [{"text": row["text"]} for row in label_rows(9, seed=3)])
    assert train(home / model, rows, tmp_path / "run", steps=1, method__lr=0.0).code == 0
    words = ("--set", "data.label_words={bad: bad, good: good}")
    for source, more in (("run", ()), (home / model, words)):
        out = tmp_path / f"{'base' if more else 'run'}.jsonl"
        done = tezo("predict", tmp_path / source, "--input", new, "--output", out, *more)
        assert done.code == 0, done.err
    base, tuned = (
        [{"text": row["text"], "prediction": row["prediction"]} for row in read_jsonl(tmp_path / f"{name}.jsonl")]
        for name in ("base", "run")  # whose temperatures differ
    )
    assert base == tuned
    if model == "bert":
        done = tezo("predict", home / model, "--input", new, "--output", tmp_path / "x.jsonl")
        refused(done, "data.label_words")


# Labels


def test_a_text_with_two_labels_and_labels_of_one_row_each_are_said():
    def said(*pairs, words=None):
        rows = [Row({"text": text, "label": label}, f"line {n}") for n, (text, label) in enumerate(pairs, start=1)]
        form = choose_format(rows, "causal", DataConfig(train="x", label_words=words), lambda _: "")
        return label_notices([form.example(row) for row in rows], form.labels)

    assert said(("a", "x"), ("b", "y"), ("a", "x"), ("c", "z"), ("d", "z"), ("e", "y")) == []
    (twice,) = said(("a", "x"), ("b", "y"), ("a", "y"), ("a", "x"), ("c", "x"))
    assert twice.startswith("3 training rows have the text of another") and "line 1 and line 3" in twice
    (single,) = said(("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("e", "4"))
    assert single.startswith("3 of 4 labels ('1', '2', '3') have one training row each")
    (none,) = said(("a", "x"), ("b", "x"), ("c", "y"), ("d", "y"), words={"x": "x", "y": "y", "z": "z"})
    assert none.startswith("no training row has the label 'z'")


def test_a_table_without_a_first_line_of_names_is_asked_for_one():
    for where, said in (("rows.csv, line 2", True), ("rows.TSV.gz, line 2", True), ("rows.jsonl, line 2", False)):
        with pytest.raises(RequestError) as refusal:
            choose_format([Row({"a film": "a meal"}, where)], "causal", DataConfig(train="x"), lambda _: "")
        assert ("first line of a table has the names" in str(refusal.value)) == said
