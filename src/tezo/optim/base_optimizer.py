"""The base class of optimizers: the interface of zeroth-order ones and of first-order Adam for a training run."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from tezo.directions.bases.basis import FactorStore, Passes, RowsOf
from tezo.directions.targets import Target
from tezo.optim.closures import Closure
from tezo.optim.estimators.estimate import Probe, StepRecord
from tezo.optim.settings import Settings
from tezo.optim.tuned_parameters import LowRankChange
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.system.processes import ProcessGroup

MOST_RATE, MOST_RANK = 1e30, 1 << 16
"""Upper limits. Rates: products with a rate remain finite in float32. Frozen rank: a larger one compresses nothing."""


def check_rate(name: str, value: float) -> None:
    """Checks that a rate is a number between 0 and `MOST_RATE`.

    Raises:
        RequestError: it is not; the message has the name of the setting.
    """
    if not 0 <= value <= MOST_RATE:
        raise RequestError(f"method.{name} is {value}; it must lie between 0 and {MOST_RATE:g}.")


def check_rho(value: float) -> None:
    """Checks that a perturbation scale is positive, and at most `MOST_RATE`.

    Raises:
        RequestError: it is not.
    """
    if not 0 < value <= MOST_RATE:
        raise RequestError(f"method.rho is {value}; it must be positive, and at most {MOST_RATE:g}.")


def check_count(name: str, value: int | None, most: int) -> None:
    """Checks that a number lies between 1 and `most`, if it is given.

    Raises:
        RequestError: it does not; the message has the name of the setting.
    """
    if value is not None and not 1 <= value <= most:
        raise RequestError(f"method.{name} is {value}; it must lie between 1 and {most}.")


def check_closure(closure: Closure | None) -> Closure:
    """Returns the closure of a step.

    Raises:
        RequestError: there is none, or it cannot be called.
    """
    if closure is None:
        raise RequestError(
            "step() needs a closure that returns the loss: optimizer.step(lambda: loss_of(batch)). Trainer of "
            "transformers gives none: use tezo.TezoTrainer, or tezo.TezoSFTTrainer for TRL."
        )
    if not callable(closure):
        raise RequestError(
            f"step() needs a function that returns the loss, and was given {type(closure).__name__}; write lambda: "
            "before it."
        )
    return closure


class BaseOptimizer(ABC):
    """An optimizer of the parameters of a model, as used by a training run.

    It holds hooks on the model, and tensors of its dtype and device: the model must not be cast or moved afterwards.
    Members that matter only to one kind of optimizer have a default in the others: no cost, nothing found, or a
    refusal.

    Attributes:
        model: the tuned model.
        targets: the tuned parameters.
        param_groups: as in torch.optim; "lr" is the learning rate of the next step.
        rules: names of the rules that a step can follow, the default first.
        by_gradients: whether a step takes the gradient of the loss, so that it cannot be replayed from its record.
        num_directions: random directions per step; 0 for gradient steps.
        per_example: whether each example of a batch has separate directions.
        num_steps: number of steps taken.
        num_forward_passes: number of closure evaluations in all steps.
        num_idle_steps: number of steps that learnt nothing; see `StepRecord.is_idle`.
        last_step: record of the last step; None before the first.
        plan: function of a step -> (the rule that it follows where none is given, factor of its learning rate); None:
            every step follows the first rule.
        settings: option of the method -> its value and source; as text, a table.
        unperturbed_loss: loss of the model as it is, which the losses of a step are compared with; infinite: they are
            not; None: not known.
        warn: called once, with a message, if a loss of a step is far above `unperturbed_loss`; by default a warning of
            Python.
    """

    model: Any
    targets: list[Target]
    param_groups: list[dict[str, Any]]
    rules: tuple[str, ...]
    by_gradients = False
    num_directions: int = 0
    per_example = False
    num_steps: int = 0
    num_forward_passes: int = 0
    num_idle_steps: int = 0
    last_step: StepRecord | None = None
    plan: Callable[[int], tuple[str, float]] | None = None
    settings: Settings = Settings()
    unperturbed_loss: float | None = None
    warn: Callable[[str], object] = staticmethod(warnings.warn)

    def bind(self, targets: Sequence[Target]) -> None:
        """Notes the dtype and device of the parameters; `check_bound` compares.

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
        """Refuses `copy.deepcopy` and `pickle`: a copy would have neither hooks nor a model."""
        raise RequestError(
            "an optimizer is bound to its model, and cannot be copied or pickled; make one over the other model, and "
            "give it the state by load_state_dict(optimizer.state_dict())."
        )

    def planned(self, step: int) -> tuple[str, float]:
        """Returns (the rule that a step follows where none is given, the factor of its learning rate)."""
        return (self.rules[0], 1.0) if self.plan is None else self.plan(step)

    def count(self, record: StepRecord) -> None:
        """Counts a finished step."""
        self.num_steps += 1
        self.num_forward_passes += record.forward_passes
        self.num_idle_steps += record.is_idle
        self.last_step = record

    def count_again(self, records: Sequence[StepRecord]) -> None:
        """Restores the counts from the records of all steps since the first."""
        self.num_steps, self.num_forward_passes = len(records), sum(record.forward_passes for record in records)
        self.num_idle_steps = sum(record.is_idle for record in records)
        self.last_step = records[-1] if records else None

    def not_finite(self, loss: float) -> NonFiniteLossError:
        """Returns the error of a step whose loss is not finite."""
        return NonFiniteLossError(self.num_steps, loss, self.last_step.loss if self.last_step is not None else None)

    @abstractmethod
    def step(self, closure: Closure | None = None, *, rule: str | None = None) -> float | None:
        """Takes one step by a rule, the first of `rules` if None, and returns its loss."""

    def replay(self, record: StepRecord) -> None:
        """Repeats a finished step from its record, without evaluating a closure.

        Args:
            record: record of step `num_steps` of a run with the same seed and settings.

        Raises:
            RequestError: this is not the record of the next step, or its steps are `by_gradients`.
        """
        del record
        raise RequestError("method.name: this method steps along gradients, which a record does not have.")

    def measure(self, closure: Closure, rho: float | None = None) -> tuple[Probe, ...]:
        """Measures along the directions of the next step; no step is taken.

        Returns one probe for each direction, or each example and each of its directions: that of example i along the
        j-th of q is at place i q + j.

        Args:
            closure: as in `step`.
            rho: perturbation scale; None: that of the steps.
        """
        del closure, rho
        raise RequestError("method.name: this method has no directions to measure along.")

    def ahead(self, closure: Closure, rho: float, most: int | None = None) -> list[float]:
        """Measures the loss at W + rho Z alone, along the directions of the next step, in the order of `measure`.

        Args:
            closure: as in `step`.
            rho: perturbation scale.
            most: number of directions, the first ones; None: all.
        """
        del closure, rho, most
        raise RequestError("method.name: this method has no directions to measure along.")

    @property
    def rho(self) -> float:
        """Perturbation scale; 0 where nothing is perturbed."""
        return 0.0

    def set_rho(self, rho: float) -> None:
        """Sets the perturbation scale of the steps that follow.

        Raises:
            RequestError: it is not positive, or nothing is perturbed.
        """
        raise RequestError(f"method.rho is {rho:g}, and this method perturbs nothing; leave it out.")

    def set_passes(self, passes: Passes) -> None:  # noqa: B027 - most methods need none
        """Sets the forward passes from which a basis that sees data is computed.

        Args:
            passes: function of the refresh step that runs the model on some training rows; the basis is computed from
                the inputs of each layer. It is called when factors are first needed, and at every refresh. Without it
                the closure of the step is called.
        """

    def set_rows(self, rows: RowsOf) -> None:  # noqa: B027
        """Sets the rows from whose outputs a basis is computed; without them they are those of each step.

        Args:
            rows: function of the refresh step and of the most rows that are wanted; it returns a `RowOutputs` of
                training rows that gives outputs, such as one of `tezo.closure`. Where its first ones are rows of the
                step, its `stepped` says how many.
        """

    def set_factor_store(self, store: FactorStore) -> None:  # noqa: B027
        """Sets the store for tensors computed from data, so that steps can be replayed without the data."""

    def share_directions(self, processes: ProcessGroup) -> None:
        """Distributes the directions of the following steps among the ranks; every rank steps along all of them."""
        del processes
        raise RequestError("train.parallel is directions, and this method has none; start it without torchrun.")

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Measurements of the last step and the last refresh beside losses: JSON."""
        return {}

    @property
    def idle_steps(self) -> int | None:
        """Steps in a row without a change, or that hardly lower the dev loss, that end a run; None: none do."""
        return None

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

    def rate_divisor(self, kappa_sq: float) -> float:
        """Returns the smallest number by which a step divides its estimate; see `Update.divisor`."""
        del kappa_sq
        return 1.0

    def largest_rank(self, steps: int) -> int:
        """Returns the largest rank of a change of a weight in a run of so many steps, with its perturbation."""
        del steps
        return 0

    def low_rank_changes(self) -> list[LowRankChange]:
        """Returns the trained change of each matrix that is perturbed in the forward pass."""
        return []

    @abstractmethod
    def passes_of(self, rule: str, *, first: bool) -> int:
        """Returns the closure evaluations of a step; `first`: no step by this rule comes before it."""

    @abstractmethod
    def check_rule(self, rule: str, closure: Closure) -> None:
        """Raises a `RequestError` if the model does not support this rule; `closure` evaluates some rows."""

    @abstractmethod
    def drawn_on_the_device(self) -> str | None:
        """Returns the name of a parameter whose steps depend on the device type; None if there is none."""

    @abstractmethod
    def rank_and_way(self, name: str) -> tuple[int | None, str]:
        """Returns (rank of a parameter's directions or None, how perturbations or updates are applied, in words)."""

    @abstractmethod
    def why_no_adapter(self) -> str | None:
        """Returns None if the trained change is an exact LoRA adapter; else the reason, in words, why it is not."""

    def merge(self) -> nn.Module:
        """Adds the changes stored beside the weights to them, removes the hooks, and returns the model."""
        model: nn.Module = self.model
        return model

    def close(self) -> None:  # noqa: B027 - nothing to remove is the default
        """Removes the hooks; changes stored beside the weights no longer take effect."""

    @abstractmethod
    def tuned_tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that training changes, by the names of `tezo.optim.optimizer_state`; not copies."""

    def tuned_state(self) -> dict[str, Tensor]:
        """Returns CPU copies of `tuned_tensors`."""
        return {key: value.detach().cpu().clone() for key, value in self.tuned_tensors().items()}

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
        """Returns all tensors that the next step depends on, by name; not copies."""

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
