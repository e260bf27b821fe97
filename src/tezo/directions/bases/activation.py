"""A basis that sees the data: the leading directions of each layer's inputs.

The gradient of a linear layer is a sum over positions, G = sum_t delta_t x_t^T: its rows lie in the span of the
layer's inputs, which forward passes alone reveal. A factor v of leading input directions therefore meets far more of
the gradient than a random one, and of that the part which the rows of a batch agree on: docs/theory.md. What multiplies
the outputs, of which forward passes reveal nothing, stays random.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import Basis, CollectedFactors, Draw, FactorStore, Passes, Role
from tezo.directions.bases.gaussian import GaussianBasis, orthonormal
from tezo.directions.bases.sketch import Sketch, sketch_bytes, width
from tezo.directions.targets import Target, only_input
from tezo.errors import RequestError

MOST_BYTES = 1 << 28
"""Of sketches at a time: the layers of a larger model are looked at in groups, each with forward passes of its own."""

KIND = "basis"
"""By which what it saw is kept."""

_TO_KEEP = 2
"""Births: a momentum is carried over from the last factors to the next."""


class ActivationBasis(Basis):
    """The leading directions of each linear layer's inputs x_t, as a few forward passes show them.

        v_s = sqrt(I) q_s,   q_1, ..., q_r the eigenvectors of sum_t x_t x_t^T with the largest eigenvalues.

    Parameters that are no linear layer's weight have random factors, and so has the output side of those that are.

    Args:
        centred: about the mean input, whose direction is then seldom among them.
        weighted: each direction divided by its singular value, so that a step moves the output by as much along each;
            directions that no input has, where the inputs span fewer than the rank, as the least of those they have.
        orthonormal: the factor of the output side has orthogonal columns.
    """

    data_dependent = True

    def __init__(self, *, centred: bool = False, weighted: bool = False, orthonormal: bool = False) -> None:
        self.centred = centred
        self.weighted = weighted
        self.orthonormal = orthonormal
        self._calls = 0
        self._seconds = 0.0
        self._targets: list[Target] = []
        self._ranks: Mapping[str, int] = {}
        self._watched: tuple[nn.Module, Passes] | None = None
        self._store: FactorStore | None = None
        self._seen: dict[int, CollectedFactors] = {}
        self._random = GaussianBasis()

    def prepare(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> None:
        self._targets = [target for target in targets if target.input_role is not None]
        self._ranks = ranks

    def set_calibration_passes(self, model: nn.Module, passes: Passes) -> None:
        self._watched = model, passes

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store
        for refresh_step, seen in self._seen.items():  # before the first step, to choose a learning rate
            kept = store.load(KIND, refresh_step)
            if kept is None:
                store.save(KIND, refresh_step, seen)
            self._seen[refresh_step] = kept or seen

    def factor(self, role: Role, target: Target, rank: int, draw: Draw) -> Tensor:
        if role == target.input_role:
            return self._at(draw.refresh_step)[target.name]
        random = self._random.factor(role, target, rank, draw)
        return orthonormal(random) * len(random) ** 0.5 if self.orthonormal else random

    def _at(self, refresh_step: int) -> Mapping[str, Tensor]:
        if refresh_step not in self._seen:
            seen = self._store.load(KIND, refresh_step) if self._store is not None else None
            if seen is None:
                seen = self._look(refresh_step)
                if self._store is not None:
                    self._store.save(KIND, refresh_step, seen)
            self._check(seen.factors)
            self._seen[refresh_step], self._calls = seen, self._calls + seen.calls
            for old in sorted(self._seen)[:-_TO_KEEP]:
                del self._seen[old]
        return self._seen[refresh_step].factors

    def _check(self, factors: Mapping[str, Tensor]) -> None:
        for target in self._targets:
            shape = input_size(target), self._ranks[target.name]
            found = factors.get(target.name)
            if found is None or tuple(found.shape) != shape:
                raise RequestError(
                    f"method.basis: what was saved of the inputs of {target.name} is not of the shape {shape}; "
                    "give the folder of this very run, or start it again."
                )

    def _look(self, refresh_step: int) -> CollectedFactors:
        if self._watched is None:
            raise RequestError(
                "method.basis: this basis is computed from data, and was given none; call "
                "optimizer.set_calibration_passes(passes), with a function that runs the model on some training rows, "
                "or set method.basis=gaussian."
            )
        started, (model, passes) = time.perf_counter(), self._watched
        found: dict[str, Tensor] = {}
        made = 0
        for group in groups(self._targets, self._ranks):
            sketches = {target.name: _sketch(target, self._ranks[target.name]) for target in group}
            with recording(model, group, sketches) as calls:
                passes(refresh_step)
            made += calls()
            for name, sketch in sketches.items():
                found[name] = self._leading(name, sketch)
        self._seconds += time.perf_counter() - started
        return CollectedFactors(found, made)

    def _leading(self, name: str, sketch: Sketch) -> Tensor:
        if sketch.count == 0:
            raise RequestError(
                f"method.basis: the forward passes that were to show the inputs of {name} do not call it; "
                "leave it out with method.targets, or set method.basis=gaussian."
            )
        q_IR, moments_R = sketch.leading(self._ranks[name], centred=self.centred)
        if self.weighted:
            real = moments_R[moments_R > 0]
            q_IR = q_IR / moments_R.clamp_min(real.min() if len(real) else 1.0).sqrt()
        return q_IR / q_IR.square().mean().sqrt()

    @property
    def cost(self) -> tuple[int, float]:
        return self._calls, self._seconds

    def state(self) -> dict[str, Tensor]:
        if not self._seen:
            return {}
        factors = {
            f"{refresh_step}/{name}": v for refresh_step, seen in self._seen.items() for name, v in seen.factors.items()
        }
        return factors | {"calls": torch.tensor(self._calls)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        seen: dict[int, dict[str, Tensor]] = {}
        for key, factor in state.items():
            if key == "calls":
                self._calls = max(self._calls, int(factor))  # going back to a better step takes no pass back
                continue
            refresh_step, _, name = key.partition("/")
            seen.setdefault(int(refresh_step), {})[name] = factor.double().cpu()
        for factors in seen.values():
            self._check(factors)
        self._seen = {refresh_step: CollectedFactors(factors, 0) for refresh_step, factors in seen.items()}


def input_size(target: Target) -> int:
    """I, of what a linear layer's weight multiplies."""
    return target.matrix_shape[0 if target.input_role == "u" else 1]


