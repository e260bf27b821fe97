"""The shared library of llama.cpp: where it is found, and the functions that are called in it.

xllamacpp has wheels for Linux, macOS and Windows, with all of llama.cpp in one shared library, which exports its C
functions. So does llama-cpp-python, which is compiled where it is installed, and any libllama. Structures differ
between their releases, so that `layouts` reads them off each library.
"""

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tezo.engines.llama_cpp.layouts import (
    Batch,
    ContextFields,
    InitParameters,
    LayoutError,
    ModelFields,
    Parameters,
    ReadParameters,
    TensorFields,
    check_batch,
)
from tezo.system.errors import RequestError

INSTALL = "pip install 'tezo[llama-cpp]'"
VARIABLE = "TEZO_LLAMA_CPP"
"""Environment variable with the path of a libllama, which is taken before any that is installed."""
PACKAGES = {
    "xllamacpp": ("xllamacpp*.so", "xllamacpp*.pyd", "xllamacpp*.dylib"),
    "llama_cpp": ("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll"),
}
"""Module -> patterns of its shared library, in the order in which they are looked for."""
DISTRIBUTIONS = {"xllamacpp": "xllamacpp", "llama_cpp": "llama-cpp-python"}
LAST_ERRORS = 8
"""Messages of llama.cpp that are kept for errors."""
ERROR_LEVEL = 4
"""ggml's number of the level."""

LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
EVALUATION_CALLBACK = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
"""(tensor, whether its data is asked for, user data) -> whether it is wanted, or whether to go on."""

_ERRORS: deque[str] = deque(maxlen=LAST_ERRORS)


def _logged(level: int, text: bytes, user: Any) -> None:
    """Keeps errors."""
    del user
    if level == ERROR_LEVEL and (line := text.decode(errors="replace").strip()):
        _ERRORS.append(line)


_LOG = LOG_CALLBACK(_logged)
"""A library calls it until the process ends, whatever became of its `Library`."""


