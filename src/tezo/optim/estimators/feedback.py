"""Direct feedback: steps along the error at the last hidden states, combined with zeroth-order steps.

The gradient of a linear layer is G = sum_t delta_t x_t^T, with delta_t the gradient at its output. The output of a
layer that writes the residual stream is a summand of the last hidden states h_t, next to the contributions of later
layers. The error e_t = dL/dh_t therefore replaces delta_t, and is the same for all of these layers (direct feedback
alignment, Nokland 2016, with the identity instead of its random matrices):

    G ~ sum_t e_t x_t^T.

e_t needs backpropagation through the readout of h_t only, a mean and a cosine or the output head; the layers run as in
inference. For W_t = W_0 + A V^T, with V the leading directions of the layer's inputs, a step is Adam on

    g = sum_t e_t (V^T x_t)^T,   M x r,

for which V^T x_t is stored for each layer, r numbers per position. One forward pass gives the whole g, whereas two
passes give one number kappa, so early steps make fast progress. But g is biased, because it ignores the later layers.
Once the bias dominates, feedback steps make no progress; zeroth-order steps, which are unbiased, continue from there.

Which layers write the residual stream is measured in two passes. The outputs y_l of K layers are perturbed together by
independent noise, y_l + rho_l n_l. With d the resulting change of h,

    alpha_l = <d, n_l> / (rho_l |n_l|^2)

estimates the mean of the diagonal of dh/dy_l: the fraction of a layer's output that reaches h unchanged. If the output
is added to the residual stream, this is 1, times the scale of later norms. If an attention or a matrix product follows
first, it is close to 0. If d were independent of n_l, <d, n_l> would be normal with standard deviation |d|. A layer is
accepted if <d, n_l> is at least `DEVIATIONS` standard deviations and alpha_l at least `SHARE` of the largest alpha.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import FactorStore, Role, StoredTensors
from tezo.directions.products import evaluation_mode
from tezo.directions.random import fill_normal_
from tezo.directions.spaces import LowRank, Tile
from tezo.directions.targets import Target, only_input
from tezo.forward.interception import untraced
from tezo.forward.perturbed_parameter import PerturbedParameter
from tezo.optim.closures import Closure, Losses
from tezo.optim.estimators.estimate import FEEDBACK, Estimate, Estimator, ParameterEstimate, StepDraw, StepRecord
from tezo.system.errors import RequestError

PASSES = 2
"""Forward passes that find the layers."""
SIZE = 0.05
"""Standard deviation of the noise, as a fraction of the root mean square of a layer's output."""
DEVIATIONS = 5.0
"""Required significance in standard deviations: one false acceptance in three million layers."""
SHARE = 0.05
"""Smallest accepted fraction of the largest alpha: below it the contribution is significant but negligible."""

Tap = tuple[Sequence[nn.Module], Callable[[Tensor], Tensor]]
"""Modules, and the function of the inputs (..., N) whose result is stored for each of their calls."""


