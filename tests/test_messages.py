"""Messages as rows elsewhere have them: roles, parts, calls of tools, tools; a template's errors name the row."""

import json
from functools import partial

import pytest
from folders import tiny_model, words_tokenizer

from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example, Row, check_answers
from tezo.tasks.formats import choose_format
from tezo.tasks.notices import rows_as_read, token_notices
from tezo.tasks.row_files import DataConfig
from tezo.tasks.setup import make_format, make_objective, render_chat

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
OPENED = "{% if add_generation_prompt %}[assistant]{% endif %}"
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
)
TOOLS = (
    "{% if tools %}[tools]{{ tools | tojson }}</s>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "{% endfor %}</s>{% endfor %}" + OPENED
)
AS_JSON = TOOLS.replace("{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}",
                        "{{ c.function.name + c.function.arguments }}")  # fmt: skip
QUESTION = {"role": "user", "content": "the film ?"}
ANSWER = {"role": "assistant", "content": "good"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"film": "new"}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def example(row: dict, template: str = PLAIN + OPENED) -> Example:
    tokenizer = words_tokenizer()
    tokenizer.chat_template = template
    rows = [Row(row, "rows, line 1")]
    return choose_format(rows, "causal", DataConfig(), partial(render_chat, tokenizer)).example(rows[0])


@pytest.mark.parametrize(
    ("user", "assistant"),
    [("User", "Assistant"), ("human", "gpt"), ("USER ", "model"), ("Human", "bot"), ("user", "ChatGPT")],
)
@pytest.mark.parametrize(("who", "what"), [("role", "content"), ("from", "value")])
def test_roles_are_read_in_any_case_and_by_their_other_names(user, assistant, who, what):
    talk = [{who: user, what: QUESTION["content"]}, {who: assistant, what: "good"}]
    plain = example({"messages": [QUESTION, ANSWER]})
    assert example({"messages": talk}) == plain == example({"prompt": talk[:1], "completion": talk[1:]})


def test_a_role_that_only_a_template_knows_is_given_to_it():
    asked = example({"messages": [{"role": "Critic", "content": "well ?"}, ANSWER]})
    assert asked.prompt.startswith("[Critic]well ?")


def test_parts_of_text_are_one_text_and_other_parts_are_refused():
    parts = [{"type": "text", "text": "the "}, "film", {"type": "text", "text": " ?", "image": None}]
    assert example({"messages": [QUESTION | {"content": parts}, ANSWER]}) == example({"messages": [QUESTION, ANSWER]})
    said = [{"type": "text", "text": "good"}]
    assert example({"messages": [QUESTION, ANSWER | {"content": said}]}).answer == "good"
    for part, kind in (
        ({"type": "image", "url": "x"}, "image"),
        (3, "int"),
        ({"type": "image", "text": None}, "image"),
    ):
        with pytest.raises(RequestError, match=f"line 1: a message has a part '{kind}', and only parts of text"):
            example({"messages": [QUESTION | {"content": [part]}, ANSWER]})


@pytest.mark.parametrize(
    "given", [CALL, {"type": "function", "function": {"name": "look", "arguments": '{"film": "new"}'}}]
)
def test_calls_of_tools_are_learnt_as_the_template_writes_them(given):
    found = example({"messages": [QUESTION, CALLING | {"tool_calls": [given]}]}, TOOLS)
    assert found.prompt == "[user]the film ?</s>[assistant]"
    assert found.answer == '<call>{"name": "look", "arguments": {"film": "new"}}'
    nulls = CALLING | {"tool_calls": [given | {"id": None}], "name": None}  # as tables write them
    assert example({"messages": [QUESTION | {"tool_calls": None}, nulls]}, TOOLS) == found


def test_a_template_that_wants_arguments_as_json_gets_them_so():
    call = {"function": {"name": "look", "arguments": '{"film": "new"}'}}
    assert (
        example({"messages": [QUESTION, CALLING | {"tool_calls": [call]}]}, AS_JSON).answer
        == '<call>look{"film": "new"}'
    )


def test_a_call_and_what_the_tool_said_are_part_of_a_prompt():
    told = [{"role": "tool", "content": "seen"}, {"role": "tool", "content": {"seen": True}}]
    for message, text in zip(told, ("seen", "{'seen': True}"), strict=True):
        found = example({"messages": [QUESTION, CALLING, message, ANSWER]}, TOOLS)
        assert found.prompt.endswith(f'"arguments": {{"film": "new"}}}}</s>[tool]{text}</s>[assistant]')
        assert found.answer == "good"


def test_an_answer_behind_a_tool_is_as_the_template_writes_it_though_it_refuses_a_tool_without_a_call():
    strict = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}[{{ m.role }}]"
        "{% if m.role == 'assistant' and m.content %}to the user:{% endif %}{{ m.content or m.tool_calls }}"
        "</s>{% endfor %}" + OPENED
    )
    told = {"role": "tool", "content": "seen"}
    assert example({"messages": [QUESTION, ANSWER]}, strict).answer == "to the user:good"
    assert example({"messages": [QUESTION, CALLING, told, ANSWER]}, strict).answer == "to the user:good"


