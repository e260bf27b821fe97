"""What a basis is: it gives each matrix the factors that stay fixed over an interval, or over the whole run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from tezo.directions.targets import Target

Role = Literal["u", "v"]
"""Of a factor: "u" has the weight's M rows, "v" its N columns, as the weight is stored."""

Passes = Callable[[int], object]
"""Runs forward passes over the rows that a basis refresh_step at that step is to see."""


@dataclass(frozen=True)
class Draw:
    """Which factors: whose, of which run, and from which step on they hold."""

    owner: str
    seed: int
    refresh_step: int


@dataclass(frozen=True)
class CollectedFactors:
    """What was seen of the data at one step.

    Attributes:
        factors: name -> factor; of a basis float64 on the CPU.
        calls: of the model, that it took.
    """

    factors: Mapping[str, Tensor]
    calls: int


class FactorStore(Protocol):
    """Where what was seen of the data is kept, so that steps can be taken again without it."""

    def load(self, kind: str, step: int) -> CollectedFactors | None:
        """What was seen at that step; None where there is nothing."""

    def save(self, kind: str, step: int, seen: CollectedFactors) -> None:
        """Keeps it."""


class Basis(ABC):
    """Where the fixed factors of low-rank directions come from.

    Factors are float64 on the CPU, and the mean square of their entries is 1, so that directions keep unit variance
    whatever the basis.
    """

    data_dependent = False
    """Whether factors depend on the data: they are saved with a run."""

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        """Called once, with the matrices that will be tuned and the ranks of their factors."""
        del targets, ranks

    def set_calibration_passes(self, model: nn.Module, passes: Passes) -> None:
        """Says what to look at; a basis that sees no data does not look."""
        del model, passes

    def set_factor_store(self, store: FactorStore) -> None:
        """Says where to keep what was seen, so that steps can be taken again without the data."""
        del store

    @abstractmethod
    def factor(self, role: Role, target: Target, rank: int, draw: Draw) -> Tensor:
        """The (M, rank) or (N, rank) factor of `target`, by its role."""

    @property
    def cost(self) -> tuple[int, float]:
        """(calls of the model, seconds) that were spent on looking so far."""
        return 0, 0.0

    def state(self) -> dict[str, Tensor]:
        """What cannot be drawn again without the data: "BORN/NAME" -> factor."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts a `state` back."""
        del state
