"""Which layers write the residual stream, measured in two forward passes.

Let the outputs y_l of K layers all be perturbed at once by independent noise, y_l + rho_l n_l, and let d be what that
changes of the last hidden states h. Then

    alpha_l = <d, n_l> / (rho_l |n_l|^2)

estimates the mean of the diagonal of dh/dy_l: the part of a layer's output that is still there, as it is, at the end.
Where the output is added to the residual stream that is 1, or what later norms make of it; where an attention or a
matrix product comes first, it is 0 or nearly so. If d had nothing of n_l, <d, n_l> would be normal with the standard
deviation |d|: a layer counts where it is `DEVIATIONS` of them above 0, and alpha_l not below `SHARE` of the largest.
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
"""That it takes."""
SIZE = 0.05
"""Of the noise, as a share of the root mean square of a layer's output."""
DEVIATIONS = 5.0
"""False by chance once in three million layers."""
SHARE = 0.05
"""Below it a layer's output hardly reaches the end as it is, even where that can be told from chance."""


@torch.no_grad()
def residual_writers(
    model: nn.Module, targets: Sequence[Target], run: Callable[[], object], seed: int
) -> tuple[nn.Module, list[Target]]:
    """(base model, those of `targets` that write its residual stream), in two forward passes.

    Args:
        model: of transformers, or an adapter around one.
        targets: matrices; only those of linear layers are looked at.
        run: calls the model on some rows, the same each time.
        seed: of the noise.

    Raises:
        RequestError: no part of the model gives last hidden states.
    """
    linear = [target for target in targets if target.input_role is not None]
    outputs: dict[str, list[tuple[int, float]]] = {target.name: [] for target in linear}

    def look(name: str, call: int, output: Tensor) -> Tensor:
        del call
        outputs[name].append((output.numel(), float(output.float().square().mean().sqrt())))
        return output

    with _outputs(linear, look):
        base, plain = last_hidden(model, run)
    sizes = [hidden.numel() for hidden in plain]
    linear = [target for target in linear if [numel for numel, _ in outputs[target.name]] == sizes]
    scale = {target.name: SIZE * max(rms for _, rms in outputs[target.name]) for target in linear}

    def perturb(name: str, call: int, output: Tensor) -> Tensor:
        return output + (scale[name] * noise(output, seed, name, call)).to(output.dtype)

    with _outputs(linear, perturb):
        _, perturbed = last_hidden(model, run)
    change = [after.double() - before.double() for before, after in zip(plain, perturbed, strict=True)]
    found = {t.name: _alpha(change, scale[t.name], seed, t.name) for t in linear}
    least = SHARE * max([alpha for alpha, _ in found.values()], default=0.0)
    return base, [t for t in linear if found[t.name][1] >= DEVIATIONS and found[t.name][0] >= least]


def _alpha(change: Sequence[Tensor], scale: float, seed: int, name: str) -> tuple[float, float]:
    """(alpha of a layer, <d, n> / |d|)."""
    along = noise_sq = 0.0
    for call, d in enumerate(change):
        n = noise(d, seed, name, call).double()
        along, noise_sq = along + float((d * n).sum()), noise_sq + float(n.square().sum())
    length = sum(float(d.square().sum()) for d in change) ** 0.5
    return (along / (scale * noise_sq), along / length) if scale and length else (0.0, 0.0)


def noise(like: Tensor, seed: int, name: str, call: int) -> Tensor:
    """Standard normal numbers for a layer's output at one of its calls, float32, in the shape of `like`."""
    n_TD = torch.empty((like.numel() // like.shape[-1], like.shape[-1]), dtype=torch.float32, device=like.device)
    return fill_normal_(n_TD, seed=seed, step=call, name=name, role="writers").view(like.shape)


@contextmanager
def _outputs(targets: Sequence[Target], change: Callable[[str, int, Tensor], Tensor]) -> Iterator[None]:
    """While open, each output of the targets' layers is what `change` makes of (name, which call of it, output)."""
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
