"""What a loss says of a model's last hidden states, where no layer is passed backwards.

A loss L reads the last hidden states h_t of the base model through little: a mean and a cosine, or the output head. Its
gradient there,

    e_t = dL / dh_t,

is had from that readout alone. The layers run as they do in inference: no graph is recorded in them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.targets import only_input
from tezo.errors import RequestError
from tezo.estimators.estimate import Closure
from tezo.forward.interception import untraced

Tap = tuple[Sequence[nn.Module], Callable[[Tensor], Tensor]]
"""Modules, and what is to be kept of the inputs (..., N) of each of their calls."""


@dataclass
class BaseCall:
    """A call of the base model.

    Attributes:
        kept: name -> what its tap made of the inputs of each call of its modules.
        leaf: the last hidden states (B, L, D), from which a graph begins.
    """

    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    leaf: Tensor | None = None


def last_hidden(model: nn.Module, run: Callable[[], object]) -> tuple[nn.Module, list[Tensor]]:
    """(base model, its last hidden states (B, L, D) at each call that `run` makes).

    The base model is the outermost module that gives last hidden states: all but a head.

    Raises:
        RequestError: there is none.
    """
    found: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: object, output: Any) -> None:
        del args
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None:
            found.append((module, hidden))

    handles = [module.register_forward_hook(untraced(note)) for module in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise RequestError(
            f"a feedback step needs a model of transformers that gives its last hidden states, and no part of "
            f"{type(model).__name__} does; set train.feedback_first=0 and train.feedback_last=0."
        )
    base = found[-1][0]
    return base, [hidden for module, hidden in found if module is base]


def last_errors(
    base: nn.Module, closure: Closure, taps: Mapping[str, Tap]
) -> tuple[Tensor, list[tuple[dict[str, list[Tensor]], Tensor]]]:
    """(L, for each call of `base` what was kept of it and e (B, L, D)); calls that L does not depend on are left out.

    Args:
        base: as `last_hidden` finds it.
        closure: returns the loss as a tensor.
        taps: name -> what is to be kept of which layers' inputs.

    Raises:
        RequestError: the loss has no gradient.
    """
    with _recording(base, taps) as calls, torch.enable_grad():
        loss = closure()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise RequestError(
            "a feedback step needs a loss that is a tensor and differentiable in the model's last hidden states; "
            "return one, or set train.feedback_first=0 and train.feedback_last=0."
        )
    leaves = [call.leaf for call in calls if call.leaf is not None]
    errors = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), [(c.kept, e) for c, e in zip(calls, errors, strict=True) if e is not None]


@contextmanager
def _recording(base: nn.Module, taps: Mapping[str, Tap]) -> Iterator[list[BaseCall]]:
    """While open, calls of `base` record no graph, and what follows does, from their last hidden states on."""
    calls: list[BaseCall] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module, args
        calls.append(BaseCall())
        torch.set_grad_enabled(False)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del module, args
        calls[-1].leaf = leaf = output.last_hidden_state.detach().requires_grad_()
        torch.set_grad_enabled(True)
        return type(output)(**{**output, "last_hidden_state": leaf})

    def tap(name: str, keep: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def take(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            del module
            calls[-1].kept.setdefault(name, []).append(keep(only_input(args, kwargs)))

        return take

    handles = [base.register_forward_pre_hook(untraced(enter)), base.register_forward_hook(untraced(leave))]
    for name, (modules, keep) in taps.items():
        hook = untraced(tap(name, keep))
        handles += [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
