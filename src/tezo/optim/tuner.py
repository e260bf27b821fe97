"""The state of an optimizer besides the parameters: counts, and the moments of its update rules.

What a training run requires of optimizers: of the zeroth-order ones, and of first-order Adam as a baseline.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import FactorStore, Passes
from tezo.directions.targets import Target
from tezo.optim.estimators.estimate import Closure, Probe, StepRecord
from tezo.optim.updates import State
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.system.ranks import Ranks

Moments = dict[str, State]
"""Parameter name -> the update rule's state of the parameter."""


@dataclass
class OptimizerState:
    """Counts and moments.

    Attributes:
        num_steps: number of steps taken.
        num_forward_passes: number of closure evaluations in all steps.
        last_step: record of the last step; None before the first.
        counts: kind of step -> number of estimates in its moments.
        moments: kind of step -> moments of its update rule.
    """

    num_steps: int = 0
    num_forward_passes: int = 0
    last_step: StepRecord | None = None
    counts: dict[str, int] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)

    def add(self, record: StepRecord, restarting: Iterable[str]) -> None:
        """Counts a step; `restarting` are the kinds whose moments are dropped by a step of another kind."""
        for kind in restarting:
            if kind != record.kind:
                self.counts[kind], self.moments[kind] = 0, {}
        self.counts[record.kind] += 1
        self.num_steps += 1
        self.num_forward_passes += record.forward_passes
        self.last_step = record

    def drop_moments(self) -> None:
        """Drops the moments of all kinds."""
        self.counts = dict.fromkeys(self.counts, 0)
        self.moments = {kind: {} for kind in self.moments}

    def tensors(self) -> dict[str, Tensor]:
        """The moments: "update/NAME/KEY" for two-point steps, "KIND/NAME/KEY" for other kinds; not copies."""
        return {
            f"{_PREFIX.get(kind, kind)}/{name}/{key}": value
            for kind, moments in self.moments.items()
            for name, state in moments.items()
            for key, value in state.items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor], devices: Mapping[str, torch.device]) -> None:
        """Restores the moments of all kinds from the result of `tensors`; other names are ignored.

        Args:
            tensors: tensors by name.
            devices: parameter name -> device of its moments.
        """
        for kind in self.moments:
            start, moments = f"{_PREFIX.get(kind, kind)}/", Moments()
            for key in tensors:
                name, _, role = key.removeprefix(start).rpartition("/")
                if key.startswith(start) and name in devices:
                    moments.setdefault(name, {})[role] = tensors[key].to(devices[name]).clone()
            self.moments[kind] = moments

    def load_records(self, records: Sequence[StepRecord], restarting: Collection[str], moments_since: int = 0) -> None:
        """Restores the counts from the records of all steps since the first.

        Args:
            records: of all steps.
            restarting: kinds whose moments are dropped by a step of another kind.
            moments_since: number of steps after which all moments were last dropped.
        """
        self.num_steps, self.num_forward_passes = len(records), sum(record.forward_passes for record in records)
        self.last_step = records[-1] if records else None
        last_kind = self.last_step.kind if self.last_step else None
        counted = records[moments_since:]
        phase = sum(1 for _ in takewhile(lambda record: record.kind == last_kind, reversed(counted)))
        for kind in self.counts:
            since = counted[len(counted) - phase :] if kind in restarting else counted
            self.counts[kind] = sum(record.kind == kind for record in since)


_PREFIX = {"two-point": "update"}


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


