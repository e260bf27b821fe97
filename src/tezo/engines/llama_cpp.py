"""llama.cpp: the GGUF file as it is, mapped into memory and never unpacked.

A change of the weights is a LoRA adapter in a file that only this process has, so that nothing is left by any end.
Texts are sequences of one context; tokens at their common beginning are computed once, for all of them.
"""

import ctypes
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tezo.forward.engine import Asked, Change, Continuing, Engine, Told, joined, told_by
from tezo.models.gguf import GGUF_FILE, GgufNames, write_gguf_lora
from tezo.models.in_file import load_in_file
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.tasks.objectives.batch import TokenTree, common_prefix, packed_tree

OLDEST, INSTALL = (0, 3, 36), "pip install 'tezo[llama-cpp]'"
"""Version of llama-cpp-python whose calls are used, and how it is installed."""
TOKENS_AT_ONCE = 512
"""Tokens that are computed together. More make attention slower: each token is compared with all of them."""
PLACES_AT_ONCE = 128
"""Places whose logits over the vocabulary are kept at a time."""
MOST_TEXTS = 64
"""Texts of a context at a time."""
GENERATED_AT_ONCE = 4096
"""Tokens of texts that are continued side by side, or one text."""
LEAST_PREFIX = 16
"""Tokens of a common beginning that is worth a batch of its own."""
FLOAT32, NO_FLASH_ATTENTION = 0, 0
"""ggml's number of the type, and llama.cpp's of the choice: keys and values in half precision would round what
differences of losses are made of."""

Numbers = NDArray[Any]


def load_llama_cpp(config: ModelConfig) -> LoadedModel:
    """Loads a GGUF file into llama.cpp.

    Raises:
        RequestError: llama-cpp-python is missing or too old, or the file is none that it reads.
    """
    library()
    loaded, path = load_in_file(config.name)
    return replace(loaded, engine=LlamaCpp(path, loaded.model))


@cache
def library() -> Any:
    """Returns the module `llama_cpp`, which prints nothing.

    Raises:
        RequestError: it is missing, too old, or does not run on this processor.
    """
    try:
        import llama_cpp
    except ImportError:
        raise RequestError(f"model.engine is llama.cpp, which needs llama-cpp-python: {INSTALL}.") from None
    except (OSError, RuntimeError) as error:
        raise RequestError(
            f"model.engine is llama.cpp, and llama-cpp-python does not start here ({error}); build it for this "
            "processor: pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python."
        ) from None
    version = tuple(int(part) for part in llama_cpp.__version__.split(".")[:3])
    if version < OLDEST or not hasattr(llama_cpp, "llama_set_adapters_lora"):
        wanted = ".".join(map(str, OLDEST))
        raise RequestError(
            f"model.engine is llama.cpp, and llama-cpp-python is {llama_cpp.__version__}; {wanted} is the oldest that "
            f"is known to work: {INSTALL}."
        )
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


