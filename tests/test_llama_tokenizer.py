"""The tokenizer of a file by llama.cpp, which splits as transformers does where that is right."""

import json
from pathlib import Path

import gguf
import pytest
import transformers
from folders import WORDS, bpe_tokenizer
from gguf_files import tiny_llama, write_gguf, write_sentence_pieces
from hypothesis import given
from hypothesis import strategies as st

from tezo.engines.llama_cpp.model import LlamaModel
from tezo.engines.llama_cpp.tokenizer import LlamaTokenizer, difference
from tezo.models.gguf import gguf_tokenizer
from tezo.models.loading import embedded_source
from tezo.system.errors import RequestError
from tezo.tasks.objectives.ends import ends_of, text_after

pytestmark = pytest.mark.engine

DECODER = Path(__file__).parents[2] / "shared/models/stories260K"
TEXTS = [
    "",
    "a",
    "The plot  2024 falls apart,\n  3 times 1234 it's  over",
    " good",
    "café 🦙",
    "<s>user : hi</s>\n<mask>x",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(tokenizer of llama.cpp, the one of which its file was made)."""
    theirs = bpe_tokenizer(chat=True)
    path = tmp_path_factory.mktemp("home") / "tiny.gguf"
    write_gguf(path, tiny_llama(len(theirs)), theirs, pre="gpt-2")
    return LlamaTokenizer(LlamaModel(path, vocabulary_only=True), str(path), 64), theirs


WORD = st.sampled_from([*WORDS[:40], "\n", "  ", "3", "é", "</s>", "🦙", "<s>"])


@given(st.lists(WORD, max_size=8), st.booleans())
def test_texts_are_split_as_by_the_tokenizer_of_the_file(tiny, words, spaced):
    mine, theirs = tiny
    text = (" " if spaced else "").join(words)
    ids = mine(text, add_special_tokens=False)["input_ids"]
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert mine.decode(ids) == text
    assert mine.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert mine([text, text], add_special_tokens=False)["input_ids"] == [ids, ids]
    shown = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert mine.decode(ids, skip_special_tokens=True) == shown


def test_special_tokens_and_the_vocabulary_are_those_of_the_file(tiny):
    mine, theirs = tiny
    for role in ("bos", "eos", "pad", "unk"):
        assert getattr(mine, f"{role}_token") == getattr(theirs, f"{role}_token")
        assert getattr(mine, f"{role}_token_id") == getattr(theirs, f"{role}_token_id")
    assert mine.mask_token is None and mine.sep_token_id is None
    assert mine.get_vocab() == theirs.get_vocab() and len(mine) == len(theirs)
    assert set(mine.all_special_ids) == set(theirs.all_special_ids)
    assert {i: own.content for i, own in mine.added_tokens_decoder.items()} == {
        i: own.content for i, own in theirs.added_tokens_decoder.items()
    }
    assert mine.convert_tokens_to_ids(["<s>", "nothing such"]) == [0, theirs.unk_token_id]
    with pytest.raises(AttributeError):
        mine.lost_token  # noqa: B018


def test_conversations_are_written_by_the_template_of_the_file(tiny):
    mine, theirs = tiny
    messages = [{"role": "user", "content": "was it good ?"}, {"role": "assistant", "content": "it was"}]
    for more in ({}, {"add_generation_prompt": True}, {"tools": [{"name": "look"}]}):
        text = mine.apply_chat_template(messages, tokenize=False, **more)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **more)
    assert mine.apply_chat_template(messages, tokenize=True) == mine(text, add_special_tokens=False)["input_ids"]


def test_a_difference_from_transformers_is_a_notice(tiny):
    mine, theirs = tiny
    assert difference(mine, theirs, TEXTS) == []
    state = json.loads(theirs.backend_tokenizer.to_str())
    del state["model"]["merges"][0]
    other = theirs.__class__(tokenizer_object=theirs.backend_tokenizer.from_str(json.dumps(state)))
    (notice,) = difference(mine, other, [" ".join(WORDS)])
    assert "transformers splits" in notice and "llama.cpp" in notice


@pytest.mark.skipif(not DECODER.is_dir(), reason="the pretrained decoder is not there")
def test_sentence_pieces_are_split_as_by_their_own_tokenizer(tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(DECODER)
    path = write_sentence_pieces(tmp_path / "pieces.gguf", theirs, space=True)
    mine = LlamaTokenizer(LlamaModel(path, vocabulary_only=True), str(path), 64)
    for text in ["Once upon a time", " Once", "  two  spaces ", "x </s> y", "a\n b", "", "é"]:
        assert mine(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
        assert mine(text)["input_ids"] == theirs(text)["input_ids"]  # behind BOS
    before, whole = (mine(text)["input_ids"] for text in ("Once upon", "Once upon a time</s>"))
    assert text_after(mine, before, whole[len(before) :], special=False) == " a time"
    assert text_after(mine, before, whole[len(before) :], special=True) == " a time</s>"


@pytest.mark.model
def test_smollm2_splits_and_ends_as_its_file_says():
    path = embedded_source("embedded:smollm2-135m")
    mine = LlamaTokenizer(LlamaModel(path, vocabulary_only=True), str(path), 8192)
    theirs, notices = gguf_tokenizer(str(path))
    assert not notices and difference(mine, theirs, TEXTS) == []
    assert mine.eos_token == "<|im_end|>" and mine.get_vocab() == theirs.get_vocab()
    ends = ends_of(mine, None)
    assert (ends.text, ends.turn, ends.turn_token) == (2, "<|im_end|>", 2) and ends == ends_of(theirs, None)
    assert {0, 2} <= set(mine.ends)


def test_a_file_without_a_tokenizer_is_one_sentence(tmp_path):
    path = tmp_path / "none.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RequestError, match=r"none\.gguf"):
        LlamaTokenizer(LlamaModel(path, vocabulary_only=True), str(path), 64)