class Tuner(ABC):
    """An optimizer of the parameters of a model, as used by a training run.

    By hooks, and by state of its dtype and device, it belongs to the model as it was when the optimizer was made. Where
    a subclass says nothing else it draws no directions, its steps are not replayed, and its change is in the weights.

    Attributes:
        model: the tuned model.
        targets: the tuned parameters.
        param_groups: as in torch.optim; "lr" is the learning rate of the next step.
        num_directions: random directions per step; 0 for gradient steps.
        progress: counts and moments.
    """

    needs_gradient: ClassVar[bool] = False
    """Whether steps need a closure that is differentiable through the whole model."""
    replays: ClassVar[bool] = False
    """Whether a record, with the factor store, determines the step."""

    model: Any
    targets: list[Target]
    param_groups: list[dict[str, Any]]
    num_directions: int = 0
    progress: OptimizerState

    def bind(self, targets: Sequence[Target]) -> None:
        """Notes what the parameters are like; `check_bound` compares.

        Raises:
            RequestError: a parameter was made under `torch.inference_mode`, so that nothing may write it outside.
        """
        for target in targets:
            if target.parameter.is_inference():
                raise RequestError(
                    f"{target.name} was made under torch.inference_mode, so it cannot be tuned; make or load the model "
                    "outside of it."
                )
        self._bound = [(target, target.parameter.dtype, target.parameter.device) for target in targets]

    def check_bound(self) -> None:
        """Raises a `RequestError` if the parameters have another dtype or device than when `bind` was called."""
        for target, *before in self._bound:
            now = [target.parameter.dtype, target.parameter.device]
            if now != before and target.parameter.is_floating_point():
                old, new = (f"{dtype} on {device}" for dtype, device in (before, now))
                raise RequestError(
                    f"{target.name} was {old} when the optimizer was made, and is {new}; make a new optimizer after "
                    "such a change."
                )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses `copy.deepcopy` and `pickle`: a copy would have neither hooks nor a model of its own."""
        raise RequestError(
            "an optimizer is bound to its model, and cannot be copied or pickled; make one over the other model, and "
            "give it the state by load_state_dict(optimizer.state_dict())."
        )

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Supported kinds of step, the default first; see `tezo.optim.estimators`."""

    @property
    def rho(self) -> float:
        """Perturbation scale; 0 where nothing is perturbed."""
        return 0.0

    own_loss: float | None = None
    """Loss of the model as it is, which a step's losses are compared with; infinite: they are not; None: not known."""

    @property
    def per_example(self) -> bool:
        """Whether each example of a batch has directions of its own."""
        return False

    def set_rho(self, rho: float) -> None:
        """Sets the perturbation scale of the steps that follow."""
        del rho

    def warn_by(self, tell: Callable[[str], object]) -> None:
        """Sets what is told, once, of a step whose losses are far above the model's own; else a warning is given."""
        del tell

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return self.progress.num_steps

    @property
    def num_forward_passes(self) -> int:
        """Number of closure evaluations so far."""
        return self.progress.num_forward_passes

    @property
    def last_step(self) -> StepRecord | None:
        """Record of the last step; None before the first."""
        return self.progress.last_step

    def not_finite(self, loss: float) -> NonFiniteLossError:
        """The error of a step whose loss is not finite."""
        return NonFiniteLossError(self.num_steps, loss, self.last_step.loss if self.last_step is not None else None)

    @abstractmethod
    def take_step(self, closure: Closure, kind: str) -> float:
        """Takes one step of this kind and returns its loss."""

    @abstractmethod
    def passes_of(self, kind: str, *, first: bool) -> int:
        """Number of closure evaluations of a step; `first`: no step of its kind comes before it."""

    @abstractmethod
    def check_kind(self, kind: str, closure: Closure) -> None:
        """Raises a `RequestError` if the model does not support this kind of step; `closure` evaluates some rows."""

    def replay(self, record: StepRecord) -> None:
        """Repeats a finished step from its record, without evaluating a closure.

        Args:
            record: record of step `num_steps` of a run with the same seed and settings.

        Raises:
            RequestError: steps are not replayed, or this is not the record of the next step.
        """
        del record
        raise RequestError(f"the steps of {type(self).__name__} are not in the step log; use a zeroth-order method.")

    def measure(self, closure: Closure, rho: float | None = None) -> tuple[Probe, ...]:
        """Two-point measurements along the directions of the next step; no step is taken.

        One for each direction, or each example and each of its directions: that of example i along the j-th of q is at
        place i q + j.

        Args:
            closure: as in `step`.
            rho: perturbation scale; None: that of the steps.
        """
        del closure, rho
        raise RequestError(f"{type(self).__name__} draws no directions to measure along; use a zeroth-order method.")

    def step_divisor(self, kappa_sq: float) -> float:
        """Smallest number by which a step divides the estimate, given E[kappa^2]; see `Update.divisor`."""
        del kappa_sq
        return 1.0

    def set_calibration_passes(self, passes: Passes) -> None:
        """Sets the forward passes that a data-dependent basis is computed from.

        Args:
            passes: function of the refresh step that runs the model on some training rows; the basis is computed from
                the inputs of each layer. It is called when factors are first needed, and at every refresh.
        """
        del passes

    def set_factor_store(self, store: FactorStore) -> None:
        """Sets the store for tensors computed from data, so that steps can be replayed without the data."""
        del store

    def share_directions(self, ranks: Ranks) -> None:
        """Distributes the directions of the following steps among the ranks; every rank steps along all of them."""
        del ranks
        raise RequestError(f"{type(self).__name__} runs in one process; start it without torchrun.")

    @abstractmethod
    def drawn_on_the_device(self) -> str | None:
        """Name of a parameter whose steps depend on the device type; None if there is none."""

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        """(calls of the model, seconds) spent on a data-dependent basis so far."""
        return 0, 0.0

    @property
    def factor_bytes(self) -> int:
        """Bytes of the stored fixed factors."""
        return 0

    @property
    def compression_error(self) -> float:
        """Largest `PerturbedParameter.compression_error` of all parameters; 0.0 if nothing was compressed."""
        return 0.0

    @abstractmethod
    def rank_and_way(self, name: str) -> tuple[int | None, str]:
        """(rank of a parameter's directions or None, how perturbations or updates are applied, in words)."""

    @abstractmethod
    def why_no_adapter(self) -> str | None:
        """None if the trained change is an exact LoRA adapter; else the reason, in words, why it is not."""

    def low_rank_changes(self) -> list[LowRankChange]:
        """The trained change of each matrix, if `why_no_adapter` is None."""
        return []

    def merge(self) -> nn.Module:
        """Adds the changes stored beside the weights to them, removes the hooks, and returns the model."""
        model: nn.Module = self.model
        return model

    def close(self) -> None:  # noqa: B027 - nothing to remove is the default
        """Removes the hooks; changes stored beside the weights no longer take effect."""

    @abstractmethod
    def tuned_state(self) -> dict[str, Tensor]:
        """CPU copies of all tensors that training changes."""

    @abstractmethod
    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores a `tuned_state` saved after `num_steps` steps."""

    @abstractmethod
    def roll_back(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores a `tuned_state` saved after `num_steps` steps and drops all moments; no step is taken back.

        The next step has the number, and with it the directions, that it would have had.
        """

    @abstractmethod
    def resumable_state(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on, by name; not copies."""

    @abstractmethod
    def load_resumable_state(
        self, state: Mapping[str, Tensor], records: Sequence[StepRecord], moments_since: int = 0
    ) -> None:
        """Restores a `resumable_state` saved after the steps of `records`, which start at step 0.

        Args:
            state: the tensors.
            records: of all steps taken; none: the optimizer is as before its first step.
            moments_since: number of steps after which the moments were last dropped by `roll_back`.
        """
