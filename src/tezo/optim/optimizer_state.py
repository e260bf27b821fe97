"""The state of an optimizer, as one value, and the tensors as which runs, checkpoints and state dicts store it.

| name of a tensor | value |
|---|---|
| basis/STEP/NAME | a factor that was computed from data at a refresh |
| weight/NAME | a weight that the method writes |
| change/NAME/KEY | a tensor of the change that is stored beside a weight |
| update/NAME/KEY | a moment of two-point steps |
| RULE/NAME/KEY | a moment of other steps |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tezo.directions.spaces import FixedFactors
from tezo.directions.targets import Target
from tezo.optim.estimators.estimate import TWO_POINT
from tezo.optim.tuned_parameters import TunedParameters
from tezo.optim.updates import Moments
from tezo.system.errors import RequestError

Origin = Callable[[Target, int | None], FixedFactors | None]
"""Function of a parameter and a refresh step, or None for the last step. It returns zero of the space of directions."""


@dataclass(frozen=True)
class State:
    """The tensors that the next step depends on.

    Attributes:
        factors: "STEP/NAME" -> factor, and others that directions depend on and that no key gives again.
        weights: parameter name -> stored tensor, where the method writes it.
        changes: parameter name -> key -> tensor of the change stored beside the weight.
        moments: rule -> parameter name -> key -> tensor of the update rule.
    """

    factors: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    changes: Mapping[str, Mapping[str, Tensor]]
    moments: Mapping[str, Mapping[str, Moments]] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: TunedParameters, moments: Mapping[str, Mapping[str, Moments]]) -> "State":
        """Returns the state of tuned parameters; its tensors are not copies."""
        perturbation = parameters.perturbation
        return cls(
            perturbation.basis.state() | perturbation.state(),
            {name: parameter.weight for name, parameter in parameters.items() if parameters.writes(parameter)},
            {name: parameter.state() for name, parameter in parameters.items()},
            moments,
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], rules: Sequence[str]) -> "State":
        """Returns the state that was stored as these tensors; those that are not of these rules are left out."""
        factors: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        changes: dict[str, dict[str, Tensor]] = {}
        moments: dict[str, dict[str, Moments]] = {rule: {} for rule in rules}
        rule_of = {_prefix(rule): rule for rule in rules}
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            name, _, role = rest.rpartition("/")
            if kind == "basis":
                factors[rest] = value
            elif kind == "weight":
                weights[rest] = value
            elif kind == "change":
                changes.setdefault(name, {})[role] = value
            elif kind in rule_of:
                moments[rule_of[kind]].setdefault(name, {})[role] = value
        return cls(factors, weights, changes, moments)

    def to_tensors(self, *, weights: bool = True, moments: bool = True) -> dict[str, Tensor]:
        """Returns the tensors by the names of the module; without weights or moments if these are not wanted."""
        found = {f"basis/{key}": value for key, value in self.factors.items()}
        if weights:
            found |= {f"weight/{name}": value for name, value in self.weights.items()}
        for name, change in self.changes.items():
            found |= {f"change/{name}/{key}": value for key, value in change.items()}
        for rule, of_rule in self.moments.items() if moments else ():
            for name, of_parameter in of_rule.items():
                found |= {f"{_prefix(rule)}/{name}/{key}": value for key, value in of_parameter.items()}
        return found

    @torch.no_grad()
    def restore_parameters(self, parameters: TunedParameters, origin: Origin) -> None:
        """Puts factors, weights and changes back."""
        perturbation = parameters.perturbation
        perturbation.basis.load_state(self.factors)
        perturbation.load_state(self.factors)
        perturbation.forget()
        for name, value in self.weights.items():
            parameters[name].weight.copy_(value)
        for name, parameter in parameters.items():
            change = self.changes.get(name, {})
            parameter.load_state(lambda step, target=parameter.target: origin(target, step), change)  # type: ignore[misc]

    def moments_on(self, parameters: TunedParameters) -> dict[str, dict[str, Moments]]:
        """Returns copies of the moments on the devices of their parameters; those of other parameters are left out."""
        return {
            rule: {
                name: {key: value.to(parameters[name].target.device).clone() for key, value in of_parameter.items()}
                for name, of_parameter in of_rule.items()
                if name in parameters
            }
            for rule, of_rule in self.moments.items()
        }


def _prefix(rule: str) -> str:
    """Returns the first part of the names of a rule's moments."""
    return "update" if rule == TWO_POINT else rule


def check_same(state_dict: Mapping[str, Any], described: str, names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Checks that a state dict is of such an optimizer.

    Args:
        state_dict: result of `state_dict` of an optimizer.
        described: perturbation and update rule of this one.
        names: of the parameters that it tunes.
        options: of its method.

    Raises:
        RequestError: it is of another method, of other parameters, or of other options.
    """
    # torch's method would cast float32 state to the dtype of a bfloat16 parameter
    if "tensors" not in state_dict:
        raise RequestError("state_dict: this is not a state_dict of a tezo optimizer; give one.")
    if state_dict["rule"] != described:
        raise RequestError(f"state_dict: it is of {state_dict['rule']}, and this optimizer is {described}.")
    odd = sorted(set(state_dict["parameters"]) ^ set(names))
    if odd:
        raise RequestError(f"state_dict: it tunes other parameters than this optimizer, {odd[0]} for one.")
    for name, value in state_dict["options"].items():
        if name in options and options[name] != value:
            raise RequestError(
                f"state_dict: method.{name} is {value!r} in it, and {options[name]!r} in this optimizer; make the "
                f"optimizer with {name}={value!r}."
            )
