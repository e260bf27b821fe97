"""Which tensors move, and by which modules a forward pass meets them.

A `Target` is one parameter, found once however often it is tied, with every module that owns it.
`select_targets` picks them by ordered patterns; a pattern that matches nothing is an error.
"""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tezo.errors import RequestError, nearest

Layout = Literal["linear", "transposed", "embedding", "bias", "layer_norm", "norm"]
"""How a module uses a parameter: as a matrix in x W^T, in x W (GPT-2's Conv1D), or by rows; as a vector that is
added to its output, that scales a LayerNorm, or that is the only parameter of another norm."""

ALL_LINEAR = "all-linear"
ALL = "all"


@dataclass(frozen=True)
class Site:
    """A module that owns the parameter; `layout` is None where its forward is not one we know."""

    name: str
    module: nn.Module
    layout: Layout | None


@dataclass(frozen=True)
class Target:
    """A parameter to be tuned.

    Attributes:
        name: as `model.named_parameters()` gives it (the first of its names, when tied).
        parameter: the tensor itself.
        sites: every module that owns it; more than one when it is tied.
    """

    name: str
    parameter: nn.Parameter
    sites: tuple[Site, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions or more: the low-rank methods move it by factors."""
        return self.parameter.ndim >= 2

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, N); leading dimensions of a 3-D (expert) parameter are flattened into M."""
        shape = self.parameter.shape
        return int(shape[:-1].numel()), int(shape[-1])

    @property
    def stored_shape(self) -> torch.Size:
        """(M, N) of a matrix, (M,) of a vector, (1,) of a scalar: the shape that dense tiles cut up."""
        return torch.Size(self.matrix_shape if self.is_matrix else (self.parameter.numel(),))

    @property
    def in_forward(self) -> bool:
        """Whether every use of it is in a module call whose output is known as a function of it."""
        return self.parameter.ndim in (1, 2) and all(site.layout is not None for site in self.sites)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of linear layers and of nothing else."""
        return self.in_forward and all(site.layout in ("linear", "transposed") for site in self.sites)

    @property
    def state_dtype(self) -> torch.dtype:
        """Of coefficients and moments: float32, or float64 where the parameter is."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32

    @property
    def kind(self) -> str:
        """For people: linear, embedding, vector, or other."""
        if self.parameter.ndim < 2:
            return "vector"
        if not self.in_forward:
            return "other"
        return "linear" if self.is_linear else "embedding"


def layout_of(module: nn.Module, attribute: str = "weight") -> Layout | None:
    """How a module uses one of its parameters; None where it is not of a kind we know.

    A subclass may compute something else, so a module counts only when its forward is the very function that we
    know. Of an Embedding the lookup itself is perturbed, wherever it happens inside (OPT's positions add an offset
    before it, Gemma's embeddings a factor after it).
    """
    parameter = module.get_parameter(attribute)
    if attribute == "weight" and parameter.ndim == 2:
        if isinstance(module, nn.Embedding):
            return "embedding"
        return "linear" if _is(module, nn.Linear) else "transposed" if _is(module, Conv1D) else None
    if attribute == "bias" and parameter.ndim == 1 and _is(module, nn.Linear, Conv1D, nn.LayerNorm):
        return "bias"
    if attribute == "weight" and parameter.ndim == 1:
        if _is(module, nn.LayerNorm):
            return "layer_norm"
        alone = len(list(module.parameters())) == 1 and not list(module.children())
        return "norm" if alone and type(module).__name__.endswith("Norm") else None
    return None


def _is(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def find_targets(model: nn.Module) -> list[Target]:
    """Every parameter of `model` that is not frozen (`requires_grad=False`), tied ones once."""
    sites: dict[int, list[Site]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            sites.setdefault(id(parameter), []).append(Site(module_name, module, layout_of(module, attribute)))
    return [
        Target(name, parameter, tuple(sites[id(parameter)]))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def select_targets(model: nn.Module, patterns: Sequence[str] = (ALL_LINEAR,)) -> list[Target]:
    """The parameters that `patterns` choose, in the model's order.

    Args:
        model: whose parameters are meant. Frozen ones are never chosen.
        patterns: applied in order. "all-linear" adds the weights of all linear layers but the output
            head (PEFT's meaning of the word: such a run exports exactly); "all" adds every parameter, as
            the paper does; anything else adds the parameters it matches, and with a leading "!" takes
            them away. A pattern without "*" is looked for as a dotted part of the name: "q_proj" means
            "*.q_proj.*".

    Raises:
        RequestError: a pattern matches nothing, or nothing is left.
    """
    available = find_targets(model)
    head = _output_head(model)
    chosen: dict[str, Target] = {}
    for pattern in patterns:
        negative, glob = pattern.startswith("!"), pattern.removeprefix("!")
        matched = [target for target in available if _matches(target, glob, head)]
        if not matched:
            parts = dict.fromkeys(part for target in available for part in target.name.split("."))
            raise RequestError(
                f"method.targets: the pattern {pattern!r} matches no trainable parameter. "
                + nearest(glob.strip("*."), [ALL_LINEAR, ALL, *(p for p in parts if not p.isdigit())])
            )
        for target in matched:
            if negative:
                chosen.pop(target.name, None)
            else:
                chosen[target.name] = target
    if not chosen:
        raise RequestError(
            f"method.targets: {list(patterns)} leaves no parameter to train; start with 'all-linear' or 'all'."
        )
    return [target for target in available if target.name in chosen]


def _matches(target: Target, glob: str, head: Tensor | None) -> bool:
    if glob == ALL:
        return True
    if glob == ALL_LINEAR:
        return target.is_linear and target.parameter is not head
    if "*" not in glob:
        return f".{glob}." in f".{target.name}."
    return fnmatch.fnmatchcase(target.name, glob)


def _output_head(model: nn.Module) -> Tensor | None:
    get_head: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return getattr(head, "weight", None)


def never_called(targets: Sequence[Target], run: Callable[[], object]) -> list[Target]:
    """The targets none of whose modules `run()` calls: no loss can depend on them through a hook."""
    called: set[int] = set()
    handles = [
        site.module.register_forward_hook(lambda module, *_: called.add(id(module)))
        for target in targets
        for site in target.sites
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [t for t in targets if not any(id(site.module) in called for site in t.sites)]
