"""The part of the zeroth-order optimizer that takes no steps: its state, and its answers to a run."""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import Basis
from tezo.directions.perturbation import Perturbation
from tezo.directions.random import DrawKey
from tezo.directions.spaces import FixedFactors
from tezo.directions.targets import Target
from tezo.optim.base_optimizer import BaseOptimizer, check_rho
from tezo.optim.estimators.estimate import StepRecord
from tezo.optim.estimators.two_point import TwoPoint
from tezo.optim.optimizer_state import State, check_same
from tezo.optim.tuned_parameters import LowRankChange, TunedParameters
from tezo.optim.updates import Moments, StepRule, Update
from tezo.system.errors import RequestError

CLOSED = "this optimizer was closed, or merged into the weights; make a new one to go on."
IN_STATE = frozenset({"lr", "weight_decay", "rho", "seed", "targets"})
"""Options that a state dict has by themselves, to be restored, or as the names of the parameters that they select."""


class HookedOptimizer(BaseOptimizer, torch.optim.Optimizer, ABC):  # type: ignore[misc]  # both have a step
    """The part of `ZerothOrderOptimizer` that takes no steps.

    Attributes:
        perturbation: draws directions.
        basis: source of their fixed factors.
        update: of the first rule.
        estimator: of the first rule.
        seed: seed of all draws.
        parameters: parameter name -> the object that perturbs and updates the parameter.
        moments: rule -> parameter name -> the state of the rule's update.
        counts: rule -> number of estimates in its moments.
    """

    perturbation: Perturbation
    basis: Basis
    update: Update
    estimator: TwoPoint
    seed: int
    parameters: TunedParameters
    moments: dict[str, dict[str, Moments]]
    counts: dict[str, int]
    _rules: dict[str, StepRule]
    _refreshed: int | None = None

    @property
    def rho(self) -> float:
        return self.estimator.rho

    @property
    def idle_steps(self) -> int | None:
        return self.estimator.idle_steps

    @property
    def cost_of_basis(self) -> tuple[int, float]:
        return self.basis.cost

    @property
    def factor_bytes(self) -> int:
        return self.perturbation.factor_bytes

    @property
    def compression_error(self) -> float:
        return max((parameter.compression_error for parameter in self.parameters.values()), default=0.0)

    def set_rho(self, rho: float) -> None:
        check_rho(rho)
        self.estimator.rho = rho

    def rate_divisor(self, kappa_sq: float) -> float:
        return self.update.divisor(kappa_sq, self.num_directions)

    def rank_and_way(self, name: str) -> tuple[int | None, str]:
        return self.perturbation.rank_of(name), self.parameters[name].way

    def largest_rank(self, steps: int) -> int:
        return self.parameters.largest_rank(steps)

    def drawn_on_the_device(self) -> str | None:
        return self.parameters.drawn_on_the_device()

    def why_no_adapter(self) -> str | None:
        return self.parameters.why_no_adapter()

    def low_rank_changes(self) -> list[LowRankChange]:
        return self.parameters.low_rank_changes()

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self) -> nn.Module:
        self.parameters.fold()
        return super().merge()

    def close(self) -> None:
        self.parameters.close()

    def state_of_steps(self) -> State:
        """Returns the tensors that the next step depends on; not copies."""
        return State.of(self.parameters, self.moments)

    def tuned_tensors(self) -> dict[str, Tensor]:
        return self.state_of_steps().to_tensors(moments=False)

    def resumable_state(self) -> dict[str, Tensor]:
        return self.state_of_steps().to_tensors()

    def state_dict(self) -> dict[str, Any]:
        """Returns `param_groups` as in torch, and the other tensors by the names of `resumable_state`.

        Changes stored beside the weights are included, and so are the weights below them: the model's state dict has
        the two added. Other weights are in the model's state dict alone. Tensors are not copied, as in torch: the next
        step changes them; `copy.deepcopy` of the result keeps a state to go back to.
        """
        return {
            "param_groups": super().state_dict()["param_groups"],
            "rule": self._description,
            "num_steps": self.num_steps,
            "num_forward_passes": self.num_forward_passes,
            "num_idle_steps": self.num_idle_steps,
            "counts": dict(self.counts),
            "seed": self.seed,
            "rho": self.rho,
            "options": {  # but for objects, such as a basis, which torch.load(weights_only=True) would refuse
                name: setting.value
                for name, setting in self.settings.items()
                if name not in IN_STATE and isinstance(setting.value, str | float | int | list | tuple | None)
            },
            "parameters": list(self.parameters),
            "tensors": self.state_of_steps().to_tensors(weights=False) | self.parameters.weights_below(),
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`, with its learning rate, weight decay, perturbation scale and seed.

        Raises:
            RequestError: it is of another method, of other parameters, or of other options.
        """
        if self.parameters.closed:
            raise RequestError(CLOSED)
        options = {name: setting.value for name, setting in self.settings.items()}
        check_same(state_dict, self._description, list(self.parameters), options)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.seed, self.num_steps = state_dict["seed"], state_dict["num_steps"]
        if self.rho:
            self.set_rho(state_dict["rho"])
        restored = {**self.param_groups[0], "rho": self.rho, "seed": self.seed}
        self.settings = self.settings.with_values(restored)
        self.num_forward_passes = state_dict["num_forward_passes"]
        self.num_idle_steps = state_dict["num_idle_steps"]
        self.counts |= state_dict["counts"]
        self._restore(State.from_tensors(state_dict["tensors"], self.rules), self.num_steps)

    @property
    def _description(self) -> str:
        return f"{type(self.update).__name__} over {type(self.perturbation).__name__}"

    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        self._restore_parameters(State.from_tensors(tuned, ()), num_steps)

    def roll_back(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        self.load_tuned_state(tuned, num_steps)
        self.drop_moments()
        self._resume()

    def load_resumable_state(
        self, state: Mapping[str, Tensor], records: Sequence[StepRecord], moments_since: int = 0
    ) -> None:
        self.count_again(records)
        self.drop_moments()
        for record in records[moments_since:]:
            for name, rule in self._rules.items():
                if rule.restarts and name != record.rule:
                    self.counts[name] = 0
            self.counts[record.rule] += 1
        self._restore(State.from_tensors(state, self.rules), self.num_steps)

    def drop_moments(self) -> None:
        """Drops the moments of all rules."""
        self.counts = dict.fromkeys(self.rules, 0)
        self.moments: dict[str, dict[str, Moments]] = {rule: {} for rule in self.rules}

    def _restore(self, state: State, num_steps: int) -> None:
        """Puts a state back that was saved after so many steps."""
        self._restore_parameters(state, num_steps)
        self.moments = state.moments_on(self.parameters)
        self._resume()

    def _resume(self) -> None:
        for name, rule in self._rules.items():
            rule.estimator.resume(list(self.moments[name]))

    def _restore_parameters(self, state: State, num_steps: int) -> None:
        if self.parameters.closed:
            raise RequestError(CLOSED)
        self._refreshed = None

        def origin(target: Target, refresh_step: int | None) -> FixedFactors | None:
            key = DrawKey(self.seed, max(0, num_steps - 1) if refresh_step is None else refresh_step)
            return self.perturbation.refresh(target, key)

        state.restore_parameters(self.parameters, origin)
