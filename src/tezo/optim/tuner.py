"""The interface that a training run requires of zeroth-order and first-order optimizers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from tezo.directions.bases import FactorStore, Passes
from tezo.directions.targets import Target
from tezo.distributed import Ranks
from tezo.estimators.estimate import Closure, Probe, StepRecord


@dataclass(frozen=True)
class LowRankChange:
    """The trained change of one matrix W (M x N): the sum of left @ right^T over its parts.

    Attributes:
        target: the matrix.
        rank: rank of its directions.
        parts: pairs of left (M, K) and right (N, K); empty before the first change.
    """

    target: Target
    rank: int
    parts: Sequence[tuple[Tensor, Tensor]]


class Tuner(Protocol):
    """An optimizer of the parameters of a model, as used by a training run.

    Attributes:
        model: the tuned model.
        targets: the tuned parameters.
        param_groups: as in torch.optim; "lr" is the learning rate of the next step.
        num_directions: random directions per step; 0 for gradient steps.
    """

    model: Any
    targets: list[Target]
    param_groups: list[dict[str, Any]]
    num_directions: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """Supported kinds of step, the default first; see `tezo.estimators`."""

    @property
    def needs_gradient(self) -> bool:
        """Whether steps need a closure that is differentiable through the whole model."""

    @property
    def rho(self) -> float:
        """Perturbation scale; 0 for gradient steps."""

    @property
    def per_example(self) -> bool:
        """Whether each example of a batch has directions of its own."""

    def set_rho(self, rho: float) -> None:
        """Sets the perturbation scale of the steps that follow."""

    def warn_by(self, tell: Callable[[str], object]) -> None:
        """Sets what is told, once, of a step whose losses are far above the model's own; else a warning is given."""

    own_loss: float | None
    """Loss of the model as it is, which a step's losses are compared with; None: the next step measures it."""

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""

    @property
    def num_forward_passes(self) -> int:
        """Number of closure evaluations so far."""

    @property
    def last_step(self) -> StepRecord | None:
        """Record of the last step; None before the first."""

    def take_step(self, closure: Closure, kind: str) -> float:
        """Takes one step of this kind and returns its loss."""

    def passes_of(self, kind: str, *, first: bool) -> int:
        """Number of closure evaluations of a step; `first`: no step of its kind comes before it."""

    def check_kind(self, kind: str, closure: Closure) -> None:
        """Raises a `RequestError` if the model does not support this kind of step; `closure` evaluates some rows."""

    def replay(self, record: StepRecord) -> None:
        """Repeats a finished step from its record, without evaluating a closure.

        Raises:
            RequestError: replay is not supported, or this is not the record of the next step.
        """

    @property
    def replays(self) -> bool:
        """Whether `replay` is supported, that is, whether a record determines the step."""

    def measure(self, closure: Closure, rho: float | None = None) -> tuple[Probe, ...]:
        """Two-point measurements at W_t without taking a step; see `ZerothOrderOptimizer.measure`."""

    def step_divisor(self, kappa_sq: float) -> float:
        """Smallest number by which a step divides the estimate, given E[kappa^2]; see `Update.divisor`."""

    def set_calibration_passes(self, passes: Passes) -> None:
        """Sets the forward passes that a data-dependent basis is computed from."""

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for the tensors that `replay` needs in addition to records."""

    def share_directions(self, ranks: Ranks) -> None:
        """Distributes the directions of the following steps among the ranks; every rank steps along all of them."""

    def drawn_on_the_device(self) -> str | None:
        """Name of a parameter whose steps depend on the device type; None if there is none."""

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        """(calls of the model, seconds) spent on a data-dependent basis so far."""

    @property
    def factor_bytes(self) -> int:
        """Bytes of the stored fixed factors."""

    @property
    def compression_error(self) -> float:
        """Largest `MovingParameter.compression_error` of all parameters; 0.0 if nothing was compressed."""

    def application(self, name: str) -> tuple[int | None, str]:
        """(rank of a parameter's directions or None, how perturbations or updates are applied, in words)."""

    def why_no_adapter(self) -> str | None:
        """None if the trained change is an exact LoRA adapter; else the reason, in words, why it is not."""

    def low_rank_changes(self) -> list[LowRankChange]:
        """The trained change of each matrix, if `why_no_adapter` is None."""

    def merge(self) -> nn.Module:
        """Adds the changes stored beside the weights to them, and returns the model."""

    def close(self) -> None:
        """Removes the hooks that the optimizer has put on the model."""

    def tuned_state(self) -> dict[str, Tensor]:
        """CPU copies of all tensors that training changes."""

    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores a `tuned_state` saved after `num_steps` steps."""

    def roll_back(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores a `tuned_state` saved after `num_steps` steps and drops all moments; no step is taken back."""

    def resumable_state(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on; not copies."""

    def load_resumable_state(
        self, state: Mapping[str, Tensor], records: Sequence[StepRecord], moments_since: int = 0
    ) -> None:
        """Restores a `resumable_state` saved after the steps of `records`, which start at step 0.

        Args:
            state: the tensors.
            records: of all steps taken; none: the optimizer is as before its first step.
            moments_since: number of steps after which the moments were last dropped by `roll_back`.
        """
