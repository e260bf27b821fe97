"""The header of a GGUF file, read by llama.cpp itself."""

import ctypes
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from tezo.engines.llama_cpp.layouts import ReadParameters
from tezo.engines.llama_cpp.library import load_library
from tezo.system.errors import RequestError


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        name: its name.
        kind: ggml's number of its type.
        start: place of its first byte in the file.
        size: number of its bytes.
    """

    name: str
    kind: int
    start: int
    size: int


class GgufHeader:
    """Metadata and tensors of a file, whose values are not read.

    Args:
        path: of the file.

    Attributes:
        path: of the file.
        pointer: llama.cpp's `gguf_context`.
        tensors: the tensors by their names, in the order of the file.
        alignment: each tensor begins at a multiple of so many bytes.

    Raises:
        RequestError: it is not a whole GGUF file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        lib = load_library()
        lib.errors()
        pointer = lib.gguf_init_from_file(os.fsencode(path), ReadParameters(True, None))
        if not pointer:
            raise RequestError(
                f"model.name: {path} is not a GGUF file that {lib.name} reads ({lib.errors() or 'it does not say why'}"
                "); give another file."
            )
        self.lib, self.pointer, self.path = lib, pointer, Path(path)
        weakref.finalize(self, lib.gguf_free, pointer)
        self._start, self.alignment = lib.gguf_get_data_offset(pointer), lib.gguf_get_alignment(pointer)
        self.tensors = self._listed()
        end, size = max((at.start + at.size for at in self.tensors.values()), default=0), self.path.stat().st_size
        if size < end:
            raise RequestError(f"model.name: {path} ends after {size:,} of {end:,} bytes; download it again.")

    def text(self, key: str) -> str | None:
        """Returns a value of the metadata that is text; None: there is none of this name."""
        place = self.lib.gguf_find_key(self.pointer, key.encode())
        return None if place < 0 else self.lib.gguf_get_val_str(self.pointer, place).decode(errors="replace")

    def set_kind(self, name: str, kind: int) -> None:
        """Changes the type of a tensor, and the places of those behind it; its rows must be whole blocks of it."""
        self.lib.gguf_set_tensor_type(self.pointer, name.encode(), kind)
        self.tensors = self._listed()

    def metadata(self) -> bytes:
        """Returns all that stands before the tensors."""
        room = ctypes.create_string_buffer(self.lib.gguf_get_meta_size(self.pointer))
        self.lib.gguf_get_meta_data(self.pointer, room)
        return room.raw

    def _listed(self) -> dict[str, StoredTensor]:
        lib, found = self.lib, {}
        for i in range(lib.gguf_get_n_tensors(self.pointer)):
            name = lib.gguf_get_tensor_name(self.pointer, i).decode(errors="replace")
            place = self._start + lib.gguf_get_tensor_offset(self.pointer, i)
            kind, size = lib.gguf_get_tensor_type(self.pointer, i), lib.gguf_get_tensor_size(self.pointer, i)
            found[name] = StoredTensor(name, kind, place, size)
        return found
