"""Settings of the benchmark: model, batch and methods, checked before anything is built."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tezo.methods import method
from tezo.models.loading import DTYPES
from tezo.optim.optimizer import PER_EXAMPLE
from tezo.system.errors import RequestError, nearest
from tezo_studies.bench.published import PUBLISHED
from tezo_studies.bench.shapes import SHAPES

PREFIX = "published:"
EACH = "per-example:"
WHOLE = "plain-closure:"
GRAPHS = "cuda-graphs:"
CAPTURED = "captured:"
ONE_PASS = "one-pass:"
"""Prefixes of a method's name: as its authors wrote it; with directions of their own for the examples; with a closure
that calls the stock model with its default logits, as a user's own does; with such a closure of the model as
torch.compile makes it with mode "reduce-overhead", whose passes are CUDA graphs; with the closure of a run, whose
passes are captured whole; with such a closure of which one pass has both signs, however many its tokens."""
KERNEL = "kernel:mezo"
"""Label of published MeZO with its noise drawn in a kernel."""
PLAIN = ("F2", "N2", "J2")
GRADIENTS = {"lora": False, "lora-checkpointed": True}
"""Label of training by backpropagation -> whether activations are recomputed. Over a packed base it is QLoRA."""
TARGETS = ("all-linear", "all")

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}

LENGTHS: Mapping[str, Sequence[int]] = {
    "rte": (
        32, 38, 42, 44, 47, 49, 52, 54, 56, 57, 58, 60, 61, 63, 65, 66,
        69, 71, 73, 75, 77, 81, 85, 92, 104, 114, 124, 136, 146, 155, 169, 203,
    ),
}  # fmt: skip
"""Quantiles of length distributions in tokens. "rte": the prompts of 1000 training rows, at 4.5 characters per token
(mean 82, maximum 253)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one benchmark.

    Attributes:
        model: key of `SHAPES`, folder or hub name.
        dtype: data type of the weights, a key of `DTYPES` or fp32, bf16, fp16, fp64.
        device: name of a torch device.
        batch: rows per batch.
        length: tokens per row, or a key of `LENGTHS`.
        rank: rank of the low-rank methods.
        targets: tuned parameters, "all-linear" or "all".
        rounds: maximum number of rounds; each measures everything once.
        warmup: warm-up rounds, which are not counted.
        seconds: time limit in seconds, after which no round begins (step: three rounds are always run); None: no limit.
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
                raise RequestError(f"length is {longest}, but {self.model} has {positions} positions; lower it.")

    def lengths(self) -> list[int]:
        """Tokens of each row: equal for all, or evenly spaced quantiles of a distribution in a fixed order."""
        if self.length in LENGTHS:
            table = LENGTHS[self.length]
            drawn = [table[int((row + 0.5) / self.batch * len(table))] for row in range(self.batch)]
            random.Random(0).shuffle(drawn)
            return drawn
        if not re.fullmatch(r"[0-9]+", self.length) or int(self.length) < 1:
            known = ", ".join(LENGTHS)
            raise RequestError(
                f"length is {self.length!r}; it must be a whole number of at least 1, or one of {known}."
            )
        return [int(self.length)] * self.batch

    def options(self, label: str) -> dict[str, Any]:
        """Options for a method: the targets, the rank if the method has one, and its kind of directions."""
        chosen: dict[str, Any] = {"targets": (self.targets,), "rank": self.rank}
        if label.startswith(EACH):
            chosen["directions"] = PER_EXAMPLE
        return {key: value for key, value in chosen.items() if key in method(name_of(label)).options()}


def name_of(label: str) -> str:
    """The method's name in the label of a case."""
    for prefix in (PREFIX, EACH, WHOLE, GRAPHS, CAPTURED, ONE_PASS, "kernel:"):
        label = label.removeprefix(prefix)
    return label


def entries(methods: Sequence[str], *, published: bool) -> list[str]:
    """Labels of the cases to measure, without duplicates.

    Args:
        methods: names of methods, with the prefix "published:" for the published form, "per-example:" or
            "plain-closure:".
        published: whether to add the published form of each method; tezo-cadam, ours, has none.

    Raises:
        RequestError: there is no such method or published form, or `methods` is empty.
    """
    labels: list[str] = []
    for label in methods:
        name = name_of(label)
        method(name)
        if label.startswith(PREFIX) and name not in PUBLISHED:
            raise RequestError(f"methods: {name} has no published form. " + nearest(name, PUBLISHED))
        labels.append(label)
        if published and label in PUBLISHED:
            labels.append(PREFIX + name)
    if not labels:
        raise RequestError("methods is empty; name at least one, such as tezo.")
    return list(dict.fromkeys(labels))
