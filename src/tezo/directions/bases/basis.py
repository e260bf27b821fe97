"""What a basis is: it gives each matrix the factors that stay fixed over an interval, or over the whole run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

from tezo.directions.targets import Target

Role = Literal["u", "v"]
"""The side of a factor: "u" has the M rows of the stored weight, "v" its N columns."""

Passes = Callable[[int], object]
"""Runs forward passes over the training rows from which the factors of that refresh step are computed."""


@dataclass(frozen=True)
class Draw:
    """Which factors are drawn.

    Attributes:
        owner: name of the parameter, or of the parameters that share them.
        seed: of the run.
        refresh_step: the step at which they are drawn, the first of those that use them.
    """

    owner: str
    seed: int
    refresh_step: int


@dataclass(frozen=True)
class CollectedFactors:
    """What was computed from the training data at one step.

    Attributes:
        factors: name of the parameter -> factor; of a basis float64 on the CPU.
        calls: calls of the model that this took.
    """

    factors: Mapping[str, Tensor]
    calls: int


class FactorStore(Protocol):
    """Stores what was computed from the data, so that steps can be replayed without the data."""

    def load(self, kind: str, step: int) -> CollectedFactors | None:
        """What was stored at that step; None where there is nothing."""

    def save(self, kind: str, step: int, collected: CollectedFactors) -> None:
        """Stores what was computed at that step."""


class Basis(ABC):
    """Where the fixed factors of low-rank directions come from.

    Factors are float64 on the CPU, and the mean square of their entries is 1, so that directions have unit variance
    with every basis.
    """

    data_dependent = False
    """Whether factors depend on the data; a run then saves them."""

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        """Called once, with the matrices that will be tuned and the ranks of their factors."""
        del targets, ranks

    def set_calibration_passes(self, model: nn.Module, passes: Passes) -> None:
        """Sets the model and the forward passes from which factors are computed; a random basis needs none."""
        del model, passes

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets where factors that depend on the data are stored; a random basis stores none."""
        del store

    @abstractmethod
    def factor(self, role: Role, target: Target, rank: int, draw: Draw) -> Tensor:
        """The factor of `target`: (M, rank) of role "u", (N, rank) of role "v"."""

    @property
    def cost(self) -> tuple[int, float]:
        """(calls of the model, seconds) spent on factors so far."""
        return 0, 0.0

    def state(self) -> dict[str, Tensor]:
        """What cannot be computed again without the data: "REFRESH_STEP/NAME" -> factor."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts a `state` back."""
        del state