_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LOG_CALLBACK, c_void_p]),
    "llama_model_default_params": (Parameters, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, Parameters]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_chat_template": (c_char_p, [c_void_p, c_char_p]),
    "llama_model_meta_val_str": (c_int32, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_has_encoder": (c_bool, [c_void_p]),
    "llama_model_has_decoder": (c_bool, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_context_default_params": (Parameters, []),
    "llama_init_from_model": (c_void_p, [c_void_p, Parameters]),
    "llama_free": (None, [c_void_p]),
    "llama_n_ctx": (c_uint32, [c_void_p]),
    "llama_n_batch": (c_uint32, [c_void_p]),
    "llama_n_ubatch": (c_uint32, [c_void_p]),
    "llama_n_seq_max": (c_uint32, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits": (POINTER(c_float), [c_void_p]),
    "llama_adapter_lora_init": (c_void_p, [c_void_p, c_char_p]),
    "llama_adapter_lora_free": (None, [c_void_p]),
    "llama_set_adapters_lora": (c_int32, [c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float)]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_type": (c_int, [c_void_p]),
    "llama_vocab_get_text": (c_char_p, [c_void_p, c_int32]),
    "llama_vocab_get_attr": (c_int, [c_void_p, c_int32]),
    "llama_vocab_is_control": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_bos": (c_int32, [c_void_p]),
    "llama_vocab_eos": (c_int32, [c_void_p]),
    "llama_vocab_eot": (c_int32, [c_void_p]),
    "llama_vocab_pad": (c_int32, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]),
    "llama_detokenize": (c_int32, [c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool]),
    "ggml_init": (c_void_p, [InitParameters]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_set_name": (c_void_p, [c_void_p, c_char_p]),
    "ggml_get_name": (c_void_p, [c_void_p]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_add": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_op_name": (c_char_p, [c_int]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_nelements": (c_int64, [c_void_p]),
    "ggml_type_size": (c_size_t, [c_int]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_type_name": (c_char_p, [c_int]),
    "ggml_quantize_chunk": (
        c_size_t, [c_int, POINTER(c_float), c_void_p, c_int64, c_int64, c_int64, POINTER(c_float)],
    ),
    "ggml_quantize_requires_imatrix": (c_bool, [c_int]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_dev_count": (c_size_t, []),
    "gguf_init_from_file": (c_void_p, [c_char_p, ReadParameters]),
    "gguf_free": (None, [c_void_p]),
    "gguf_find_key": (c_int64, [c_void_p, c_char_p]),
    "gguf_get_val_str": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_n_tensors": (c_int64, [c_void_p]),
    "gguf_get_tensor_name": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_tensor_type": (c_int, [c_void_p, c_int64]),
    "gguf_get_tensor_offset": (c_size_t, [c_void_p, c_int64]),
    "gguf_get_tensor_size": (c_size_t, [c_void_p, c_int64]),
    "gguf_get_data_offset": (c_size_t, [c_void_p]),
    "gguf_get_alignment": (c_size_t, [c_void_p]),
    "gguf_set_tensor_type": (None, [c_void_p, c_char_p, c_int]),
    "gguf_get_meta_size": (c_size_t, [c_void_p]),
    "gguf_get_meta_data": (None, [c_void_p, c_void_p]),
}  # fmt: skip
"""Function -> (type of what it returns, types of its arguments)."""

_WHERE_THEY_EXIST: dict[str, tuple[Any, Sequence[Any]]] = {
    "llama_version": (c_char_p, []),
    "llama_n_ctx_seq": (c_uint32, [c_void_p]),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "llama_model_n_params": (c_uint64, [c_void_p]),
    "ggml_get_type_traits": (c_void_p, [c_int]),
}
"""The same of functions that some releases do not have."""


@dataclass(frozen=True)
class Place:
    """A shared library.

    Attributes:
        path: of the file.
        name: how errors name it, with its version where it is known.
    """

    path: Path
    name: str


def find_library() -> Place | None:
    """Returns the library that is used: of `VARIABLE`, or of the first of `PACKAGES` that is installed; None: neither.

    Raises:
        RequestError: `VARIABLE` is set to something other than a file.
    """
    if given := os.environ.get(VARIABLE):
        path = Path(given).expanduser().absolute()
        if not path.is_file():
            raise RequestError(
                f"{VARIABLE} is {given}, which is not a file; set it to the path of a libllama (.so, .dylib or .dll), "
                f"or unset it and {INSTALL}."
            )
        return Place(path, str(path))
    for module, patterns in PACKAGES.items():
        spec = find_spec(module)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
        files = [path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern))]
        if files:
            return Place(files[0], _named(module))
    return None


def _named(module: str) -> str:
    distribution = DISTRIBUTIONS[module]
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:  # it lies on the path, without being installed
        return distribution


@cache
def load_library() -> "Library":
    """Returns the library, started, which prints nothing.

    Raises:
        RequestError: there is none, it does not load, lacks functions, or has structures that are not known.
    """
    place = find_library()
    if place is None:
        raise RequestError(f"model.engine is llama.cpp, which needs its library: {INSTALL}.")
    return Library(place)


class Library:
    """llama.cpp's functions, as attributes.

    Args:
        place: of the shared library.

    Attributes:
        name: how errors name it.
        context: places of the fields of context parameters.
        model: likewise of model parameters.
        tensor: likewise of tensors.
    """

    def __init__(self, place: Place) -> None:
        self._functions = _bound(place)
        found = self._functions.get("llama_version")
        self.name = f"{place.name} (llama.cpp {found().decode()})" if found is not None else place.name
        self.llama_log_set(_LOG, None)
        self._start(place.path)
        try:
            check_batch(self)
            self.context = ContextFields.of(bytes(self.llama_context_default_params()))
            self.model = ModelFields.of(bytes(self.llama_model_default_params()))
            self.tensor = TensorFields.of(self)
        except LayoutError as error:
            raise RequestError(
                f"model.engine is llama.cpp, and the structures of {self.name} are not those that are known here: "
                f"{error}. Install another release ({INSTALL}), or name another libllama by {VARIABLE}=PATH."
            ) from None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None

    def has(self, name: str) -> bool:
        """Returns whether the library has a function that only some releases have."""
        return name in self._functions

    def errors(self) -> str:
        """Returns the last messages of errors since the last call, on one line; "" if there were none."""
        found = "; ".join(dict.fromkeys(_ERRORS))
        _ERRORS.clear()
        return found

    def _start(self, path: Path) -> None:
        self.llama_backend_init()
        if self.ggml_backend_dev_count() == 0 and self.has("ggml_backend_load_all_from_path"):
            self.ggml_backend_load_all_from_path(os.fsencode(path.parent))


def _bound(place: Place) -> dict[str, Any]:
    """Returns the functions of a library, with the types of their arguments."""
    # ggml is a library beside libllama, which Windows does not look through by itself
    beside = list(place.path.parent.glob("ggml*.dll"))
    try:
        libraries = [ctypes.CDLL(str(path)) for path in [*beside, place.path]]
    except OSError as error:
        raise RequestError(
            f"model.engine is llama.cpp, and {place.name} does not load here ({error}); {INSTALL}, or name another "
            f"libllama by {VARIABLE}=PATH."
        ) from None
    found = {}
    for name, (result, arguments) in (_FUNCTIONS | _WHERE_THEY_EXIST).items():
        function = next((getattr(own, name) for own in reversed(libraries) if hasattr(own, name)), None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
            found[name] = function
    lacking = [name for name in _FUNCTIONS if name not in found]
    if lacking:
        raise RequestError(
            f"model.engine is llama.cpp, and {place.name} lacks {', '.join(lacking[:3])}"
            f"{' and others' if len(lacking) > 3 else ''}; install a newer one ({INSTALL}), or name another libllama "
            f"by {VARIABLE}=PATH."
        )
    return found
