"""Tensors of a graph that llama.cpp computes: which layer one belongs to, and its values, wherever they lie."""

import ctypes
import struct
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tezo.engines.llama_cpp.layouts import FLOAT32
from tezo.engines.llama_cpp.plan import Numbers

WEIGHT, LORA_B = ".weight", ".lora_b"


class Tensors:
    """Reads and writes tensors by their addresses.

    Args:
        lib: the library.
    """

    def __init__(self, lib: Any) -> None:
        self._lib, self._fields = lib, lib.tensor

    def product_of(self, node: int) -> str | None:
        """Returns the name of the weight, a matrix, that a node multiplies its input by; None: it does not."""
        if self._operation(node) != self._fields.product:
            return None
        weight = self.source(node, 0)
        name = self.name(weight)
        return name if name.endswith(WEIGHT) and self.shape(weight)[2:] == (1, 1) else None

    def output_of(self, node: int) -> str | None:
        """Returns the name of the weight of the layer whose output a node is, as far as it is computed.

        That is the product, then its sum with what a LoRA adds, then with a bias.
        """
        if self._operation(node) not in (self._fields.sum, self._fields.scaled):
            return self.product_of(node)
        added, layer = self.source(node, 1), None
        stem, _, kind = self.name(added).rpartition(".")
        if kind in ("bias", "scale"):  # the latter is of some types
            layer = stem + WEIGHT
        elif self._operation(added) == self._fields.product:
            layer = self.adapted_by(added)
        elif self._operation(added) == self._fields.scaling:
            layer = self.adapted_by(self.source(added, 0))
        return layer if layer is not None and self.output_of(self.source(node, 0)) == layer else None

    def adapted_by(self, node: int) -> str | None:
        """Returns the name of the weight to whose layer a node adds what a LoRA has; None: it does not."""
        if self._operation(node) != self._fields.product:
            return None
        name = self.name(self.source(node, 0))
        return name.removesuffix(LORA_B) if name.endswith(LORA_B) else None

    def source(self, node: int, number: int) -> int:
        """Returns the address of a node's operand; 0 where it has none."""
        place = node + self._fields.sources + 8 * number
        return ctypes.c_uint64.from_address(place).value

    def name(self, tensor: int) -> str:
        """Returns the name of a tensor, of a copy on another device that of the original; "" of none."""
        if not tensor:
            return ""
        name = ctypes.string_at(self._lib.ggml_get_name(tensor)).decode(errors="replace")
        return name.split("#")[1] if name.count("#") == 2 else name

    def shape(self, tensor: int) -> tuple[int, int, int, int]:
        """Returns the four sizes of a tensor, that of the innermost dimension first."""
        return struct.unpack("<4q", ctypes.string_at(tensor + self._fields.sizes, 32))

    def columns(self, tensor: int) -> int:
        """Returns the number of vectors of a tensor."""
        width, *others = self.shape(tensor)
        return int(np.prod(others)) if width else 0

    def values(self, tensor: int) -> Numbers:
        """Returns the values of a tensor, (vectors, size of each), float32.

        Raises:
            TypeError: they are not of this type.
        """
        self._check(tensor)
        sizes = self.shape(tensor)
        strides = struct.unpack("<4q", ctypes.string_at(tensor + self._fields.strides, 32))
        stored = np.empty(self._lib.ggml_nbytes(tensor) // 4, np.float32)
        if stored.size:
            self._lib.ggml_backend_tensor_get(tensor, stored.ctypes.data, 0, stored.nbytes)
        return as_strided(stored, sizes[::-1], strides[::-1]).reshape(self.columns(tensor), sizes[0])

    def write(self, tensor: int, values: Numbers) -> None:
        """Replaces all values of a tensor, which must lie without gaps."""
        self._check(tensor)
        stored = np.ascontiguousarray(values, np.float32)
        if stored.nbytes != self._lib.ggml_nbytes(tensor):
            raise TypeError(f"{self.name(tensor)} has gaps between its values")
        if stored.nbytes:
            self._lib.ggml_backend_tensor_set(tensor, stored.ctypes.data, 0, stored.nbytes)

    def _check(self, tensor: int) -> None:
        kind = ctypes.c_int32.from_address(tensor + self._fields.kind).value
        if kind != FLOAT32:
            raise TypeError(f"{self.name(tensor)} is of ggml's type {kind}, not of float32")

    def _operation(self, node: int) -> int:
        return ctypes.c_int32.from_address(node + self._fields.operation).value if node else 0
