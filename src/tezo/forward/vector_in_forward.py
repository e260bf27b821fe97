"""Biases and norm weights in the forward pass: the stored vector is read, not written by perturbations."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from tezo.directions.spaces import Dense
from tezo.directions.targets import Layout, Site, Target, only_input
from tezo.forward.blocks import Blocks
from tezo.forward.interception import unintercepted, untraced
from tezo.forward.moving_parameter import MovingParameter, Shift, require_writable


class VectorInForward(MovingParameter):
    """A vector whose effect on its module's output is known: the effect of a perturbation is added to the output.

    A perturbation of 1e-3 is lost when it is added to a bfloat16 weight near 1, whose neighbours are 2^-8 away. Here it
    is applied in float32 and only the output is rounded.
    """

    in_blocks = True

    def __init__(self, target: Target, blocks: Blocks) -> None:
        require_writable(target, "training 1-D parameters")
        super().__init__(target)
        self._blocks = blocks
        self._shift_GN: Tensor | None = None
        self._handles += [self._hook(site) for site in target.sites]

    def _hook(self, site: Site) -> RemovableHandle:
        assert site.layout is not None
        perturbed = _PERTURBED[site.layout]

        @unintercepted
        def move(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            if self._shift_GN is None:
                return output
            self.was_called = True
            count = self._shift_GN.shape[0]
            x = only_input(args, kwargs)
            x_GTK, out_GTN = (self._blocks.split(values, count, 1) for values in (x, output))
            moved = perturbed(module, x_GTK, out_GTN, self._shift_GN.unsqueeze(1))
            return moved.to(output.dtype).view(output.shape)

        return site.module.register_forward_hook(untraced(move), with_kwargs=True)

    def set_perturbations(self, shifts: Sequence[Shift]) -> None:
        moved = [_vectors(shift) * shift.scale for shift in shifts]
        self._shift_GN = torch.cat(moved) if moved else None


def _vectors(shift: Shift) -> Tensor:
    assert isinstance(shift.direction, Dense)
    return shift.direction.vectors(shift.examples)


def _bias(module: nn.Module, x: Tensor, out: Tensor, shift: Tensor) -> Tensor:
    """Out + d."""
    del module, x
    return out + shift


def _layer_norm(module: nn.Module, x: Tensor, out: Tensor, shift: Tensor) -> Tensor:
    """Out + d * (x - mean) / sqrt(var + eps)."""
    assert isinstance(module, nn.LayerNorm)
    return out + functional.layer_norm(x.to(shift.dtype), module.normalized_shape, eps=module.eps) * shift


def _norm(module: nn.Module, x: Tensor, out: Tensor, shift: Tensor) -> Tensor:
    """Recomputes the norm of each block with the perturbed weight, because modules use the weight in different ways."""
    del out
    parameter = module.get_parameter("weight")
    stored = parameter.data
    try:
        moved = []
        for x_TN, shift_1N in zip(x, shift, strict=True):
            parameter.data = stored + shift_1N[0]
            moved.append(module.forward(x_TN))
    finally:
        parameter.data = stored
    return torch.stack(moved)


_PERTURBED: dict[Layout, Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]] = {
    "bias": _bias,
    "layer_norm": _layer_norm,
    "norm": _norm,
}
