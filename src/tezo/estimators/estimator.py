"""What an estimator is: evaluations of a closure in, an estimate of the gradient out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import nn

from tezo.directions.bases import FactorStore
from tezo.distributed import Ranks
from tezo.estimators.estimate import Closure, Estimate, StepDraw, StepRecord
from tezo.forward import MovingParameter


class Estimator(ABC):
    """A way to estimate the gradient. An optimizer steps along what it returns."""

    kind: ClassVar[str]
    """Name of its steps, in records and step logs."""

    @abstractmethod
    def prepare(self, model: nn.Module, moving: Mapping[str, MovingParameter], seed: int) -> None:
        """Called once by the optimizer, with the model and the parameters that are tuned."""

    @abstractmethod
    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        """The estimate at W_t; the model computes with W_t again when it returns, or raises.

        Args:
            closure: evaluates the objective on the batch of the step.
            draw: the directions of the step.

        Raises:
            RequestError: this closure or model does not allow such an estimate.
            FloatingPointError: a loss is NaN or infinite; its only argument is that loss.
        """

    @abstractmethod
    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        """The estimate of a finished step, from its record and the factor store, without an evaluation.

        Raises:
            RequestError: the record does not fit, or what was stored is missing.
        """

    def check(self, closure: Closure) -> None:
        """An error where this model does not allow such estimates; `closure` evaluates some rows."""
        del closure

    def set_factor_store(self, store: FactorStore) -> None:
        """Says where to keep what `recall` needs beside the record."""
        del store

    def resume(self, names: Sequence[str]) -> None:
        """Called after a state was loaded, with the parameters that have moments of this estimator's steps."""
        del names

    def share_directions(self, ranks: Ranks) -> None:
        """From now on each rank evaluates directions of its own, if there are any."""
        del ranks
