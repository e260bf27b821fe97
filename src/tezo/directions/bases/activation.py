"""A basis computed from data: the leading eigenvectors of each linear layer's inputs.

The gradient of a linear layer is a sum over positions, G = sum_t delta_t x_t^T. Its rows lie in the span of the layer's
inputs, which forward passes alone show. A factor v of leading input directions therefore has a much larger share of the
gradient than a random one (docs/theory.md). Forward passes show nothing about the outputs, so their factor is random.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import DataBasis, Factors, Source, StoredTensors, input_size
from tezo.directions.random import normal
from tezo.directions.targets import Target, only_input
from tezo.system.errors import RequestError
from tezo.system.progress import tracked

EXACT = 512
"""Largest vector size whose second moments are kept in full: 1 MB in float32."""

SHARE, LEAST_BYTES, MOST_BYTES = 16, 1 << 25, 1 << 28
"""Range finders take at most a sixteenth of the layers' bytes at a time, or `LEAST_BYTES` where that is more, and never
more than `MOST_BYTES`. Layers that do not fit are divided into groups, each with separate forward passes."""


def width(size: int, rank: int) -> int:
    """Returns the columns of a range finder of `size`-vectors whose `rank` leading eigenvectors are wanted."""
    return size if size <= EXACT else min(size, max(64, 8 * rank))


def finder_bytes(size: int, rank: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a range finder on the vectors' device."""
    columns = width(size, rank)
    return size * columns * dtype.itemsize * (1 if columns == size else 2)


class RangeFinder:
    """The randomized range finder of Halko et al. (2011) for the second moments C = sum_t x_t x_t^T of I-vectors.

    It keeps Y = C Omega with K columns, and takes the leading eigenvectors from the Nystrom approximation
    C ~ Y (Omega^T Y)^-1 Y^T, with the inverse restricted to eigenvalues above the rounding error of the sums. Omega is
    I x K and orthonormal, drawn with the key `name`; for K = I it is the identity, and C is exact.
    """

    def __init__(self, size: int, columns: int, device: torch.device, dtype: torch.dtype, name: str) -> None:
        self._omega_IK = None
        if columns < size:
            # the role is part of the key of the draw, and so of the numbers
            omega_IK, _ = torch.linalg.qr(normal((size, columns), seed=0, step=0, name=name, role="sketch"))
            self._omega_IK = omega_IK.to(device, dtype)
        self._sum_IK = torch.zeros(size, columns, device=device, dtype=dtype)
        self.count = 0

    def add(self, x_TI: Tensor) -> None:
        """Adds T vectors."""
        x_TI = x_TI.to(self._sum_IK)  # the first layer on a device reads inputs that are still on another one
        self._sum_IK.addmm_(x_TI.T, x_TI if self._omega_IK is None else x_TI @ self._omega_IK)
        self.count += len(x_TI)

    def leading(self, rank: int) -> Tensor:
        """Returns the (I, rank) eigenvectors of C with the largest eigenvalues, in descending order: float64, CPU.

        Columns are orthonormal; the largest entry of each is positive, because a decomposition leaves the sign open.
        Where the vectors span fewer than `rank` dimensions, the remaining columns complete the basis arbitrarily.

        Raises:
            FloatingPointError: a vector had a NaN or infinite entry, or one too large to square.
        """
        y_IK = self._sum_IK.double().cpu()
        if not torch.isfinite(y_IK).all():
            raise FloatingPointError(math.nan)
        gram_KK = y_IK if self._omega_IK is None else self._omega_IK.double().cpu().T @ y_IK
        core_K, turns_KK = torch.linalg.eigh((gram_KK + gram_KK.T) / 2)
        leading_IK = turns_KK.flip(1)
        if self._omega_IK is not None:
            # eigenvalues below the rounding error of the sums are noise, which their inverse would amplify
            floor = 10 * torch.finfo(self._sum_IK.dtype).eps * float(torch.linalg.matrix_norm(y_IK))
            inverse_K = torch.where(core_K > floor, core_K, torch.inf).rsqrt()
            leading_IK, _, _ = torch.linalg.svd(y_IK @ turns_KK * inverse_K, full_matrices=False)
        # contiguous, as a file returns it: a product rounds differently with another memory layout
        leading_IR: Tensor = leading_IK[:, :rank].contiguous()
        largest = leading_IR.abs().argmax(0, keepdim=True)
        return leading_IR * torch.sign(torch.gather(leading_IR, 0, largest))


