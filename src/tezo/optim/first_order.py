"""First-order Adam with the interface of the zeroth-order optimizer, as a baseline in the same training loop."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.random import generator, seed_of
from tezo.directions.targets import ALL, Target, select_targets
from tezo.forward import rounding
from tezo.optim.base_optimizer import BaseOptimizer, check_closure, check_rate
from tezo.optim.closures import Closure
from tezo.optim.estimators.estimate import GRADIENT, StepRecord
from tezo.optim.updates import check_average
from tezo.system.errors import RequestError, RunError
from tezo.system.signals import let_interrupt, uninterrupted

MOST = 10.0
"""Bound of an entry of Adam's step in units of lr, for betas near the default. By Cauchy-Schwarz
|m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), which is 7.3 for 0.9 and 0.999."""

_COPY = "copy"
"""Key of a weight's float32 copy beside the keys of Adam's state."""


class SteppedWeight:
    """A weight, and the tensor that the optimizer steps in its place.

    In float32 or wider this is the weight itself. An update is smaller than the spacing of values in half precision:
    there it is a float32 copy, of which the weight is the rounded value, or, without a copy, the values for the length
    of a step, which are then rounded stochastically.

    Args:
        target: the weight.
        master: whether a weight in half precision has a float32 copy.

    Attributes:
        target: as above.
        stepped: the tensor that the optimizer steps; empty between steps if it has the values for a step only.
        has_copy: whether it is a float32 copy.
        takes_memory: whether it has its values between steps.
    """

    def __init__(self, target: Target, *, master: bool) -> None:
        self.target = target
        is_weight = target.parameter.element_size() >= torch.float32.itemsize
        self.has_copy = master and not is_weight
        self.takes_memory = is_weight or self.has_copy
        self.stepped = target.parameter if is_weight else nn.Parameter(self._values() if master else self._nothing())

    def _values(self) -> Tensor:
        return self.target.parameter.detach().float()

    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self.target.device)

    def begin_step(self) -> None:
        """Moves the gradient of the weight, and its values if they are not there, to `stepped`."""
        weight, gradient = self.target.parameter, self.target.parameter.grad
        if self.stepped is weight or gradient is None:
            return
        # the weight is no longer its rounded value where other weights were loaded into the model
        if not self.takes_memory or not torch.equal(self.stepped.data.to(weight.dtype), weight.data):
            self.stepped.data = self._values()
        self.stepped.grad = gradient.float()

    def end_step(self, seed: int, step: int) -> None:
        """Writes `stepped` to the weight and drops the gradient; rounding is a function of (seed, step, name)."""
        weight = self.target.parameter.data
        if self.has_copy:
            weight.copy_(self.stepped.data)
        elif not self.takes_memory:
            if self.stepped.grad is not None:
                draw = generator(self.target.device, seed=seed, step=step, name=self.target.name, role="rounding")
                rounding.store_(weight, self.stepped.data, draw)
            self.stepped.data = self._nothing()
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """Frees the gradients of the weight and of `stepped`."""
        self.stepped.grad = self.target.parameter.grad = None


class FirstOrderOptimizer(BaseOptimizer, torch.optim.AdamW):
    """AdamW by backpropagation; a step is one forward and one backward pass, in training mode (with dropout).

    Moments are float32, and steps are computed in float32: in float16, eps = 1e-8 is 0 and the square of a small
    gradient too, so that a step would divide by 0. Weights in half precision have a float32 copy that the steps change
    and that they are rounded from, or are rounded stochastically.

    Args:
        model: model to be tuned; parameters that are not selected are frozen and need no memory for gradients.
        lr: learning rate.
        betas: decay rates (beta1, beta2) of the moments.
        eps: smoothing term.
        weight_decay: decoupled weight decay.
        master_weights: whether weights in half precision have a float32 copy, 4 bytes for each. False: there is none,
            and each step rounds them stochastically.
        targets: patterns that select the parameters, see `tezo.directions.targets.select_targets`.
        seed: seed of dropout and of stochastic rounding, together with the step.

    Raises:
        RequestError: a setting is out of range, or a selected parameter has no gradient (quantised weights).
        NonFiniteLossError: raised by `step`; the parameters are unchanged.
        RunError: raised by `step` where a gradient is not finite; the parameters are unchanged.
    """

    rules = (GRADIENT,)
    by_gradients = True

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master_weights: bool = True,
        targets: Sequence[str] = (ALL,),
        seed: int = 0,
    ) -> None:
        check_rate("lr", lr)
        check_average("betas", betas, eps)
        self.model = model
        self.seed = seed
        self.targets = select_targets(model, targets)
        self.bind(self.targets)
        for target in self.targets:
            if not target.is_writable:
                raise RequestError(
                    f"method.name is adam, and {target.name} ({type(target.parameter).__name__}, "
                    f"{target.parameter.dtype}) cannot be written in place; use head-feedback or tezo-cadam."
                )
        chosen = {id(target.parameter) for target in self.targets}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        self._weights = [SteppedWeight(target, master=master_weights) for target in self.targets]
        super().__init__(
            [weight.stepped for weight in self._weights], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )

    @torch.inference_mode(False)
    def step(self, closure: Closure | None = None, *, rule: str | None = None) -> float | None:  # type: ignore[override]
        """Takes one step and returns the loss before it.

        Args:
            closure: evaluates the objective on this step's batch; the loss must be differentiable.
            rule: `GRADIENT`, or None for the same.
        """
        closure = check_closure(closure)
        self.check_rule(rule or GRADIENT, closure)
        self.check_bound()
        lr = float(self.param_groups[0]["lr"])
        check_rate("lr", lr)
        with uninterrupted():
            try:
                value = self._measure_gradients(closure)
                self._check_range()
                let_interrupt(last=True)
                self._step_in_float32()
            finally:
                for weight in self._weights:
                    weight.drop_gradient()
            self.count(StepRecord(self.num_steps, value, lr, rule=GRADIENT, forward_passes=1))
        return value

    def passes_of(self, rule: str, *, first: bool) -> int:
        del rule, first
        return 1  # the gradient is beside it

    def _step_in_float32(self) -> None:
        # weights without a tensor in float32 get one only for their step
        together = [weight for weight in self._weights if weight.takes_memory]
        for weights in (together, *([weight] for weight in self._weights if not weight.takes_memory)):
            for weight in weights:
                weight.begin_step()
            torch.optim.AdamW.step(self)
            for weight in weights:
                weight.end_step(self.seed, self.num_steps)

    def _check_range(self) -> None:
        """Raises a `RequestError` if a step could take a weight beyond the largest number of its dtype."""
        lr, decay = (float(self.param_groups[0][key]) for key in ("lr", "weight_decay"))
        for target in self.targets:
            weight = target.parameter.data
            largest = float(weight.abs().max()) if weight.numel() else 0.0
            if largest * (1 + lr * decay) + MOST * lr > torch.finfo(weight.dtype).max:
                raise RequestError(
                    f"method.lr is {lr}: a step could take {target.name} beyond the largest {weight.dtype}, and the "
                    "parameters are as before; lower it."
                )

    def _measure_gradients(self, closure: Closure) -> float:
        """Returns the loss; its gradients are left at the weights.

        Raises:
            NonFiniteLossError: the loss is not finite.
            RunError: a gradient is not finite.
        """
        for weight in self._weights:
            weight.drop_gradient()  # of a backward pass before, which `zero_grad` does not drop in half precision
        with torch.enable_grad(), _training(self.model, self.seed, self.num_steps):
            loss = closure()
            if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
                raise RequestError(
                    "method.name is adam, but the closure did not return one loss that has a gradient; return a "
                    "tensor of one number without calling backward(), or use a zeroth-order method."
                )
            loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        if not math.isfinite(value):
            raise self.not_finite(value)
        for target in self.targets:
            gradient = target.parameter.grad
            if gradient is not None and not gradient.isfinite().all():
                raise RunError(
                    f"step {self.num_steps}: the gradient of {target.name} is not finite in {gradient.dtype}, and the "
                    "parameters are as before; set model.dtype=bfloat16 or float32."
                )
        return value

    def check_rule(self, rule: str, closure: Closure) -> None:
        del closure
        if rule != GRADIENT:
            raise RequestError(
                f"method.name is adam, which takes gradient steps, not steps of kind {rule}; use head-feedback."
            )

    def drawn_on_the_device(self) -> str | None:
        return self.targets[0].name  # the steps of all parameters depend on the device type

    def rank_and_way(self, name: str) -> tuple[int | None, str]:
        del name
        return None, "by its gradient"

    def why_no_adapter(self) -> str | None:
        return "gradients change whole weights"

    def tuned_tensors(self) -> dict[str, Tensor]:
        return {f"weight/{target.name}": target.parameter.data for target in self.targets}

    @torch.no_grad()
    def load_tuned_state(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        del num_steps
        for weight in self._weights:
            weight.target.parameter.copy_(tuned[f"weight/{weight.target.name}"])
            if weight.has_copy:
                weight.stepped.copy_(weight.target.parameter)

    def roll_back(self, tuned: Mapping[str, Tensor], num_steps: int) -> None:
        self.load_tuned_state(tuned, num_steps)
        self.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns that of torch, with the counts of steps and the float32 copies of weights by name."""
        copies = {weight.target.name: weight.stepped.data for weight in self._weights if weight.has_copy}
        counts = {"num_steps": self.num_steps, "num_forward_passes": self.num_forward_passes}
        return super().state_dict() | counts | {"copies": copies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`, beside the weights, which the state dict of the model has.

        Raises:
            RequestError: it is not of this optimizer over the same weights.
        """
        copied = {weight.target.name: weight for weight in self._weights if weight.has_copy}
        if state_dict.get("copies", {}).keys() != copied.keys():
            raise RequestError(
                "state_dict: it belongs to another optimizer or other weights; give this optimizer's state_dict()."
            )
        super().load_state_dict(state_dict)
        self.num_steps, self.num_forward_passes = state_dict["num_steps"], state_dict["num_forward_passes"]
        for name, weight in copied.items():
            weight.stepped.data.copy_(state_dict["copies"][name])

    def resumable_state(self) -> dict[str, Tensor]:
        """Returns `tuned_tensors`, Adam's state as "update/NAME/KEY" and float32 copies under the key "copy"."""
        tensors = self.tuned_tensors()
        for weight in self._weights:
            found = {**self.state[weight.stepped], **({_COPY: weight.stepped.data} if weight.has_copy else {})}
            tensors |= {f"update/{weight.target.name}/{key}": value for key, value in found.items()}
        return tensors

    @torch.no_grad()
    def load_resumable_state(
        self, state: Mapping[str, Tensor], records: Sequence[StepRecord], moments_since: int = 0
    ) -> None:
        del moments_since  # Adam's state counts its steps itself
        self.load_tuned_state(state, len(records))
        for weight in self._weights:
            start, stepped = f"update/{weight.target.name}/", weight.stepped
            found = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
            saved = found.pop(_COPY, None)
            if saved is not None and weight.has_copy:
                stepped.copy_(saved)
            self.state[stepped] = {
                k: v.clone() if k == "step" else v.to(stepped.device, stepped.dtype).clone() for k, v in found.items()
            }
        self.count_again(records)


@contextmanager
def _training(model: nn.Module, seed: int, step: int) -> Iterator[None]:
    """Context with the model in training mode and dropout as a function of (seed, step); restores both afterwards."""
    modes = {module: module.training for module in model.modules()}
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_of(seed, step, "dropout"))
        model.train()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