@torch.no_grad()
def residual_writers(
    model: nn.Module, targets: Sequence[Target], run: Callable[[], object], seed: int
) -> tuple[nn.Module, list[Target]]:
    """Returns (base model, the subset of `targets` that writes its residual stream), in two forward passes.

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

    def measure(name: str, output: Tensor) -> Tensor:
        outputs[name].append((output.numel(), float(output.float().square().mean().sqrt())))
        return output

    with _outputs(linear, measure):
        base, plain = last_hidden(model, run)
    sizes = [hidden.numel() for hidden in plain]
    linear = [target for target in linear if [numel for numel, _ in outputs[target.name]] == sizes]
    scale = {target.name: SIZE * max(rms for _, rms in outputs[target.name]) for target in linear}
    calls = dict.fromkeys(scale, 0)

    def perturb(name: str, output: Tensor) -> Tensor:
        calls[name] += 1
        return output + (scale[name] * _noise(output, seed, name, calls[name] - 1)).to(output.dtype)

    with _outputs(linear, perturb):
        _, perturbed = last_hidden(model, run)
    change = [after.double() - before.double() for before, after in zip(plain, perturbed, strict=True)]
    alphas = {name: _alpha(change, scale[name], seed, name) for name in scale}
    least = SHARE * max([alpha for alpha, _ in alphas.values()], default=0.0)
    return base, [t for t in linear if alphas[t.name][1] >= DEVIATIONS and alphas[t.name][0] >= least]


def _alpha(change: Sequence[Tensor], scale: float, seed: int, name: str) -> tuple[float, float]:
    """(alpha, <d, n> / |d|) of a layer; the second number is the significance in standard deviations."""
    along = noise_sq = 0.0
    for call, d in enumerate(change):
        n = _noise(d, seed, name, call).double()
        along, noise_sq = along + float((d * n).sum()), noise_sq + float(n.square().sum())
    length = sum(float(d.square().sum()) for d in change) ** 0.5
    return (along / (scale * noise_sq), along / length) if scale and length else (0.0, 0.0)


def _noise(like: Tensor, seed: int, name: str, call: int) -> Tensor:
    """The noise for one call of a layer: standard normal, float32, in the shape of the output `like`."""
    n_TD = torch.empty((like.numel() // like.shape[-1], like.shape[-1]), dtype=torch.float32, device=like.device)
    return fill_normal_(n_TD, seed=seed, step=call, name=name, role="writers").view(like.shape)


@contextmanager
def _outputs(targets: Sequence[Target], change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Context in which each output of the targets' layers is replaced by `change(name, output)`."""

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda _module, _args, output: change(name, output)

    with ExitStack() as hooks:
        for target in targets:
            for site in target.sites:
                hooks.enter_context(site.module.register_forward_hook(untraced(hook(target.name))))
        yield


def last_hidden(model: nn.Module, run: Callable[[], object]) -> tuple[nn.Module, list[Tensor]]:
    """Returns (base model, its last hidden states (B, L, D) for each call made by `run`).

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

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(untraced(note)))
        run()
    if not outputs:
        raise RequestError(
            f"a feedback step needs a transformers model that returns its last hidden states, and no part of "
            f"{type(model).__name__} does; set train.feedback_first=0 and train.feedback_last=0."
        )
    base = outputs[-1][0]
    return base, [hidden for module, hidden in outputs if module is base]


@dataclass
class BaseCall:
    """A call of the base model.

    Attributes:
        kept: name -> the results of its tap, one for each call of its modules.
        leaf: the last hidden states (B, L, D), the leaf of the autograd graph.
    """

    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    leaf: Tensor | None = None


def last_errors(
    base: nn.Module, closure: Closure, taps: Mapping[str, Tap]
) -> tuple[Tensor, list[tuple[dict[str, list[Tensor]], Tensor]]]:
    """Returns (L, [(tap results by name, e (B, L, D)), ...] for each call of `base` that affects L).

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
        summands = closure.summands() if isinstance(closure, Losses) else [torch.as_tensor(closure()).mean()]
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

    with ExitStack() as hooks:
        hooks.enter_context(base.register_forward_pre_hook(untraced(enter)))
        hooks.enter_context(base.register_forward_hook(untraced(leave)))
        for name, (modules, keep) in taps.items():
            hook = untraced(tap(name, keep))
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield calls


@dataclass(frozen=True)
class FeedbackEstimate(ParameterEstimate):
    """An estimate that is given by its coefficient instead of by projected gradients."""

    coefficient: Tensor

    def tiles(self) -> Iterator[Tile]:
        yield slice(None), self.coefficient


