"""What is measured: the model, the batch, the methods; checked before anything is built."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tezo.errors import RequestError, nearest
from tezo.models.loading import DTYPES
from tezo.optim.methods import method
from tezo.studies.bench.published import PUBLISHED
from tezo.studies.bench.shapes import SHAPES

PREFIX = "published:"
PLAIN = ("F2", "N2", "J2")
TARGETS = ("all-linear", "all")

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}

LENGTHS: Mapping[str, Sequence[int]] = {
    "rte": (
        32, 38, 42, 44, 47, 49, 52, 54, 56, 57, 58, 60, 61, 63, 65, 66,
        69, 71, 73, 75, 77, 81, 85, 92, 104, 114, 124, 136, 146, 155, 169, 203,
    ),
}  # fmt: skip
"""Quantiles of length distributions in tokens. "rte": the prompts of 1000 training rows, at 4.5 characters a token
(mean 82, longest 253)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One setting of the benchmark.

    Attributes:
        model: key of `SHAPES`, folder or hub name.
        dtype: of the weights.
        device: torch's name of it.
        batch: rows.
        length: tokens of every row, or a key of `LENGTHS`.
        rank: of the low-rank methods.
        targets: what is trained, "all-linear" or "all".
        rounds: how often everything is measured, at most.
        warmup: rounds before those, not counted.
        seconds: after so long no further round begins, once there are three; None: all rounds.
    """

    model: str = "opt-125m"
    dtype: str = "float32"
    device: str = "cpu"
    batch: int = 1
    length: str = "32"
    rank: int = 32
    targets: str = "all-linear"
    rounds: int = 7
    warmup: int = 1
    seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _SHORT.get(self.dtype, self.dtype))
        if self.dtype not in DTYPES:
            raise RequestError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if self.targets not in TARGETS:
            raise RequestError(f"targets is {self.targets!r}; it must be one of {', '.join(TARGETS)}.")
        for key, least in (("batch", 1), ("rank", 1), ("rounds", 1), ("warmup", 0)):
            if getattr(self, key) < least:
                raise RequestError(f"{key} is {getattr(self, key)}; it must be at least {least}.")
        if self.seconds is not None and not self.seconds > 0:
            raise RequestError(f"seconds is {self.seconds}; it must be positive.")
        lengths = self.lengths()
        self._check_positions(max(lengths))

    def _check_positions(self, longest: int) -> None:
        if self.model in SHAPES:
            positions = SHAPES[self.model].make().max_position_embeddings
            if longest > positions:
                raise RequestError(f"length is {longest}; {self.model} has {positions} positions, give no more.")

    def lengths(self) -> list[int]:
        """Tokens of each row: the same for all, or evenly spaced quantiles of a distribution in a fixed order."""
        if self.length in LENGTHS:
            table = LENGTHS[self.length]
            drawn = [table[int((row + 0.5) / self.batch * len(table))] for row in range(self.batch)]
            random.Random(0).shuffle(drawn)
            return drawn
        if not re.fullmatch(r"[0-9]+", self.length) or int(self.length) < 1:
            known = ", ".join(LENGTHS)
            raise RequestError(f"length is {self.length!r}; it must be a whole number from 1 on, or one of {known}.")
        return [int(self.length)] * self.batch

    def options(self, name: str) -> dict[str, Any]:
        """What a method's function is called with: the targets, and the rank where it has one."""
        chosen: dict[str, Any] = {"targets": (self.targets,), "rank": self.rank}
        return {key: value for key, value in chosen.items() if key in method(name).options()}


def entries(methods: Sequence[str], *, published: bool) -> list[str]:
    """Labels to measure, each once: what is asked for, and with `published` the published form of each method.

    Args:
        methods: names of methods, "published:" before those meant in their published form.
        published: adds the published form where there is one; tezo-cadam, ours, has none.
    """
    labels: list[str] = []
    for label in methods:
        name = label.removeprefix(PREFIX)
        method(name)
        if label.startswith(PREFIX) and name not in PUBLISHED:
            raise RequestError(f"methods: {name} has no published form. " + nearest(name, PUBLISHED))
        labels.append(label)
        if published and name in PUBLISHED:
            labels.append(PREFIX + name)
    if not labels:
        raise RequestError("methods is empty; name at least one, such as tezo.")
    return list(dict.fromkeys(labels))
