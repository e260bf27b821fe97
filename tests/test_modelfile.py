"""A Modelfile for Ollama has the file's own template, or says that it has none."""

import re

import pytest
from architectures import finish, tokens, writer_of

from tezo.engines.llama_cpp.model import LlamaModel
from tezo.engines.llama_cpp.modelfile import modelfile, stops, wording_of
from tezo.engines.llama_cpp.tokenizer import LlamaTokenizer
from tezo.models.loading import embedded_source

pytestmark = pytest.mark.engine

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<s>system\nYou help.</s>\n{% endif %}{% for m in messages %}"
    "<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<mask>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<mask>model\n{% endif %}"
)
COUNTED = "{% for m in messages %}{{ loop.index }}. {{ m['content'] }}</s>{% endfor %}"


def tokenizer_with(tmp_path, template):
    path = tmp_path / "model.gguf"
    finish(writer_of(path, "llama", template=template, begins=template == GEMMA))
    return LlamaTokenizer(LlamaModel(path, vocabulary_only=True), str(path), 64)


def in_go(template, messages):
    """What Ollama writes by a template of this form: the few constructs that are used, rendered by themselves."""
    assert set(re.findall(r"{{ (\w+)", template)) <= {"if", "else", "range", "end"}
    system = any(role == "system" for role, _ in messages)
    text = re.sub(r"{{ if not \.System }}(.*?){{ end }}", "" if system else r"\1", template, flags=re.DOTALL)
    form = r"(.*){{ range \.Messages }}(.*){{ end }}{{ end }}(.*)"
    before, body, after = re.fullmatch(form, text, re.DOTALL).groups()
    branches = dict(re.findall(r'if eq \.Role "(\w+)" }}(.*?)(?:{{ else |\Z)', body, re.DOTALL))
    return before + "".join(branches[role].replace("{{ .Content }}", own) for role, own in messages) + after


@pytest.mark.parametrize("template", [CHATML, GEMMA])
def test_the_template_in_go_writes_what_the_files_own_does(template, tmp_path):
    tokenizer = tokenizer_with(tmp_path, template)
    text = modelfile("tuned.gguf", tokenizer)
    own = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)[1]
    talks = [[("user", "hi")], [("user", "hi"), ("assistant", "hello there"), ("user", "bye")]]
    talks += [[("system", "Be kind."), *talk] for talk in talks] if template == CHATML else []
    for talk in talks:
        named = [{"role": role, "content": content} for role, content in talk]
        wanted = tokenizer.apply_chat_template(named, add_generation_prompt=True)
        assert in_go(own, talk) == (wanted.removeprefix("<s>") if template == GEMMA else wanted)
    assert text.startswith("FROM ./tuned.gguf\n") and 'PARAMETER stop "</s>"' in text
    assert stops(tokenizer)[0] == "</s>" and tokens()[0][2] == "</s>"


def test_a_template_that_counts_messages_is_left_to_ollama(tmp_path):
    tokenizer = tokenizer_with(tmp_path, COUNTED)
    assert wording_of(tokenizer) is None
    assert "TEMPLATE " in modelfile("m.gguf", tokenizer) and 'TEMPLATE """' not in modelfile("m.gguf", tokenizer)


@pytest.mark.model
def test_smollm2_has_its_own_template():
    path = embedded_source("embedded:smollm2-135m")
    tokenizer = LlamaTokenizer(LlamaModel(path, vocabulary_only=True), str(path), 64)
    own = wording_of(tokenizer)
    assert own is not None and own.around["user"] == ("<|im_start|>user\n", "<|im_end|>\n")
    assert own.unsaid.startswith("<|im_start|>system\nYou are") and own.opening == "<|im_start|>assistant\n"
    assert 'PARAMETER stop "<|im_end|>"' in modelfile("m.gguf", tokenizer)