class DirectFeedback(Estimator):
    """The estimate g = sum_t e_t (V^T x_t)^T for the tuned layers that write the residual stream.

    Consecutive steps by this rule are a phase. The first step of a phase finds the layers, with two additional forward
    passes. Where it finds none, as in a model whose layers have grown far apart in size, it takes those that `check`
    found at the start. The loss must be a tensor that is differentiable with respect to the last hidden states.

    Args:
        fixed_sides: target -> roles of its fixed factors; a layer qualifies if only its input side is fixed.
    """

    rule = FEEDBACK

    def __init__(self, fixed_sides: Callable[[Target], tuple[Role, ...]]) -> None:
        self._fixed_sides = fixed_sides
        self._store: FactorStore | None = None
        self._writers: tuple[nn.Module, list[Target]] | None = None
        self._resumed: Sequence[str] = ()
        self._at_start: list[Target] = []

    def prepare(self, model: nn.Module, parameters: Mapping[str, PerturbedParameter], seed: int) -> None:
        self._model, self._seed = model, seed
        self._targets = {name: parameter.target for name, parameter in parameters.items()}

    def set_factor_store(self, store: FactorStore) -> None:
        self._store = store

    def resume(self, names: Sequence[str]) -> None:
        self._writers, self._resumed = None, names

    def check(self, closure: Closure) -> None:
        with evaluation_mode(self._model):
            base, self._at_start = self._find_writers(closure)
            last_errors(base, closure, {})  # a loss may depend on more than the last hidden states, or on none of them

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        with evaluation_mode(self._model):
            if draw.count == 0:
                self._writers = self._find_writers(closure)
            elif self._writers is None:  # the phase began in an earlier process
                known = [target for name, target in self._targets.items() if name in self._resumed]
                self._writers = last_hidden(self._model, closure)[0], known
            base, writers = self._writers
            loss, errors = last_errors(base, closure, {target.name: _tap(target, draw) for target in writers})
        coefficients = {target.name: _gradient(target, errors) for target in writers}
        if not all(math.isfinite(x) for x in (float(loss), *(float(g.abs().max()) for g in coefficients.values()))):
            raise FloatingPointError(float(loss))
        stored = StoredTensors(coefficients, self.passes(0, first=draw.count == 0))
        if self._store is not None:
            self._store.save(self.rule, draw.step, stored)
        return self._estimate(float(loss), stored, draw)

    def passes(self, directions: int, *, first: bool) -> int:
        del directions
        return 1 + PASSES * first

    def recall(self, record: StepRecord, draw: StepDraw) -> Estimate:
        stored = self._store.load(self.rule, record.step) if self._store is not None else None
        if stored is None:
            raise RequestError(
                f"the saved gradient of feedback step {record.step} is missing; restore its file, or stop before it."
            )
        self.resume(list(stored.tensors))
        return self._estimate(record.loss, stored, draw)

    def _estimate(self, loss: float, stored: StoredTensors, draw: StepDraw) -> Estimate:
        gradients = {}
        for name, g in stored.tensors.items():
            placed = g.to(self._targets[name].device, self._targets[name].state_dtype)
            gradients[name] = FeedbackEstimate(draw.directions[name], (), draw.count, placed)
        return Estimate(loss, gradients, stored.passes)

    def _find_writers(self, closure: Closure) -> tuple[nn.Module, list[Target]]:
        candidates = [t for t in self._targets.values() if t.is_matrix and self._fixed_sides(t) == (t.input_role,)]
        base, writers = residual_writers(self._model, candidates, closure, self._seed)
        writers = writers or self._at_start
        if not writers:
            raise RequestError(
                "a feedback step found no tuned layer whose output is added to the residual stream; tune such layers "
                "with method.targets, or set train.feedback_first=0 and train.feedback_last=0."
            )
        return base, writers


def _tap(target: Target, draw: StepDraw) -> Tap:
    """The tap that stores V^T x of every input x of the target's modules."""
    direction = draw.directions[target.name][0]
    assert isinstance(direction, LowRank)
    return [site.module for site in target.sites], lambda x: x @ direction.v_NR.to(x.device, x.dtype)


def _gradient(target: Target, errors: Sequence[tuple[dict[str, list[Tensor]], Tensor]]) -> Tensor:
    """sum_t e_t (V^T x_t)^T: (M, r), in the target's state dtype."""
    dtype = target.state_dtype
    parts = [
        e.reshape(-1, e.shape[-1]).to(dtype).T @ h.reshape(-1, h.shape[-1]).to(e.device, dtype)
        for kept, e in errors
        for h in kept[target.name]
    ]
    return torch.stack(parts).sum(0)