class LlamaCpp(Engine):
    """A model of llama.cpp.

    Args:
        path: of its GGUF file.
        model: its modules, for the names of layers.
    """

    name = "llama.cpp"

    def __init__(self, path: str, model: Any) -> None:
        self._lib, self._names = library(), GgufNames(model)
        self._size: int = model.config.hidden_size
        parameters = self._lib.llama_model_default_params()
        held: dict[str, Any] = {"model": self._lib.llama_model_load_from_file(os.fsencode(path), parameters)}
        if not held["model"]:
            raise RequestError(f"model.name: llama.cpp cannot read {path}; give a GGUF file of a model that it runs.")
        self._held, self._capacity = held, 0
        weakref.finalize(self, _free, self._lib, held)
        self._vocabulary: int = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(held["model"]))

    def changes(self, module: str) -> bool:
        name = self._names.name(f"{module}.weight")
        return name is not None and name.startswith("blk.")

    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        plan = plan_of(asked.texts, asked.text_P.tolist(), asked.position_P.tolist())
        tokens_PC, order_P = asked.tokens_PC[plan.places], torch.tensor(plan.places).argsort()
        found = []
        for change in changes:
            with self._changed(change, plan.size):
                parts = [told_by(values, tokens_PC[own], asked.likely) for own, values in self._read(plan)]
            found.append(joined(parts).at(order_P))
        return found

    def hidden(self, change: Change, texts: Sequence[Sequence[int]]) -> Tensor:
        several = list(dict.fromkeys(map(tuple, texts)))
        plan = plan_of(several, range(len(several)), [len(text) - 1 for text in several])
        with self._changed(change, plan.size):
            self._lib.llama_set_embeddings(self._context, True)
            try:
                parts = [values.clone() for _, values in self._read(plan, embeds=True)]
            finally:
                self._lib.llama_set_embeddings(self._context, False)
        found_TD, number = torch.cat(parts)[torch.tensor(plan.places).argsort()], {t: i for i, t in enumerate(several)}
        return found_TD[[number[tuple(text)] for text in texts]]

    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        return [self._generated(change, prompts, wanted) for change in changes]

    def _generated(self, change: Change, prompts: Sequence[Sequence[int]], wanted: Continuing) -> list[list[int]]:
        many = max(1, min(MOST_TEXTS, GENERATED_AT_ONCE // (max(map(len, prompts)) + wanted.most)))
        written: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(prompts), many):
            rows = range(start, min(start + many, len(prompts)))
            tree = packed_tree([prompts[i] for i in rows], [[len(prompts[i]) - 1] for i in rows])
            part, slots = _part(tree, 0), [own[0] for own in tree.slots]
            with self._changed(change, len(part.token_T) + len(rows) * wanted.most):
                self._continue(part, slots, prompts, written, rows, wanted)
        return written

    def _continue(
        self,
        part: "Part",
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        written: Sequence[list[int]],
        rows: range,
        wanted: Continuing,
    ) -> None:
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
        logits = torch.cat([values.clone() for _, values in self._pieces(part)])[list(slots)]
        open_rows = list(rows)
        for place in range(wanted.most):
            for row, token in zip(open_rows, wanted.chosen(logits, open_rows, place), strict=True):
                written[row].append(token)
            open_rows = [row for row in open_rows if not wanted.is_end(row, written[row])]
            if not open_rows or place == wanted.most - 1:
                return
            ones = np.ones(len(open_rows), dtype=np.int32)
            last = Part(
                np.array([written[row][-1] for row in open_rows]),
                np.array([len(prompts[row]) + place for row in open_rows]),
                ones,
                np.array([[row - rows.start] for row in open_rows]),
                ones.astype(bool),
            )
            logits = torch.cat([values.clone() for _, values in self._pieces(last)])

    def save_beside(self, rank: int, change: Change, folder: Path) -> str:
        write_gguf_lora(folder / GGUF_FILE, rank, change, self._names)
        return GGUF_FILE

    @contextmanager
    def _changed(self, change: Change, tokens: int) -> Iterator[None]:
        """While open there is a context for so many tokens, in which the weights have a change."""
        self._open(tokens)
        if not change:
            yield
            return
        lib = self._lib
        with own_file() as path:
            write_gguf_lora(path, 0, change, self._names)
            adapter = lib.llama_adapter_lora_init(self._held["model"], os.fsencode(path))
        if not adapter:
            raise RequestError("llama.cpp does not take a change of the weights as an adapter of this model.")
        try:
            adapters, scales = (lib.llama_adapter_lora_p_ctypes * 1)(adapter), (ctypes.c_float * 1)(1.0)
            lib.llama_set_adapters_lora(self._context, adapters, 1, scales)
            yield
        finally:
            lib.llama_set_adapters_lora(self._context, None, 0, None)
            lib.llama_adapter_lora_free(adapter)

    def _open(self, tokens: int) -> None:
        """Makes a context for so many tokens, if the one at hand is smaller."""
        if tokens <= self._capacity:
            return
        lib, options = self._lib, self._lib.llama_context_default_params()
        capacity = -(-tokens // TOKENS_AT_ONCE) * TOKENS_AT_ONCE
        options.n_ctx, options.n_batch, options.n_ubatch = capacity, TOKENS_AT_ONCE, TOKENS_AT_ONCE
        options.n_seq_max, options.kv_unified = MOST_TEXTS, True
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.type_k = options.type_v = FLOAT32
        options.flash_attn_type = NO_FLASH_ATTENTION
        self._close_context()
        self._held["context"] = context = lib.llama_init_from_model(self._held["model"], options)
        if not context:
            raise RequestError(f"llama.cpp has no memory for texts of {tokens} tokens; lower data.max_length.")
        self._capacity = capacity

    def _read(self, plan: "Plan", *, embeds: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Yields (some of the places in the order of the plan, what llama.cpp tells there: a view of its memory)."""
        lib, memory, done = self._lib, self._lib.llama_get_memory(self._context), 0
        lib.llama_memory_clear(memory, False)
        if plan.prefix is not None:
            list(self._pieces(plan.prefix))
        for part in plan.parts:
            for count, values in self._pieces(part, embeds=embeds):
                yield slice(done, done + count), values
                done += count
            lib.llama_memory_seq_rm(memory, -1, plan.start, -1)

    def _pieces(self, part: "Part", *, embeds: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Computes a part; yields (number of places read, their logits or the inputs of the head: a view)."""
        lib = self._lib
        for piece in part.pieces():
            self._decode(piece)
            count = int(piece.read_T.sum())
            if count and embeds:  # these are put out at all tokens
                found = np.ctypeslib.as_array(lib.llama_get_embeddings(self._context), (len(piece.token_T), self._size))
                yield count, torch.from_numpy(found[piece.read_T])
            elif count:
                found = np.ctypeslib.as_array(lib.llama_get_logits(self._context), (count, self._vocabulary))
                yield count, torch.from_numpy(found)

    def _decode(self, part: "Part") -> None:
        lib, count = self._lib, len(part.token_T)
        arrays: dict[str, Numbers] = {
            "token": np.ascontiguousarray(part.token_T, np.int32),
            "pos": np.ascontiguousarray(part.position_T, np.int32),
            "n_seq_id": np.ascontiguousarray(part.count_T, np.int32),
            "logits": np.ascontiguousarray(part.read_T, np.int8),
        }  # they must outlive the call
        seq_TS = np.ascontiguousarray(part.seq_TS, np.int32)
        rows = (ctypes.c_void_p * count)(*(seq_TS.ctypes.data + i * seq_TS.strides[0] for i in range(count)))
        batch = lib.llama_batch()
        batch.n_tokens = count
        for name, values in arrays.items():
            setattr(batch, name, values.ctypes.data_as(type(getattr(batch, name))))
        batch.seq_id = ctypes.cast(rows, type(batch.seq_id))
        failed = lib.llama_decode(self._context, batch)
        if failed:
            raise RequestError(f"llama.cpp could not compute {count} tokens (code {failed}); lower data.max_length.")

    @property
    def _context(self) -> Any:
        return self._held["context"]

    def _close_context(self) -> None:
        context, self._capacity = self._held.pop("context", None), 0
        if context:
            self._lib.llama_free(context)


def _free(lib: Any, held: dict[str, Any]) -> None:
    context, model = held.pop("context", None), held.pop("model", None)
    if context:
        lib.llama_free(context)
    if model:
        lib.llama_model_free(model)


@contextmanager
def own_file() -> Iterator[str]:
    """Yields the path of a new file in memory that no other process sees, where the system has such."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("adapter")
        try:
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)
    else:
        with tempfile.TemporaryDirectory(prefix="tezo-adapter-") as folder:
            yield str(Path(folder) / "adapter.gguf")


@dataclass(frozen=True)
class Part:
    """Tokens of a tree of texts, T of them, each in some of S sequences.

    Attributes:
        token_T: int32.
        position_T: int32, position in its texts.
        count_T: int32, number of texts that it is part of.
        seq_TS: int32, these texts, the first `count_T` of a row.
        read_T: bool, whether its output is read.
    """

    token_T: Numbers
    position_T: Numbers
    count_T: Numbers
    seq_TS: Numbers
    read_T: Numbers

    def pieces(self) -> Iterator["Part"]:
        """Yields parts of at most `TOKENS_AT_ONCE` tokens and `PLACES_AT_ONCE` that are read, in order."""
        start = 0
        while start < len(self.token_T):
            fits = self.read_T[start : start + TOKENS_AT_ONCE].cumsum() <= PLACES_AT_ONCE
            stop = start + int(fits.sum())
            yield Part(*(getattr(self, name)[start:stop] for name in vars(self)))
            start = stop


@dataclass(frozen=True)
class Plan:
    """How texts are computed: what all have in common first, then parts, each after the one before is forgotten.

    Attributes:
        prefix: the common beginning; None: there is none that is worth it.
        start: its length.
        parts: the rest of the texts.
        places: numbers of the places, in the order in which they are read.
        size: largest number of tokens at a time.
    """

    prefix: Part | None
    start: int
    parts: Sequence[Part]
    places: list[int]
    size: int


def plan_of(texts: Sequence[Sequence[int]], text_P: Sequence[int], position_P: Sequence[int]) -> Plan:
    """Returns the plan of reading these places, in ascending order of texts and positions."""
    read: list[list[tuple[int, int]]] = [[] for _ in texts]  # (position, place)
    for place, (text, position) in enumerate(zip(text_P, position_P, strict=True)):
        read[text].append((position, place))
    order = sorted(range(len(texts)), key=lambda i: tuple(texts[i]))
    start = min(common_prefix(texts[order[0]], texts[order[-1]]), min(position_P))
    start = start if start >= LEAST_PREFIX and len(texts) > 1 else 0
    prefix = None
    if start:
        every = np.broadcast_to(np.arange(MOST_TEXTS, dtype=np.int32), (start, MOST_TEXTS))
        counts, none = np.full(start, MOST_TEXTS), np.zeros(start, dtype=bool)
        prefix = Part(np.array(texts[0][:start]), np.arange(start), counts, every, none)
    parts, places, size = [], [], 0
    for group in _groups([texts[i][start:] for i in order]):
        own = [order[i] for i in group]
        tree = packed_tree([texts[i][start:] for i in own], [[p - start for p, _ in read[i]] for i in own])
        place_of = {slot: place for i, slots in zip(own, tree.slots, strict=True)
                    for slot, (_, place) in zip(slots, read[i], strict=True)}  # fmt: skip
        places += [place_of[slot] for slot in range(len(tree.reads))]
        parts.append(_part(tree, start))
        size = max(size, start + len(tree.tokens))
    return Plan(prefix, start, parts, places, size)


def _groups(texts: Sequence[Sequence[int]]) -> Iterator[range]:
    """Yields neighbours among sorted texts whose tree has at most `TOKENS_AT_ONCE` tokens, or one text."""
    first, tokens = 0, 0
    for i, text in enumerate(texts):
        added = len(text) - (common_prefix(texts[i - 1], text) if i > first else 0)
        if i > first and (tokens + added > TOKENS_AT_ONCE or i - first == MOST_TEXTS):
            yield range(first, i)
            first, tokens, added = i, 0, len(text)
        tokens += added
    yield range(first, len(texts))


def _part(tree: TokenTree, start: int) -> Part:
    count = len(tree.tokens)
    leaves = np.array([tree.reads[slots[-1]] for slots in tree.slots])
    order = leaves.argsort(kind="stable")
    first_T = np.searchsorted(leaves[order], np.arange(count))
    last_T = np.searchsorted(leaves[order], np.array(tree.ends))
    seq_TS, read_T = np.zeros((count, int((last_T - first_T).max())), np.int32), np.zeros(count, dtype=bool)
    for token, (first, last) in enumerate(zip(first_T, last_T, strict=True)):
        seq_TS[token, : last - first] = order[first:last]
    read_T[list(tree.reads)] = True
    return Part(np.array(tree.tokens), np.array(tree.positions) + start, last_T - first_T, seq_TS, read_T)
