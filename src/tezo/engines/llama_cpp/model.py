"""A model of llama.cpp, and its contexts, in which tokens are computed."""

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from tezo.engines.llama_cpp.layouts import FLOAT32, Batch, put
from tezo.engines.llama_cpp.library import VARIABLE, load_library
from tezo.engines.llama_cpp.plan import MOST_TEXTS, TOKENS_AT_ONCE, Numbers, Part
from tezo.engines.llama_cpp.taps import Taps, Visitor
from tezo.system.errors import RequestError

NO_FLASH_ATTENTION = 0
"""llama.cpp's number of the choice. As keys and values in half precision, it would round what differences of losses are
made of."""


class LlamaModel:
    """The model in a GGUF file.

    Args:
        path: of the file.
        vocabulary_only: whether its weights are left out.

    Attributes:
        path: of the file.
        pointer: llama.cpp's model.
        vocabulary: llama.cpp's vocabulary.
        tokens: number of its tokens.
        one_text: whether it computes one text at a time, as a recurrent state needs it.

    Raises:
        RequestError: llama.cpp does not read it.
    """

    def __init__(self, path: str | os.PathLike[str], *, vocabulary_only: bool = False) -> None:
        lib = load_library()
        parameters = lib.llama_model_default_params()
        put(parameters, lib.model.vocabulary_only, "?", vocabulary_only)
        lib.errors()
        pointer = lib.llama_model_load_from_file(os.fsencode(path), parameters)
        if not pointer:
            raise RequestError(
                f"model.name: {lib.name} cannot read {path} ({lib.errors() or 'it does not say why'}); give a GGUF "
                "file of a model that it runs."
            )
        self.lib, self.pointer, self.path = lib, pointer, path
        weakref.finalize(self, lib.llama_model_free, pointer)
        self.vocabulary = lib.llama_model_get_vocab(pointer)
        self.tokens: int = lib.llama_vocab_n_tokens(self.vocabulary)
        self.one_text = bool(lib.llama_model_is_recurrent(pointer) or lib.llama_model_is_hybrid(pointer))

    def text(self, key: str) -> str:
        """Returns a value of the file's metadata as text; "" if it has none."""
        room = ctypes.create_string_buffer(1 << 10)
        size = self.lib.llama_model_meta_val_str(self.pointer, key.encode(), room, len(room))
        return room.value.decode(errors="replace") if size >= 0 else ""


