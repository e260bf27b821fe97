"""What a zeroth-order optimizer has trained, as named tensors and back."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.perturbations import DrawKey, Perturbation
from tezo.directions.spaces import Dense, Direction, LowRank
from tezo.directions.targets import Target
from tezo.errors import RequestError
from tezo.forward import InForward, MovingParameter
from tezo.optim.updates import State, Update


class SavedState(torch.optim.Optimizer):
    """The part of `ZerothOrderOptimizer` that takes its state out and puts it in.

    Tensors are named "change/NAME/KEY" (coefficients), "weight/NAME" (where the method writes weights),
    "basis/BORN/NAME" (factors that came from the data) and "update/NAME/KEY" (moments), NAME being the parameter's.
    """

    model: nn.Module
    moving: dict[str, MovingParameter]
    perturbation: Perturbation
    update: Update
    seed: int
    num_steps: int
    merged: bool
    _update_state: dict[str, State]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's own call, from its constructor: what is tuned is settled there."""
        if self.param_groups:
            raise RequestError("add_param_group: what is tuned is settled by `targets`; make another optimizer.")
        super().add_param_group(param_group)

    def writes(self, moving: MovingParameter) -> bool:
        """Whether this method ever changes the stored tensor of a parameter."""
        folds = self.perturbation.interval is not None and isinstance(moving, InForward) and moving.folds_into_weight
        return moving.writes_weight or self.update.writes_weight or folds

    def state_dict(self) -> dict[str, Any]:
        """param_groups as torch has them; everything else by parameter name, in its own dtype.

        The weights themselves are the model's, except where the method keeps its change beside them.
        """
        change = {name: dict(moving.state()) for name, moving in self.moving.items()}
        return {
            "param_groups": super().state_dict()["param_groups"],
            "rule": self._rule,
            "num_steps": self.num_steps,
            "seed": self.seed,
            "basis": self.perturbation.state(),
            "change": change,
            "update": {name: dict(state) for name, state in self._update_state.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts a `state_dict` back; torch's own would cast float32 state to a bf16 parameter's dtype."""
        if state_dict.get("rule", self._rule) != self._rule:
            raise RequestError(f"state_dict: it is of {state_dict['rule']}, and this optimizer is {self._rule}.")
        names = set(state_dict["change"])
        if names != set(self.moving):
            odd = sorted(names ^ set(self.moving))[0]
            raise RequestError(f"state_dict: it tunes other parameters than this optimizer, {odd} for one.")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.num_steps, self.seed = state_dict["num_steps"], state_dict["seed"]
        self._load_moments(state_dict["update"])
        self.perturbation.load_state(state_dict["basis"])
        self._load_changes(state_dict["change"], self.num_steps)

    @property
    def _rule(self) -> str:
        return f"{type(self.update).__name__} over {type(self.perturbation).__name__}"

    def tuned_state(self) -> dict[str, Tensor]:
        """Copies, on the CPU, of all that training changes: coefficients, and weights where they are written."""
        return {key: value.detach().cpu().clone() for key, value in self._tuned().items()}

    def _tuned(self) -> dict[str, Tensor]:
        tuned = {f"basis/{key}": value for key, value in self.perturbation.state().items()}
        for name, moving in self.moving.items():
            if self.writes(moving):
                tuned[f"weight/{name}"] = moving.weight
            tuned |= {f"change/{name}/{key}": value for key, value in moving.state().items()}
        return tuned

    @torch.no_grad()
    def load_tuned_state(self, tuned: dict[str, Tensor], num_steps: int) -> None:
        """Puts a `tuned_state` taken after `num_steps` steps back."""
        changes: dict[str, State] = {name: {} for name in self.moving}
        basis = {key.removeprefix("basis/"): value for key, value in tuned.items() if key.startswith("basis/")}
        self.perturbation.load_state(basis)
        for key, value in tuned.items():
            if key.startswith("basis/"):
                continue
            if key.startswith("weight/"):
                self.moving[key.removeprefix("weight/")].weight.copy_(value)
            else:
                name, _, role = key.removeprefix("change/").rpartition("/")
                changes[name][role] = value
        self._load_changes(changes, num_steps)

    def resumable_state(self) -> dict[str, Tensor]:
        """All that the next step depends on beside the number of steps; the tensors themselves, not copies."""
        moments = {
            f"update/{name}/{key}": value for name, state in self._update_state.items() for key, value in state.items()
        }
        return self._tuned() | moments

    def load_resumable_state(self, state: dict[str, Tensor], num_steps: int) -> None:
        """Puts a `resumable_state` taken after `num_steps` steps back; the next step is the one that followed it."""
        moments: dict[str, State] = {}
        for key, value in state.items():
            if key.startswith("update/"):
                name, _, role = key.removeprefix("update/").rpartition("/")
                moments.setdefault(name, {})[role] = value
        self._load_moments(moments)
        self.num_steps = num_steps
        self.load_tuned_state({k: v for k, v in state.items() if not k.startswith("update/")}, num_steps)

    def _load_moments(self, moments: dict[str, State]) -> None:
        self._update_state = {
            name: {key: value.to(self.moving[name].target.device).clone() for key, value in saved.items()}
            for name, saved in moments.items()
        }

    def _load_changes(self, changes: dict[str, State], num_steps: int) -> None:
        def draw(target: Target, refresh_step: int | None) -> Direction:
            key = DrawKey(self.seed, max(0, num_steps - 1) if refresh_step is None else refresh_step)
            return self.perturbation.direction(target, key, self._update_state.get(target.name, {}))

        for name, moving in self.moving.items():
            moving.load_state(partial(draw, moving.target), changes[name])

    def drawn_on_the_device(self) -> str | None:
        """A parameter whose steps depend on the type of its device, by noise or by rounding; None: there is none."""
        for name, moving in self.moving.items():
            target = moving.target
            kind = self.perturbation.direction_type(target)
            rounded = self.writes(moving) and target.parameter.dtype in (torch.bfloat16, torch.float16)
            if issubclass(kind, (Dense, LowRank)) or rounded:
                return name
        return None

    @property
    def compression_error(self) -> float:
        """Of the parameter where it is largest: the share of what was trained that compression beside the base lost."""
        return max((m.lost for m in self.moving.values() if isinstance(m, InForward)), default=0.0)

    def why_no_adapter(self) -> str | None:
        """None where the run is an exact LoRA adapter; else, in words, what stands in the way."""
        if self.merged:
            return "what was trained is in the weights since merge()"
        if getattr(self.model, "peft_config", None):
            return "what was trained is a change to PEFT's own adapter, for its save_pretrained() after merge()"
        for moving in self.moving.values():
            target = moving.target
            if self.writes(moving):
                return f"{target.name} was written to"
            if not target.is_linear or len(target.sites) > 1:
                return f"{target.name} is not the weight of one linear layer"
        return None
