"""The gradient of a loss with respect to the last hidden states, without backpropagation through a layer.

A loss L is computed from the last hidden states h_t of the base model by a small readout: a mean and a cosine, or the
output head. Its gradient at h_t,

    e_t = dL / dh_t,

needs backpropagation through this readout only. The layers run as in inference: they record no graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.targets import only_input
from tezo.errors import RequestError
from tezo.estimators.estimate import Closure, RowsClosure
from tezo.forward.interception import untraced

Tap = tuple[Sequence[nn.Module], Callable[[Tensor], Tensor]]
"""Modules, and the function of the inputs (..., N) whose result is stored for each of their calls."""


@dataclass
class BaseCall:
    """A call of the base model.

    Attributes:
        kept: name -> the results of its tap, one for each call of its modules.
        leaf: the last hidden states (B, L, D), the leaf of the autograd graph.
    """

    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    leaf: Tensor | None = None


def last_hidden(model: nn.Module, run: Callable[[], object]) -> tuple[nn.Module, list[Tensor]]:
    """(base model, its last hidden states (B, L, D) for each call made by `run`).

    The base model is the outermost module that returns last hidden states: the model without its head.

    Raises:
        RequestError: no module returns last hidden states.
    """
    outputs: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: object, output: Any) -> None:
        del args
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None:
            outputs.append((module, hidden))

    handles = [module.register_forward_hook(untraced(note)) for module in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not outputs:
        raise RequestError(
            f"a feedback step needs a transformers model that returns its last hidden states, and no part of "
            f"{type(model).__name__} does; set train.feedback_first=0 and train.feedback_last=0."
        )
    base = outputs[-1][0]
    return base, [hidden for module, hidden in outputs if module is base]


def last_errors(
    base: nn.Module, closure: Closure, taps: Mapping[str, Tap]
) -> tuple[Tensor, list[tuple[dict[str, list[Tensor]], Tensor]]]:
    """(L, [(tap results by name, e (B, L, D)), ...] for each call of `base`); calls that do not affect L are omitted.

    The graph of a summand of L is freed before the next one is computed: it has the logits of one part of the batch.

    Args:
        base: base model, from `last_hidden`.
        closure: returns the loss as a tensor.
        taps: name -> tap.

    Raises:
        RequestError: the loss has no gradient.
    """
    losses: list[Tensor] = []
    errors: list[Tensor | None] = []
    with _recording(base, taps) as calls, torch.enable_grad():
        summands = closure.summands() if isinstance(closure, RowsClosure) else [torch.as_tensor(closure())]
        for summand in summands:
            leaves = [call.leaf for call in calls[len(errors) :] if call.leaf is not None]
            if summand.requires_grad:
                errors += torch.autograd.grad(summand, leaves, allow_unused=True)
            else:
                errors += [None] * len(leaves)
            losses.append(summand.detach())
    if all(error is None for error in errors):
        raise RequestError(
            "a feedback step needs a loss that is a tensor and differentiable in the model's last hidden states; "
            "return one, or set train.feedback_first=0 and train.feedback_last=0."
        )
    return torch.stack(losses).sum(0), [(c.kept, e) for c, e in zip(calls, errors, strict=True) if e is not None]


@contextmanager
def _recording(base: nn.Module, taps: Mapping[str, Tap]) -> Iterator[list[BaseCall]]:
    """Context in which calls of `base` record no graph, and the computation from their last hidden states on does."""
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
