"""Rows of the cost tables, and the settings that all of their cells share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tezo.directions.targets import ALL
from tezo.methods import BASELINES, method
from tezo_studies.bench.settings import Settings

TEZO_RANK = 64
"""Rank of TeZO's directions: the library's `max_rank`. The paper searches 32 to 256."""


@dataclass(frozen=True)
class CostLine:
    """A row of a table.

    Attributes:
        label: printed label.
        method: name of the method; None: the model as it is, one forward pass.
        rank: rank of its directions; None: they are dense.
        peft: type of the adapter that is tuned instead of the model, see `ModelConfig.peft`.
        published: the paper's numbers, by shape; None: the model does not fit.
    """

    label: str
    method: str | None = None
    rank: int | None = None
    peft: Literal["none", "lora", "prefix"] = "none"
    published: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name on the command line and in files."""
        return self.label.lower()

    @property
    def by_gradient(self) -> bool:
        """Whether the method needs backpropagation."""
        return self.method in BASELINES

    @property
    def options(self) -> dict[str, Any]:
        """Options of the method: all parameters are tuned, as in the paper."""
        chosen: dict[str, Any] = {"targets": (ALL,)} | ({} if self.rank is None else {"rank": self.rank})
        return (
            chosen if self.method is None else {k: v for k, v in chosen.items() if k in method(self.method).options()}
        )


def settings_of(line: CostLine, model: str, device: str = "cpu") -> Settings:
    """The paper's setting: float16, 16 rows with the lengths of RTE, all parameters tuned."""
    shared = Settings(model=model, dtype="float16", device=device, batch=16, length="rte", targets=ALL, rounds=5)
    return shared if line.rank is None else replace(shared, rank=line.rank)
