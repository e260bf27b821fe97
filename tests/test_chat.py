"""`tezo chat`: answers are those of the untuned and the tuned model, in pieces, and the model is tuned afterwards."""

import io
import os
import pty
import subprocess
import sys

import pytest
from folders import bpe_tokenizer, completion_rows, label_rows, model_folder, refused, settings, tezo, write_rows
from gguf_files import tiny_llama, write_gguf

from tezo.tasks.setup import row_of_prompt
from tezo.tasks.splits import rows_of
from tezo.training import opening

NEW = 9
"""Tokens of an answer, at most."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    model_folder(root, "qwen2", chat=True)
    write_rows(root / "texts.jsonl", completion_rows(12))
    write_rows(root / "labels.jsonl", label_rows(12))
    write_rows(root / "pairs.jsonl", [{"a": row["text"], "b": "so", "label": row["label"]} for row in label_rows(12)])
    return root


def trained(home, name, rows, method, **more):
    folder = home / name
    values = {"train__steps": 3, "method__lr": 1e-2 if method == "mezo" else 0.5, "train__batch_size": 4, **more}
    found = tezo("train", "--model", home / "opt", "--data", home / f"{rows}.jsonl", "--method", method,
                 "--output", folder, *settings(**values))  # fmt: skip
    assert found.code == 0, found.err
    return folder


@pytest.fixture(scope="module")
def runs(home):
    """A run whose result is an adapter, and one that has saved a whole model."""
    return {method: trained(home, method, "texts", method) for method in ("tezo", "mezo")}


def chat(monkeypatch, prompts, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{prompt}\n" for prompt in prompts)))
    return tezo("chat", *arguments)


@pytest.mark.parametrize("method", ["tezo", "mezo"])
def test_the_answers_are_those_of_the_untuned_and_the_tuned_model(home, runs, monkeypatch, method):
    prompts = [row["prompt"] for row in completion_rows(3, seed=5)]
    rows = [{"prompt": prompt} for prompt in prompts]
    folder = str(runs[method])
    config = opening.run_config(folder, [])
    tuned, *_ = opening.answer_rows(config, opening.open_model(folder, config), rows_of(rows, "rows"), NEW)
    base, *_ = opening.answer_rows(config, opening.open_base(runs[method], config), rows_of(rows, "rows"), NEW)
    assert base != tuned, "the test would tell nothing"
    done = chat(monkeypatch, prompts, runs[method], "--max-new-tokens", NEW)
    assert done.code == 0, done.err
    expected = [line for pair in zip(base, tuned, strict=True) for line in zip(("untuned", "tuned"), pair, strict=True)]
    assert done.out == "".join(f"{name}: {answer}\n" for name, answer in expected)


def test_pieces_come_one_after_another_and_are_the_answer(home, runs):
    config = opening.run_config(str(runs["tezo"]), [])
    before, after = opening.speakers(str(runs["tezo"]), config)
    row = row_of_prompt(config.data, after.loaded, "it was")
    (plain,), *_ = opening.answer_rows(config, after.loaded, [row], NEW)
    for speaker in (after, before, after):
        pieces: list[str] = []
        with speaker.within():
            (answer,), *_ = opening.answer_rows(config, speaker.loaded, [row], NEW, pieces.append)
        assert "".join(pieces) == answer and len(pieces) > 3
        assert (answer == plain) == (speaker is after), "the adapter is on again"


def test_labelled_rows_are_answered_by_their_labels(home, monkeypatch):
    folder = trained(home, "labelled", "labels", "tezo")
    done = chat(monkeypatch, ["a good day"], folder)
    labels = {row["label"] for row in label_rows(12)}
    assert done.code == 0 and {line.partition(": ")[2] for line in done.out.splitlines()} <= labels


def test_a_base_with_a_chat_template_is_asked_by_it(home, monkeypatch):
    config = opening.run_config(str(home / "qwen2-chat"), [])
    (only,) = opening.speakers(str(home / "qwen2-chat"), config)
    messages = [{"messages": [{"role": "user", "content": "how are you"}]}]
    assert [row_of_prompt(config.data, only.loaded, "how are you").fields] == messages
    assert chat(monkeypatch, ["how are you"], home / "qwen2-chat", "--max-new-tokens", 3).code == 0


def test_rows_with_more_fields_are_refused_before_a_prompt(home, monkeypatch):
    template = "{a} and {b}\nLabel:"
    folder = trained(home, "paired", "pairs", "tezo", data__template=template)
    refused(chat(monkeypatch, ["x"], folder), "a, b", "tezo predict")


@pytest.mark.slow
def test_a_terminal_has_a_sign_and_an_empty_line_ends_it(home):
    above, below = pty.openpty()
    command = [sys.executable, "-m", "tezo", "chat", str(home / "opt"), "--max-new-tokens", "2"]
    with subprocess.Popen(command, stdin=below, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.write(above, b"it was\n\n")
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count(b"> ") == 2 and len(out) > len(b"> > \n"), out
    os.close(above), os.close(below)


@pytest.mark.engine
def test_a_file_in_llama_cpp_is_heard_as_it_writes(tmp_path):
    tokenizer = bpe_tokenizer(chat=True)
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(len(tokenizer), max_position_embeddings=512), tokenizer)
    config = opening.run_config(str(file), [("model.engine", "llama.cpp")])
    (only,) = opening.speakers(str(file), config)
    row = row_of_prompt(config.data, only.loaded, "how are you")
    pieces: list[str] = []
    (answer,), *_ = opening.answer_rows(config, only.loaded, [row], NEW, pieces.append)
    (again,), *_ = opening.answer_rows(config, only.loaded, [row], NEW)
    assert "".join(pieces).strip() == answer == again and len(pieces) > 3