class ActivationBasis(DataBasis[Factors]):
    """The leading eigenvectors of each linear layer's inputs x_t, computed in a few forward passes.

        v_s = sqrt(I) q_s,   q_1, ..., q_r the eigenvectors of sum_t x_t x_t^T with the largest eigenvalues.

    Factors of the output side are random, and so are both factors of parameters other than linear layers' weights.
    """

    def collecting_bytes(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> int:
        linear = [target for target in targets if target.input_role is not None]  # others need no range finder
        sizes = (
            sum(finder_bytes(input_size(target), ranks[target.name], target.state_dtype) for target in group)
            for group in groups(linear, ranks)
        )
        return max(sizes, default=0)

    def compute(self, refresh_step: int, source: Source) -> Factors:
        if source.passes is None:
            raise RequestError(
                "method.basis: this basis is computed from data, and was given none; call "
                "optimizer.set_passes(passes), with a function that runs the model on some training rows, "
                "or set method.basis=gaussian."
            )
        factors: dict[str, Tensor] = {}
        num_calls = 0
        for group in tracked(list(groups(self._targets, self._ranks)), "groups of layers"):
            finders = {}
            for target in group:
                size, columns = input_size(target), width(input_size(target), self._ranks[target.name])
                finders[target.name] = RangeFinder(size, columns, target.device, target.state_dtype, target.name)
            with recording(source.model, group, finders) as calls:
                source.passes(refresh_step)
            num_calls += calls()
            for name, finder in finders.items():
                if finder.count == 0:
                    raise RequestError(
                        f"method.basis: the forward passes that were to show the inputs of {name} do not call it; "
                        "leave it out with method.targets, or set method.basis=gaussian."
                    )
                q_IR = finder.leading(self._ranks[name])
                factors[name] = q_IR / q_IR.square().mean().sqrt()
        return Factors(inputs=factors, passes=num_calls)

    def read(self, stored: StoredTensors) -> Factors:
        return Factors(inputs=stored.tensors, passes=stored.passes)


def groups(targets: Sequence[Target], ranks: Mapping[str, int]) -> Iterator[list[Target]]:
    """Splits the targets into groups whose range finders together fit into the limit, or that have one target."""
    allowed = min(MOST_BYTES, max(LEAST_BYTES, sum(target.parameter.nbytes for target in targets) // SHARE))
    group: list[Target] = []
    taken = 0
    for target in targets:
        needed = finder_bytes(input_size(target), ranks[target.name], target.state_dtype)
        if group and taken + needed > allowed:
            yield group
            group, taken = [], 0
        group.append(target)
        taken += needed
    if group:
        yield group


@contextmanager
def recording(
    model: nn.Module, targets: Sequence[Target], finders: Mapping[str, RangeFinder]
) -> Iterator[Callable[[], int]]:
    """Adds every input of the targets' modules to their range finders while open, without padding.

    Padding is where the two-dimensional `attention_mask` of the model's call is 0. Yields a function that returns the
    number of calls of the model so far.
    """
    masks: list[Tensor | None] = []
    parameters = list(inspect.signature(model.forward).parameters)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        mask = (dict(zip(parameters, args, strict=False)) | kwargs).get("attention_mask")
        masks.append(mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None)

    def take(finder: RangeFinder, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        del module
        x = only_input(args, kwargs)
        x_TI, mask = x.detach().reshape(-1, x.shape[-1]), masks[-1] if masks else None
        fits = mask is not None and len(x_TI) == mask.numel()
        finder.add(x_TI[mask.flatten().to(x_TI.device)] if fits and mask is not None else x_TI)

    handles = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    for target in targets:
        hook = partial(take, finders[target.name])
        handles += [site.module.register_forward_pre_hook(hook, with_kwargs=True) for site in target.sites]
    try:
        yield lambda: len(masks)
    finally:
        for handle in handles:
            handle.remove()