def test_a_notice_says_where_a_template_opens_an_answer_otherwise_than_prompts_end():
    closed = "{% if add_generation_prompt %}[assistant]no thought:{% endif %}"
    thought = "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{{ m.reasoning or 'no thought' }}:"
    template = thought + "{% endif %}{{ m.content }}</s>{% endfor %}" + closed
    assert example({"messages": [QUESTION, ANSWER]}, template).note == ""
    found = example({"messages": [QUESTION, ANSWER | {"reasoning": "well"}]}, template)
    assert found.answer == "good" and "content alone is learnt" in found.note


@pytest.mark.parametrize("template", [PLAIN + OPENED, PLAIN.replace("]{{", "]{{ '' + ") + OPENED])
@pytest.mark.parametrize("content", [None, ""])
def test_a_template_that_leaves_out_calls_is_refused(content, template):
    for talk in ([QUESTION, CALLING], [QUESTION, CALLING, QUESTION, ANSWER]):
        own = [message | ({"content": content} if "tool_calls" in message else {}) for message in talk]
        with pytest.raises(RequestError, match=r"line 1: .* leaves out calls of tools"):
            example({"messages": own}, template)


def test_a_template_that_wants_a_content_beside_calls_gets_an_empty_one():
    template = TOOLS.replace("m.content or ''", "'' + m.content")
    assert example({"messages": [QUESTION, CALLING]}, template) == example({"messages": [QUESTION, CALLING]}, TOOLS)


def test_an_assistant_that_says_nothing_is_an_empty_answer():
    with pytest.raises(RequestError, match=r"empty answer \(rows, line 1"):
        check_answers([example({"messages": [QUESTION, ANSWER | {"content": None}]})])
    with pytest.raises(RequestError, match="line 1: field 'messages' is not a list of"):
        example({"messages": [QUESTION | {"content": None}, ANSWER]})


@pytest.mark.parametrize(
    "given", [[TOOL], json.dumps([TOOL]), [TOOL | {"strict": None}]], ids=["list", "JSON", "nulls"]
)
def test_tools_are_given_to_the_template(given):
    plain = example({"messages": [QUESTION, ANSWER]}, TOOLS)
    for row in ({"messages": [QUESTION, ANSWER]}, {"prompt": [QUESTION], "completion": [ANSWER]}):
        found = example(row | {"tools": given}, TOOLS)
        assert found.prompt == f"[tools]{json.dumps([TOOL])}</s>" + plain.prompt
        assert (found.answer, found.note) == (plain.answer, "")
    for none in (None, [], ""):
        assert example({"messages": [QUESTION, ANSWER], "tools": none}, TOOLS) == plain
    meant = json.dumps([TOOL | {"default": None}])
    found = example({"messages": [QUESTION, ANSWER], "tools": meant}, TOOLS)
    assert found.prompt == f"[tools]{meant}</s>" + plain.prompt
    for wrong in ("look", [3], {"name": "look"}):
        with pytest.raises(RequestError, match="line 1: field 'tools' is not a list"):
            example({"messages": [QUESTION, ANSWER], "tools": wrong}, TOOLS)


@pytest.mark.parametrize(("template", "ignored"), [(TOOLS, False), (PLAIN + OPENED, True)])
def test_a_template_that_does_not_write_tools_is_a_notice_and_they_are_listed_as_read(template, ignored):
    tokenizer = words_tokenizer()
    tokenizer.chat_template = template
    loaded = LoadedModel(tiny_model("opt", len(tokenizer)), tokenizer, "causal")
    row = Row({"messages": [QUESTION, ANSWER], "tools": [TOOL], "id": 3}, "rows, line 1")
    form = make_format(DataConfig(train="x"), loaded, [row])
    objective = make_objective(DataConfig(train="x"), loaded, form)
    shape, _ = rows_as_read(form, row, objective, objective.encode(form.example(row)))
    assert shape == "messages rows of messages, tools; not read: id"
    notices = [notice for notice in token_notices(objective) if "tools" in notice]
    assert notices == ([notices[0]] if ignored else [])
    assert all("1 row(s) (rows, line 1)" in notice for notice in notices)
    bare = Row({"messages": [QUESTION, ANSWER]}, "rows, line 1")
    shape, _ = rows_as_read(form, bare, objective, objective.encode(form.example(bare)))
    assert shape == "messages rows of messages"


@pytest.mark.parametrize(
    ("talk", "template", "reason"),
    [
        ([QUESTION, QUESTION, ANSWER], STRICT + OPENED, "Roles must alternate user/assistant"),
        ([{"role": "system", "content": "be kind"}, ANSWER], STRICT + OPENED, "Roles must alternate user/assistant"),
        ([QUESTION, ANSWER], "{% for m in messages %}{{ m.content }}{% endfr %}", "endfr"),
    ],
    ids=["two questions", "system", "syntax"],
)
def test_an_error_of_a_template_is_a_sentence_with_the_row_and_its_reason(talk, template, reason):
    for row in ({"messages": talk}, {"prompt": talk[:-1], "completion": talk[-1:]}):
        with pytest.raises(RequestError) as refusal:
            example(row, template)
        text = str(refusal.value)
        assert text.startswith("rows, line 1: the model's chat template does not accept these messages, of the roles")
        assert reason in text and "change that row" in text and "\n" not in text
