"""The tokenizer of a GGUF file as llama.cpp has it, so that text is split as it will be where the file is served."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from tezo.engines.llama_cpp.model import LlamaModel
from tezo.system.errors import RequestError

UNKNOWN, CONTROL, USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
"""llama.cpp's attributes of tokens."""
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
KEYS = {"unk": "unknown", "sep": "seperator"}
"""Role -> its part of the key in the file's metadata, where it has another one."""


class LlamaTokenizer:
    """A tokenizer with the interface of transformers', as far as this library uses it.

    Args:
        model: the model, whose weights need not be loaded.
        name: the path of its file.
        max_length: of texts, in tokens.

    Attributes:
        chat_template: of the file; None: it has none.
        model_max_length: of texts, in tokens.
    """

    padding_side, truncation_side = "right", "right"

    def __init__(self, model: LlamaModel, name: str, max_length: int) -> None:
        self._model, self._lib, self._vocabulary = model, model.lib, model.vocabulary
        self.name_or_path, self.model_max_length = name, max_length
        template = model.lib.llama_model_chat_template(model.pointer, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None
        if not model.tokens:
            raise RequestError(f"model.name: {name} has no tokenizer in it; give a file that has one.")
        marks = {role: getattr(model.lib, f"llama_vocab_{role}")(model.vocabulary) for role in ("bos", "eos", "pad")}
        ids = {role: marks.get(role, self._said(role)) for role in ROLES}
        if ids["pad"] < 0:  # any will do: no place behind a text is read
            ids["pad"] = next((ids[role] for role in ("eos", "unk", "bos") if ids[role] >= 0), 0)
        self._ids = {role: token if 0 <= token < model.tokens else None for role, token in ids.items()}

    def __getattr__(self, name: str) -> Any:
        role, _, kind = name.partition("_token")
        if role not in ROLES or kind not in ("", "_id"):
            raise AttributeError(name)
        token = self.__dict__["_ids"][role]
        return token if kind or token is None else self._text(token)

    def __len__(self) -> int:
        return self._model.tokens

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Returns {"input_ids": ids} of a text, or of each of several; special tokens in a text are tokens.

        Args:
            text: the text, or several.
            add_special_tokens: whether tokens are put around a text, as the file says.
        """
        if isinstance(text, str):
            return {"input_ids": self._split(text, add_special_tokens)}
        return {"input_ids": [self._split(each, add_special_tokens) for each in text]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Returns the text of tokens; bytes that are not whole characters are replaced."""
        room, parts = ctypes.create_string_buffer(256), []
        for token in ids:
            size = self._lib.llama_token_to_piece(self._vocabulary, token, room, len(room), 0, not skip_special_tokens)
            if size < 0:
                room = ctypes.create_string_buffer(-size)
                size = self._lib.llama_token_to_piece(
                    self._vocabulary, token, room, len(room), 0, not skip_special_tokens
                )
            parts.append(room.raw[: max(size, 0)])
        return b"".join(parts).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Returns the token of a number, or of each of several."""
        return self._text(ids) if isinstance(ids, int) else [self._text(each) for each in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the number of a token, or of each of several; that of the unknown token where there is no such."""
        found, unknown = self.get_vocab(), self._ids["unk"]
        return found.get(tokens, unknown) if isinstance(tokens, str) else [found.get(each, unknown) for each in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Returns token -> number."""
        return {self._text(token): token for token in reversed(range(len(self)))}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> Any:
        """Returns the text of a conversation by the chat template, or its tokens."""
        named = {f"{role}_token": self._text(token) for role, token in self._ids.items() if token is not None}
        (text, *_), *_ = render_jinja_template(
            [list(messages)],
            tools=None if tools is None else list(tools),
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **named,
        )
        return self._split(text, False) if tokenize else text

    @property
    def all_special_ids(self) -> list[int]:
        """Numbers of the special tokens."""
        named = [token for token in self._ids.values() if token is not None]
        marked = [token for token, added in self.added_tokens_decoder.items() if added.special]
        return list(dict.fromkeys([*named, *marked]))

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens."""
        return [self._text(token) for token in self.all_special_ids]

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Number -> token, of those that are no parts of a text."""
        found = {}
        for token in range(len(self)):
            attributes = self._lib.llama_vocab_get_attr(self._vocabulary, token)
            if attributes & (UNKNOWN | CONTROL | USER_DEFINED):
                found[token] = AddedToken(self._text(token), special=not attributes & USER_DEFINED)
        return found

    @cached_property
    def ends(self) -> list[int]:
        """Numbers of the tokens at which llama.cpp ends an answer."""
        return [token for token in range(len(self)) if self._lib.llama_vocab_is_eog(self._vocabulary, token)]

    def _text(self, token: int) -> str:
        if not 0 <= token < len(self):
            return ""
        return str((self._lib.llama_vocab_get_text(self._vocabulary, token) or b"").decode(errors="replace"))

    def _split(self, text: str, whole: bool) -> list[int]:
        data = text.encode(errors="replace")
        room = len(data) + 8
        while True:
            found = (ctypes.c_int32 * room)()
            count = self._lib.llama_tokenize(self._vocabulary, data, len(data), found, room, whole, True)
            if count >= 0:
                return found[:count]
            room = -count

    def _said(self, role: str) -> int:
        said = self._model.text(f"tokenizer.ggml.{KEYS.get(role, role)}_token_id")
        return int(said) if said.isdecimal() else -1


def difference(mine: Any, theirs: Any, texts: Sequence[str]) -> list[str]:
    """Says where two tokenizers split texts differently, in one notice; the second is that of transformers."""
    for text in texts:
        ours, other = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for tokenizer in (mine, theirs))
        if ours != other:
            return [
                f"model.name: transformers splits {text[:60]!r} into other tokens ({len(other)}) than llama.cpp "
                f"({len(ours)}), by which the run goes; the adapter is for llama.cpp."
            ]
    return []
