"""The interface of estimators and its data: directions of a step, measurements, estimates, step records."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import FactorStore, Predictions
from tezo.directions.spaces import Direction, Tile
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.closures import Closure, Losses
from tezo.system.errors import RequestError
from tezo.system.processes import ProcessGroup

MOST_DIRECTIONS = 1 << 12
"""Largest number of directions per step. A step log with more is refused."""

TWO_POINT, FEEDBACK, GRADIENT, GAUSS_NEWTON = "two-point", "feedback", "gradient", "gauss-newton"
POPULATION, POLICY_GRADIENT = "population", "policy-gradient"
"""Names of step rules: with random directions, with the error at the last hidden states, with backpropagation, with the
outputs of each row, with the scores of many members, with those of many answers."""


@dataclass(frozen=True)
class Probe:
    """The measurement along one direction; by two points, unless an estimator describes it otherwise.

    Attributes:
        loss_plus: f(W + rho Z).
        loss_minus: f(W - rho Z).
        projected_grad: kappa = (loss_plus - loss_minus) / (2 rho), in float64: the weight of Z in the estimate.
    """

    loss_plus: float
    loss_minus: float
    projected_grad: float


@dataclass(frozen=True)
class StepRecord:
    """Record of a finished step.

    Attributes:
        step: number of the step, from 0.
        loss: mean of all evaluations, which is the loss at W_t up to terms in rho^2 for two-point estimates; that loss
            itself where it is evaluated (fzoo, mezo-conservative, gauss-newton).
        lr: learning rate of the step.
        probes: one per direction; empty for steps without random directions.
        rule: name of its rule, such as `TWO_POINT`.
        forward_passes: number of closure evaluations of the step.
    """

    step: int
    loss: float
    lr: float
    probes: tuple[Probe, ...] = ()
    rule: str = TWO_POINT
    forward_passes: int = 0

    @property
    def projected_grads(self) -> tuple[float, ...]:
        """Projected gradient kappa of each direction."""
        return tuple(probe.projected_grad for probe in self.probes)

    @property
    def is_idle(self) -> bool:
        """Whether it learnt nothing: the projected gradients of all its directions are 0."""
        return bool(self.probes) and not any(self.projected_grads)


def precise(loss: Any) -> Any:
    """Returns the loss.

    Raises:
        RequestError: there is none, or its dtype is too coarse for the difference of two losses.
    """
    if not hasattr(loss, "__float__"):
        what = "None" if loss is None else type(loss).__name__
        raise RequestError(f"the closure returned {what}; have it return the loss, as in lambda: model(**batch).loss.")
    if isinstance(loss, Tensor) and loss.dtype in (torch.bfloat16, torch.float16):
        raise RequestError(
            f"the closure's loss is {loss.dtype}, too coarse for the difference of two of them; compute it in "
            "float32, for example from logits.float()."
        )
    return loss


def mean_loss(closure: Closure) -> float:
    """Returns the loss of one model by a closure.

    Raises:
        RequestError: it is several losses, or of too coarse a dtype.
    """
    loss = precise(closure.losses(1) if isinstance(closure, Losses) else closure())
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise RequestError(
            f"the closure returned {loss.numel()} losses; return their mean, or make the optimizer with "
            "directions='per-example'."
        )
    return float(loss)


@dataclass(frozen=True)
class StepDraw:
    """The random directions of a step.

    Attributes:
        step: number of the step, from 0.
        count: number of earlier estimates in the moments of the step's rule.
        lr: learning rate of the step.
        directions: parameter name -> its directions; all directions of a parameter share type and fixed factors.
        predictions: of their effect on the scores of the first rows; None: it is not known.
        idle: number of earlier steps that learnt nothing.
    """

    step: int
    count: int
    lr: float
    directions: Mapping[str, Sequence[Direction]]
    predictions: Predictions | None = None
    idle: int = 0


@dataclass(frozen=True)
class ParameterEstimate:
    """The zeroth-order gradient of one parameter: (1/(B q)) sum_i sum_j kappa_ij Z_ij.

    It has q directions, for each of B examples, or for all of them together: B = 1. It is in the space of its
    directions, so it is represented by a coefficient.

    Attributes:
        directions: the q directions; the j-th has Z_ij for each example i.
        projected_grads: kappa_ij at place i q + j.
        count: number of earlier estimates in the rule's moments, as used by Adam's bias correction.
    """

    directions: Sequence[Direction]
    projected_grads: Sequence[float]
    count: int

    @property
    def direction(self) -> Direction:
        """First direction; all directions share type and fixed factors."""
        return self.directions[0]

    def tiles(self) -> Iterator[Tile]:
        """Yields the coefficient of the estimate in parts (rows, values); the next part may overwrite the previous."""
        q, factors = len(self.directions), [kappa / len(self.projected_grads) for kappa in self.projected_grads]
        tiles = [direction.tiles(factors[j::q]) for j, direction in enumerate(self.directions)]
        for (rows, estimate), *others in zip(*tiles, strict=True):
            for _, values in others:
                estimate.add_(values)
            yield rows, estimate


@dataclass(frozen=True)
class Estimate:
    """An estimate of the gradient at W_t.

    Attributes:
        loss: mean of the evaluated losses.
        gradients: parameter name -> its estimate, for the parameters that the step updates.
        forward_passes: number of closure evaluations.
        probes: measurements along random directions; empty if there are none.
        metrics: further measurements, for the log of metrics: JSON.
    """

    loss: float
    gradients: Mapping[str, ParameterEstimate]
    forward_passes: int
    probes: tuple[Probe, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)


def average(
    loss: float,
    probes: tuple[Probe, ...],
    passes: int,
    draw: StepDraw,
    metrics: Mapping[str, Any] | None = None,
) -> Estimate:
    """Returns the estimate that averages kappa Z over all directions of a step."""
    kappas = [probe.projected_grad for probe in probes]
    gradients = {name: ParameterEstimate(drawn, kappas, draw.count) for name, drawn in draw.directions.items()}
    return Estimate(loss, gradients, passes, probes, metrics or {})


class Estimator(ABC):
    """A method of estimating the gradient."""

    rule: ClassVar[str]
    """Name in records and step logs of the steps that it is for."""
    compares: ClassVar[bool] = True
    """Whether its probes are losses of perturbed models, to be compared with that of the model as it is."""
    idle_steps: ClassVar[int | None] = None
    """Steps in a row without a change, or evaluations that hardly lower the dev loss, after which later steps are not
    worth their passes; None: any may be."""

    @abstractmethod
    def prepare(self, model: nn.Module, parameters: Mapping[str, PerturbedParameter], seed: int) -> None:
        """Called once by the optimizer, with the model, the tuned parameters by name and the seed of the run."""

    @abstractmethod
    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        """Returns the estimate at W_t. No perturbation remains set when it returns or raises.

        Args:
            closure: evaluates the objective on the batch of the step.
            draw: the directions of the step.

        Raises:
            RequestError: the closure or the model does not support this estimate.
            FloatingPointError: a loss is NaN or infinite; the loss is the only argument of the error.
        """

    def passes(self, directions: int, *, first: bool) -> int:
        """Returns the closure evaluations of a step: two for each direction, unless an estimator says otherwise.

        Args:
            directions: number of directions of a step, or of each example.
            first: whether no estimate is before it in the rule's moments.
        """
        del first
        return 2 * directions

    @abstractmethod
    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        """Returns the estimate of a finished step from its record and the factor store, without evaluating a closure.

        Raises:
            RequestError: the record does not match, or the stored tensors are missing.
        """

    def accepts(self, probes: int, num_directions: int) -> bool:
        """Whether a step can have so many probes, with `num_directions` directions a step or example."""
        del num_directions
        return probes == 0

    def check(self, closure: Closure) -> None:
        """Raises a `RequestError` if the model does not support this estimate; `closure` evaluates some rows."""
        del closure

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for the tensors that `recall` needs in addition to the record."""
        del store

    def resume(self, names: Sequence[str]) -> None:
        """Called after a state is loaded, with the names of the parameters that have moments."""
        del names

    def share_directions(self, processes: ProcessGroup) -> None:
        """Distributes the directions of the following steps among the ranks; ignored without random directions."""
        del processes
