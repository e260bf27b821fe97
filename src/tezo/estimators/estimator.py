"""The interface of estimators: an estimator evaluates a closure and returns an estimate of the gradient."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import nn

from tezo.directions.bases import FactorStore
from tezo.distributed import Ranks
from tezo.estimators.estimate import Closure, Estimate, StepDraw, StepRecord
from tezo.forward import MovingParameter


class Estimator(ABC):
    """A method of estimating the gradient."""

    kind: ClassVar[str]
    """Name of its kind of step in records and step logs."""

    @abstractmethod
    def prepare(self, model: nn.Module, moving: Mapping[str, MovingParameter], seed: int) -> None:
        """Called once by the optimizer, with the model, the tuned parameters by name and the seed of the run."""

    @abstractmethod
    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        """The estimate at W_t. No perturbation remains set when it returns or raises.

        Args:
            closure: evaluates the objective on the batch of the step.
            draw: the directions of the step.

        Raises:
            RequestError: the closure or the model does not support this estimate.
            FloatingPointError: a loss is NaN or infinite; the loss is the only argument of the error.
        """

    def passes(self, directions: int, *, first: bool) -> int:
        """Number of closure evaluations of a step: two for each direction, unless an estimator says otherwise.

        Args:
            directions: number of directions of a step, or of each example.
            first: whether the step has none of its kind before it in the update rule's moments.
        """
        del first
        return 2 * directions

    @abstractmethod
    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        """The estimate of a finished step from its record and the factor store, without evaluating a closure.

        Raises:
            RequestError: the record does not match, or the stored tensors are missing.
        """

    def accepts(self, probes: int, num_directions: int) -> bool:
        """Whether a step of this kind can have so many probes, with `num_directions` directions a step or example."""
        del num_directions
        return probes == 0

    def check(self, closure: Closure) -> None:
        """Raises a `RequestError` if the model does not support this estimate; `closure` evaluates some rows."""
        del closure

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for the tensors that `recall` needs in addition to the record."""
        del store

    def resume(self, names: Sequence[str]) -> None:
        """Called after a state is loaded, with the names of the parameters that have moments of this kind of step."""
        del names

    def share_directions(self, ranks: Ranks) -> None:
        """Distributes the directions of the following steps among the ranks; ignored without random directions."""
        del ranks