class Context:
    """Room for texts that are computed.

    Args:
        model: the model.
        tokens: number of tokens that are held at a time, at least.
        watched: whether nodes are shown to visitors.

    Attributes:
        capacity: number of tokens.

    Raises:
        RequestError: there is no memory for it, or the library has other structures than it seemed.
    """

    def __init__(self, model: LlamaModel, tokens: int, *, watched: bool = False) -> None:
        self._model, self._lib = model, model.lib  # the model is freed after its contexts
        self._taps = Taps() if watched else None
        self.capacity = -(-tokens // TOKENS_AT_ONCE) * TOKENS_AT_ONCE
        texts = 1 if model.one_text else MOST_TEXTS
        sizes = (self.capacity, TOKENS_AT_ONCE, TOKENS_AT_ONCE, texts)
        lib, fields = self._lib, self._lib.context
        parameters = lib.llama_context_default_params()
        for place, size in zip(fields.sizes, sizes, strict=True):
            put(parameters, place, "I", size)
        for place in fields.threads:
            put(parameters, place, "i", torch.get_num_threads())
        for place in fields.types:
            put(parameters, place, "i", FLOAT32)
        put(parameters, fields.flash_attention, "i", NO_FLASH_ATTENTION)
        put(parameters, fields.unified, "?", 1)
        if self._taps is not None:
            put(parameters, fields.callback, "Q", ctypes.cast(self._taps.callback, ctypes.c_void_p).value)
        lib.errors()
        pointer = lib.llama_init_from_model(model.pointer, parameters)
        if not pointer:
            why = lib.errors()
            raise RequestError(
                f"llama.cpp has no memory for texts of {tokens} tokens{f' ({why})' if why else ''}; lower "
                "data.max_length."
            )
        self._pointer = pointer
        self._close = weakref.finalize(self, lib.llama_free, pointer)
        of_a_text = lib.llama_n_ctx_seq(pointer) if lib.has("llama_n_ctx_seq") else self.capacity
        given = min(lib.llama_n_ctx(pointer), of_a_text), lib.llama_n_batch(pointer), lib.llama_n_ubatch(pointer)
        if given[0] < self.capacity or (*given[1:], lib.llama_n_seq_max(pointer)) != sizes[1:]:
            raise RequestError(
                f"model.engine is llama.cpp, and {lib.name} made a context of {(*given, lib.llama_n_seq_max(pointer))} "
                f"where {sizes} was asked for: its structures are not those that are known here; name another libllama "
                f"by {VARIABLE}=PATH."
            )

    def close(self) -> None:
        """Frees it."""
        self._close()

    @property
    def watched(self) -> bool:
        """Whether nodes are shown to visitors."""
        return self._taps is not None

    def forget(self, start: int = 0) -> None:
        """Forgets all tokens from a position on."""
        memory = self._lib.llama_get_memory(self._pointer)
        if start:
            self._lib.llama_memory_seq_rm(memory, -1, start, -1)
        else:
            self._lib.llama_memory_clear(memory, False)

    @contextmanager
    def adapted(self, path: str) -> Iterator[None]:
        """While open, weights have the change that an adapter's file has.

        Raises:
            RequestError: the model does not take it.
        """
        lib = self._lib
        lib.errors()
        adapter = lib.llama_adapter_lora_init(self._model.pointer, os.fsencode(path))
        if not adapter:
            raise RequestError(
                f"llama.cpp does not take a change of the weights as an adapter of this model ({lib.errors()})."
            )
        try:
            lib.llama_set_adapters_lora(self._pointer, (ctypes.c_void_p * 1)(adapter), 1, (ctypes.c_float * 1)(1.0))
            yield
        finally:
            lib.llama_set_adapters_lora(self._pointer, None, 0, None)
            lib.llama_adapter_lora_free(adapter)

    def logits(self, part: Part, visitor: Visitor | None = None) -> Numbers:
        """Computes tokens; returns logits, (outputs, vocabulary), in memory that the next call writes over.

        Raises:
            RequestError: they could not be computed.
        """
        before = 0 if self._taps is None else self._taps.visits
        with nullcontext() if visitor is None or self._taps is None else self._taps.visited_by(visitor):
            failed = self._decode(part)
        if failed:
            raise RequestError(
                f"llama.cpp could not compute {len(part.token_T)} tokens (code {failed}); lower data.max_length."
            )
        if self._taps is not None and self._taps.visits == before:
            raise RequestError(
                f"model.engine is llama.cpp, and {self._lib.name} does not call the function that looks into layers; "
                f"name another libllama by {VARIABLE}=PATH."
            )
        count = int(part.output_T.sum())
        if not count:
            return np.zeros((0, self._model.tokens), np.float32)
        return np.ctypeslib.as_array(self._lib.llama_get_logits(self._pointer), (count, self._model.tokens))

    def _decode(self, part: Part) -> int:
        count = len(part.token_T)
        arrays: Sequence[Numbers] = [
            np.ascontiguousarray(values, kind)
            for values, kind in (
                (part.token_T, np.int32), (part.position_T, np.int32), (part.count_T, np.int32),
                (part.output_T, np.int8), (part.seq_TS, np.int32),
            )
        ]  # fmt: skip
        tokens, positions, counts, outputs, seq_TS = arrays  # they must outlive the call
        number = ctypes.POINTER(ctypes.c_int32)
        rows = (ctypes.c_void_p * count)(*(seq_TS.ctypes.data + i * seq_TS.strides[0] for i in range(count)))
        batch = Batch(
            count=count,
            token=tokens.ctypes.data_as(number),
            position=positions.ctypes.data_as(number),
            sequences=counts.ctypes.data_as(number),
            sequence=ctypes.cast(rows, ctypes.POINTER(number)),
            output=outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        return int(self._lib.llama_decode(self._pointer, batch))
