"""Where the fields of llama.cpp's structures are, read off the library itself.

Releases add fields in the middle of structures, so no place is taken for granted. Parameters are found by their default
values, which stand in a known order, and fields of tensors by tensors that the library makes. All else is an error.
"""

import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, c_bool, c_float, c_int8, c_int32, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

SPACE = 512
"""Bytes that parameters are given. They take fewer, and a function that is given more does not read the rest."""
FLOAT32, FLOAT16, BFLOAT16, Q8_0 = 0, 1, 30, 8
"""ggml's numbers of types."""


class LayoutError(Exception):
    """A structure is not as expected; says where it differs."""


class Parameters(ctypes.Structure):
    """Parameters of models or contexts, whose fields are known by their place alone."""

    _fields_ = [("words", c_uint64 * (SPACE // 8))]


class InitParameters(ctypes.Structure):
    """Of `ggml_init`: bytes of a pool, where it is, and whether data gets no room."""

    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("no_data", c_bool)]


class ReadParameters(ctypes.Structure):
    """Of `gguf_init_from_file`: whether data gets no room, and where its tensors are to be put."""

    _fields_ = [("no_data", c_bool), ("tensors", c_void_p)]


OF_BATCH: Sequence[tuple[str, Any]] = [
    ("count", c_int32),
    ("token", POINTER(c_int32)),
    ("embedding", POINTER(c_float)),
    ("position", POINTER(c_int32)),
    ("sequences", POINTER(c_int32)),
    ("sequence", POINTER(POINTER(c_int32))),
    ("output", POINTER(c_int8)),
]


class Batch(ctypes.Structure):
    """Tokens of one call, or embeddings in their place."""

    _fields_ = OF_BATCH


def check_batch(lib: Any) -> None:
    """Raises a `LayoutError` where a new batch has not the fields of `Batch`."""
    batch = lib.llama_batch_init(3, 0, 2)
    try:
        given = [bool(getattr(batch, name)) for name, _ in OF_BATCH]
        if given != [False, True, False, True, True, True, True] or any(not batch.sequence[i] for i in range(3)):
            raise LayoutError("llama_batch is not a number, tokens, no embeddings and four other arrays")
    finally:
        lib.llama_batch_free(batch)


@dataclass(frozen=True)
class ContextFields:
    """Places, in bytes, of fields of llama_context_params.

    Attributes:
        sizes: n_ctx, n_batch, n_ubatch and n_seq_max.
        threads: n_threads and n_threads_batch.
        flash_attention: flash_attn_type.
        callback: cb_eval.
        types: type_k and type_v.
        unified: kv_unified.
    """

    sizes: tuple[int, int, int, int]
    threads: tuple[int, int]
    flash_attention: int
    callback: int
    types: tuple[int, int]
    unified: int

    @classmethod
    def of(cls, defaults: bytes) -> "ContextFields":
        """Returns the places in a structure with these default values, which may have anything behind it.

        Raises:
            LayoutError: the values are not there in the known order.
        """
        words = struct.unpack(f"<{len(defaults) // 4}i", defaults)
        minus_one = struct.unpack("<i", struct.pack("<f", -1.0))[0]
        if words[:4] != (512, 2048, 512, 1):
            raise LayoutError(f"llama_context_params begins with {words[:4]}, not with 512, 2048, 512 and 1")
        threads = _first(words, range(4, 12), (4, 4), "n_threads and n_threads_batch")
        kinds = _first(words, range(threads + 2, threads + 6), (-1, -1, -1, -1), "the four types that are not set")
        floats = (0, 0, *[minus_one] * 4, 0, minus_one)  # of positions, and the threshold behind them
        scaling = _first(words, range(kinds + 4, kinds + 5), floats, "the scaling of positions")
        callback = scaling + len(floats) + (scaling + len(floats)) % 2  # pointers are aligned
        if any(words[callback : callback + 4]):
            raise LayoutError("llama_context_params has a callback by default")
        types = _first(words, range(callback + 4, callback + 5), (FLOAT16, FLOAT16), "type_k and type_v")
        flags = defaults.find(bytes([0, 1, 1, 1, 1, 0]), 4 * types + 8)
        between = defaults[4 * types + 8 : max(flags, 0)]
        if flags < 0 or flags % 8 or len(between) > 64 or any(between):
            raise LayoutError("llama_context_params has not the six known flags behind type_v and pointers")
        return cls(
            (0, 4, 8, 12), (4 * threads, 4 * threads + 4), 4 * (kinds + 3), 4 * callback, (4 * types, 4 * types + 4),
            flags + 5,
        )  # fmt: skip


@dataclass(frozen=True)
class ModelFields:
    """Place, in bytes, of a field of llama_model_params.

    Attributes:
        vocabulary_only: vocab_only.
    """

    vocabulary_only: int

    @classmethod
    def of(cls, defaults: bytes) -> "ModelFields":
        """Returns the place in a structure with these default values; see `ContextFields.of`."""
        words = struct.unpack(f"<{len(defaults) // 4}i", defaults)
        if any(words[:4]) or words[4] not in (-1, 999, 0) or words[5] != 1:
            raise LayoutError(f"llama_model_params has {words[:6]}, not two pointers, a number of layers and 1")
        # numbers, four pointers, and flags, of which the first is vocab_only and the first that is set stands in a word
        flags = next((place for place in range(32, 120) if defaults[place] == 1 and place % 8 < 6), None)
        pointers = None if flags is None else range(flags // 8 * 8 - 32, flags // 8 * 8)
        if flags is None or pointers is None or any(defaults[pointers.start : pointers.stop]) or flags % 8 == 0:
            raise LayoutError("llama_model_params has not four pointers and flags behind them")
        return cls(pointers.stop)


@dataclass(frozen=True)
class TensorFields:
    """Places, in bytes, of fields of ggml_tensor.

    Attributes:
        kind: type.
        sizes: ne, four numbers of 8 bytes.
        strides: nb, likewise.
        operation: op.
        sources: src.
        product: the number of the operation MUL_MAT.
        sum: likewise of ADD.
        scaled: likewise of MUL.
        scaling: likewise of SCALE.
    """

    kind: int
    sizes: int
    strides: int
    operation: int
    sources: int
    product: int
    sum: int
    scaled: int
    scaling: int

    @classmethod
    def of(cls, lib: Any) -> "TensorFields":
        """Returns the places, as tensors have them that the library makes.

        Raises:
            LayoutError: a field is not found, or at several places.
        """
        pool = lib.ggml_init(InitParameters(1 << 16, None, True))
        if not pool:
            raise LayoutError("ggml_init makes no pool of 64 KiB without data")
        try:
            return cls._of(lib, pool)
        finally:
            lib.ggml_free(pool)

    @classmethod
    def _of(cls, lib: Any, pool: int) -> "TensorFields":
        weight = lib.ggml_new_tensor_2d(pool, FLOAT16, 64, 5)
        x, bias = lib.ggml_new_tensor_2d(pool, FLOAT32, 64, 3), lib.ggml_new_tensor_2d(pool, FLOAT32, 5, 1)
        packed, half = lib.ggml_new_tensor_2d(pool, Q8_0, 32, 7), lib.ggml_new_tensor_2d(pool, BFLOAT16, 9, 2)
        product = lib.ggml_mul_mat(pool, weight, x)
        added = lib.ggml_add(pool, product, bias)
        size = lib.ggml_get_name(weight) - weight  # the name stands behind all that is looked for
        if not 64 <= size <= 1024:
            raise LayoutError(f"the name of a ggml_tensor stands {size} bytes behind its beginning")
        lib.ggml_set_name(weight, b"a name")
        if ctypes.string_at(weight + size) != b"a name":
            raise LayoutError("the name of a ggml_tensor is not where it was")
        memory = {at: ctypes.string_at(at, size) for at in (weight, x, bias, packed, half, product, added)}

        def place(what: str, kind: str, values: Mapping[int, Sequence[int]]) -> int:
            width = struct.calcsize(kind)
            found = [
                start
                for start in range(0, size - 4 * width, width)
                if all(
                    struct.unpack_from(f"<{len(own)}{kind}", memory[at], start) == tuple(own)
                    for at, own in values.items()
                )
            ]
            if len(found) != 1:
                raise LayoutError(f"ggml_tensor has {what} at {len(found)} places")
            return found[0]

        kinds = {weight: [FLOAT16], x: [FLOAT32], packed: [Q8_0], half: [BFLOAT16]}
        sizes = {weight: [64, 5, 1, 1], x: [64, 3, 1, 1], packed: [32, 7, 1, 1], product: [5, 3, 1, 1]}
        strides = {weight: [2, 128, 640, 640], x: [4, 256, 768, 768], half: [2, 18, 36, 36]}
        numbers = {name: _operation(lib, name) for name in ("MUL_MAT", "ADD", "MUL", "SCALE")}
        operations = {product: [numbers["MUL_MAT"]], added: [numbers["ADD"]], x: [0]}
        fields = cls(
            place("type", "i", kinds), place("ne", "q", sizes), place("nb", "q", strides),
            place("op", "i", operations), place("src", "Q", {product: [weight, x], added: [product, bias]}),
            numbers["MUL_MAT"], numbers["ADD"], numbers["MUL"], numbers["SCALE"],
        )  # fmt: skip
        if lib.ggml_nbytes(product) != 60 or lib.ggml_nelements(x) != 192 or lib.ggml_nbytes(packed) != 7 * 34:
            raise LayoutError("sizes of tensors are not what their numbers of elements and types say")
        return fields


def _operation(lib: Any, name: str) -> int:
    found = [number for number in range(64) if lib.ggml_op_name(number) == name.encode()]
    if len(found) != 1:
        raise LayoutError(f"{len(found)} of the first 64 operations of ggml are {name}")
    return found[0]


def _first(words: Sequence[int], places: Iterable[int], values: Sequence[int], what: str) -> int:
    found = next((i for i in places if tuple(words[i : i + len(values)]) == tuple(values)), None)
    if found is None:
        raise LayoutError(f"llama_context_params has no {what} where they should be")
    return found


def put(parameters: Parameters, place: int, kind: str, value: int | None) -> None:
    """Writes a field of parameters; `kind` is its type as `struct` has it."""
    struct.pack_into(f"<{kind}", (ctypes.c_char * SPACE).from_buffer(parameters), place, value or 0)
