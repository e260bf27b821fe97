"""What zeroth-order and first-order optimizers have in common: all that a run asks of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from tezo.directions.bases import FactorStore, Passes
from tezo.directions.targets import Target
from tezo.distributed import Ranks
from tezo.estimators.estimate import Closure, Probe, StepRecord


@dataclass(frozen=True)
class LowRankChange:
    """What training has added to one matrix W (M x N): the sum of left @ right^T over its parts.

    Attributes:
        target: the matrix.
        rank: of the directions that it is trained along.
        parts: pairs of left (M, K) and right (N, K); empty where nothing was added yet.
    """

    target: Target
    rank: int
    parts: Sequence[tuple[Tensor, Tensor]]


class Tuner(Protocol):
    """An optimizer on the parameters of a model, as a run uses it.

    Attributes:
        model: that is tuned.
        targets: the parameters that are tuned.
        param_groups: torch's; "lr" is the learning rate of the next step.
        num_directions: random directions of a step; 0 for steps by gradient.
        kinds: of the steps that it takes, the usual one first; see `tezo.estimators`.
        rho: perturbation scale; 0 for steps by gradient.
        needs_gradient: whether steps need a closure that can be differentiated through the whole model.
    """

    model: Any
    targets: list[Target]
    param_groups: list[dict[str, Any]]
    num_directions: int

    @property
    def kinds(self) -> tuple[str, ...]: ...
    @property
    def needs_gradient(self) -> bool: ...
    @property
    def rho(self) -> float: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_forward_passes(self) -> int: ...
    @property
    def last_step(self) -> StepRecord | None: ...

    def take_step(self, closure: Closure, kind: str) -> float:
        """One step of that kind; returns its loss."""

    def check_kind(self, kind: str, closure: Closure) -> None:
        """An error where the model does not allow steps of that kind; `closure` evaluates some rows."""

    def replay(self, record: StepRecord) -> None:
        """Takes a finished step again from its record, without an evaluation.

        Raises:
            RequestError: steps cannot be taken again from records, or this is not the record of the next one.
        """

    @property
    def replays(self) -> bool:
        """Whether `replay` works: whether a record says all that a step did."""

    def measure(self, closure: Closure, rho: float | None = None, *, others: int = 0) -> tuple[Probe, ...]:
        """Two-point probes at W_t without a step; see `ZerothOrderOptimizer.measure`."""

    def step_divisor(self, kappa_sq: float) -> float:
        """What a step divides the estimate by, at its least, when kappa^2 has this mean; see `Update.divisor`."""

    def set_calibration_passes(self, passes: Passes) -> None:
        """Says which rows a data-dependent basis looks at."""

    def set_factor_store(self, store: FactorStore) -> None:
        """Says where to keep what `replay` needs beside records."""

    def share_directions(self, ranks: Ranks) -> None:
        """From now on each rank evaluates directions of its own, and all step along all of them."""

    def drawn_on_the_device(self) -> str | None:
        """A parameter whose steps depend on the type of its device; None: there is none."""

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        """(calls of the model, seconds) that a data-dependent basis has spent so far."""

    @property
    def factor_bytes(self) -> int:
        """Bytes of what is kept for drawing directions."""

    @property
    def compression_error(self) -> float:
        """Largest share of a parameter's change that compression beside the base has lost; 0: nothing."""

    def application(self, name: str) -> tuple[int | None, str]:
        """(rank of a parameter's directions or None, how perturbations or steps reach it, in words)."""

    def why_no_adapter(self) -> str | None:
        """None where the result is an exact LoRA adapter; else the reason, in words."""

    def low_rank_changes(self) -> list[LowRankChange]:
        """What training added to each matrix, where `why_no_adapter` is None."""

    def merge(self) -> nn.Module:
        """Writes what was trained beside the weights into them, and returns the model."""

    def close(self) -> None:
        """Removes the hooks that the optimizer has put on the model."""

    def tuned_state(self) -> dict[str, Tensor]:
        """Copies, on the CPU, of all that training changes."""

    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        """Puts back a `tuned_state` taken after `num_steps` steps."""

    def resumable_state(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on; not copies."""

    def load_resumable_state(self, state: Mapping[str, Tensor], records: Sequence[StepRecord]) -> None:
        """Puts back a `resumable_state` taken after the steps of these records, all from the first on."""