def _sketch(target: Target, rank: int) -> Sketch:
    size = input_size(target)
    return Sketch(size, width(size, rank), target.device, target.state_dtype, target.name)


def groups(targets: Sequence[Target], ranks: Mapping[str, int]) -> Iterator[list[Target]]:
    """The targets in groups whose sketches take `MOST_BYTES` together, or are of one target."""
    group: list[Target] = []
    taken = 0
    for target in targets:
        own = sketch_bytes(input_size(target), ranks[target.name], target.state_dtype)
        if group and taken + own > MOST_BYTES:
            yield group
            group, taken = [], 0
        group.append(target)
        taken += own
    if group:
        yield group


@contextmanager
def recording(
    model: nn.Module, targets: Sequence[Target], sketches: Mapping[str, Sketch]
) -> Iterator[Callable[[], int]]:
    """While open, every input of the targets' modules goes into their sketches, but for padding.

    Padding is what a mask of two dimensions in the model's call says it is. Yields how often the model was called.
    """
    masks: list[Tensor | None] = []
    parameters = list(inspect.signature(model.forward).parameters)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        mask = (dict(zip(parameters, args, strict=False)) | kwargs).get("attention_mask")
        masks.append(mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None)

    def record(sketch: Sketch) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]:
        def take(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            del module
            x = only_input(args, kwargs)
            x_TI, mask = x.detach().reshape(-1, x.shape[-1]), masks[-1] if masks else None
            fits = mask is not None and len(x_TI) == mask.numel()
            sketch.add(x_TI[mask.flatten().to(x_TI.device)] if fits and mask is not None else x_TI)

        return take

    handles = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    for target in targets:
        take = record(sketches[target.name])
        handles += [site.module.register_forward_pre_hook(take, with_kwargs=True) for site in target.sites]
    try:
        yield lambda: len(masks)
    finally:
        for handle in handles:
            handle.remove()
