"""The weights in the safetensors of a folder, one at a time: stored as numbers, or in few bits with scales beside them.

Quantised weights with one scale for a matrix or for each row are read: FP8 and INT8 as compressed-tensors and vLLM
store them, W = scale * stored. Others are refused: without their scale, or in the order of a kernel, their numbers
would be taken for weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tezo.system.errors import RequestError

PLAIN = ("F64", "F32", "F16", "BF16")
SCALED = ("F8_E4M3", "F8_E5M2", "I8")
"""Types of weights, as safetensors names them, that are read as they are, and those that have scales."""
SCALE, ZERO_POINT = "_scale", "_zero_point"
"""Behind the name of a weight: its scale, and the number that stands for 0."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file.

    Attributes:
        path: of the file.
        kind: type of its numbers.
        shape: sizes.
    """

    path: Path
    kind: str
    shape: list[int]


class SafetensorsWeights(Mapping[str, Tensor]):
    """The weights in some files by the names of parameters, read at each use, in float32.

    Args:
        files: safetensors.
        model: their model.
    """

    def __init__(self, files: Sequence[Path], model: Any) -> None:
        self._shapes = {name: list(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self._tied = dict(model.all_tied_weights_keys)
        self._stored: dict[str, _Stored] = {}
        for path in files:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (a file is no mapping)
                    found = file.get_slice(name)
                    self._stored[name] = _Stored(path, found.get_dtype(), found.get_shape())

    def __getitem__(self, name: str) -> Tensor:
        """Returns a weight.

        Raises:
            KeyError: the model has no such parameter.
            RequestError: it is stored in a form that is not read.
        """
        reason = self._why_not(name)
        if reason is not None:
            raise RequestError(
                f"model.name: torch would read weights of the folder, and {reason}; give one with weights in full."
            )
        stored = self._name(name)
        weight = self._read(stored).float()
        if self._stored[stored].kind in SCALED:
            weight *= self._read(stored + SCALE).float().reshape(-1, *[1] * (weight.ndim - 1))
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def why_not(self) -> str | None:
        """Why some of the weights cannot be read, as a clause; None: all can."""
        if not self._stored:
            return "the folder has none"
        reasons = (self._why_not(name) for name in self._shapes)
        return next((reason for reason in reasons if reason is not None), None)

    def _why_not(self, name: str) -> str | None:
        shape, stored = self._shapes[name], self._name(name)
        found, scale = self._stored.get(stored), self._stored.get(stored + SCALE)
        if found is None:
            return f"it has no {name}, which has another name and form where it is packed"
        if found.shape != shape or found.kind not in (*PLAIN, *SCALED):
            return f"{name} is packed: {found.shape} of {found.kind} for {shape}"
        if found.kind in PLAIN:
            return None
        if scale is None:
            return f"{name} is in {found.kind} without {stored}{SCALE}"
        if stored + ZERO_POINT in self._stored:
            return f"{name} is in {found.kind} with a zero point"
        if scale.shape not in ([], [1], shape[:1], [*shape[:1], *[1] * (len(shape) - 1)]):
            return f"{name} is in {found.kind} with scales {scale.shape}, neither one nor one for each row"
        return None

    def _name(self, name: str) -> str:
        """Returns the name of the tensor that has a parameter."""
        return name if name in self._stored else self._tied.get(name, name)

    def _read(self, stored: str) -> Tensor:
        with safe_open(self._stored[stored].path, "pt") as file:
            found: Tensor = file.get_tensor(stored)
        return found
