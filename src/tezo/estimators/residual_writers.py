"""Finding the layers that write the residual stream, in two forward passes.

The outputs y_l of K layers are perturbed simultaneously by independent noise, y_l + rho_l n_l. Let d be the resulting
change of the last hidden states h. Then

    alpha_l = <d, n_l> / (rho_l |n_l|^2)

estimates the mean of the diagonal of dh/dy_l: the fraction of a layer's output that reaches h unchanged. If the output
is added to the residual stream, this is 1, times the scale of later norms. If an attention or a matrix product follows
first, it is close to 0. If d were independent of n_l, <d, n_l> would be normal with standard deviation |d|. A layer is
accepted if <d, n_l> is at least `DEVIATIONS` standard deviations and alpha_l at least `SHARE` of the largest alpha.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.targets import Target
from tezo.estimators.readout import last_hidden
from tezo.forward.interception import untraced
from tezo.numerics.random import fill_normal_

PASSES = 2
"""Number of forward passes."""
SIZE = 0.05
"""Standard deviation of the noise, as a fraction of the root mean square of a layer's output."""
DEVIATIONS = 5.0
"""Required significance in standard deviations: one false acceptance in three million layers."""
SHARE = 0.05
"""Smallest accepted fraction of the largest alpha: below it the contribution is significant but negligible."""


@torch.no_grad()
def residual_writers(
    model: nn.Module, targets: Sequence[Target], run: Callable[[], object], seed: int
) -> tuple[nn.Module, list[Target]]:
    """(base model, the subset of `targets` that writes its residual stream), in two forward passes.

    Args:
        model: a transformers model, or an adapter around one.
        targets: matrices; those that are not weights of linear layers are ignored.
        run: calls the model on some rows, the same rows each time.
        seed: seed of the noise.

    Raises:
        RequestError: no part of the model returns last hidden states.
    """
    linear = [target for target in targets if target.input_role is not None]
    outputs: dict[str, list[tuple[int, float]]] = {target.name: [] for target in linear}

    def measure(name: str, call: int, output: Tensor) -> Tensor:
        del call
        outputs[name].append((output.numel(), float(output.float().square().mean().sqrt())))
        return output

    with _outputs(linear, measure):
        base, plain = last_hidden(model, run)
    sizes = [hidden.numel() for hidden in plain]
    linear = [target for target in linear if [numel for numel, _ in outputs[target.name]] == sizes]
    scale = {target.name: SIZE * max(rms for _, rms in outputs[target.name]) for target in linear}

    def perturb(name: str, call: int, output: Tensor) -> Tensor:
        return output + (scale[name] * noise(output, seed, name, call)).to(output.dtype)

    with _outputs(linear, perturb):
        _, perturbed = last_hidden(model, run)
    change = [after.double() - before.double() for before, after in zip(plain, perturbed, strict=True)]
    alphas = {t.name: _alpha(change, scale[t.name], seed, t.name) for t in linear}
    least = SHARE * max([alpha for alpha, _ in alphas.values()], default=0.0)
    return base, [t for t in linear if alphas[t.name][1] >= DEVIATIONS and alphas[t.name][0] >= least]


def _alpha(change: Sequence[Tensor], scale: float, seed: int, name: str) -> tuple[float, float]:
    """(alpha, <d, n> / |d|) of a layer; the second number is the significance in standard deviations."""
    along = noise_sq = 0.0
    for call, d in enumerate(change):
        n = noise(d, seed, name, call).double()
        along, noise_sq = along + float((d * n).sum()), noise_sq + float(n.square().sum())
    length = sum(float(d.square().sum()) for d in change) ** 0.5
    return (along / (scale * noise_sq), along / length) if scale and length else (0.0, 0.0)


def noise(like: Tensor, seed: int, name: str, call: int) -> Tensor:
    """The noise for one call of a layer: standard normal, float32, in the shape of the output `like`."""
    n_TD = torch.empty((like.numel() // like.shape[-1], like.shape[-1]), dtype=torch.float32, device=like.device)
    return fill_normal_(n_TD, seed=seed, step=call, name=name, role="writers").view(like.shape)


@contextmanager
def _outputs(targets: Sequence[Target], change: Callable[[str, int, Tensor], Tensor]) -> Iterator[None]:
    """Context in which each output of the targets' layers is replaced by `change(name, number of the call, output)`."""
    calls = dict.fromkeys((target.name for target in targets), 0)

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def changed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            del module, args
            calls[name] += 1
            return change(name, calls[name] - 1, output)

        return changed

    handles = [site.module.register_forward_hook(untraced(hook(t.name))) for t in targets for site in t.sites]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
