"""Which tensors move, and by which modules a forward pass meets them.

A `Target` is one parameter, found once however often it is tied, with every module that owns it.
`select_targets` picks them by ordered patterns; a pattern that matches nothing is an error.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
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
    def shape(self) -> torch.Size:
        """Of the values; a packed tensor has them in another."""
        for site in self.sites:
            if is_packed(self.parameter) and isinstance(site.module, nn.Linear):
                return torch.Size((site.module.out_features, site.module.in_features))
        return self.parameter.shape

    @property
    def device(self) -> torch.device:
        """Where its modules compute: an offloaded tensor is there during their forward only."""
        module = self.sites[0].module if self.sites else None
        return self.parameter.device if module is None else place_of(module, self.parameter)

    @property
    def is_writable(self) -> bool:
        """Whether it is a plain float tensor; quantised, offloaded and sharded ones refuse or lose an add in place."""
        data = self.parameter.data
        return type(data) is Tensor and data.dtype in _FLOATS and data.device.type != "meta"

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions or more: the low-rank methods move it by factors."""
        return len(self.shape) >= 2

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, N); leading dimensions of a 3-D (expert) parameter are flattened into M."""
        return int(self.shape[:-1].numel()), int(self.shape[-1])

    @property
    def stored_shape(self) -> torch.Size:
        """(M, N) of a matrix, (M,) of a vector, (1,) of a scalar: the shape that dense tiles cut up."""
        return torch.Size(self.matrix_shape if self.is_matrix else (self.shape.numel(),))

    @property
    def in_forward(self) -> bool:
        """Whether every use of it is in a module call whose output is known as a function of it."""
        return len(self.shape) in (1, 2) and all(site.layout is not None for site in self.sites)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of linear layers and of nothing else."""
        return self.in_forward and all(site.layout in ("linear", "transposed") for site in self.sites)

    @property
    def input_role(self) -> Literal["u", "v"] | None:
        """Which side of the matrix meets a layer's inputs: "v", its columns; "u", its rows; None: neither."""
        layouts = {site.layout for site in self.sites}
        if not self.is_linear or len(layouts) > 1:
            return None
        return "u" if layouts == {"transposed"} else "v"

    @property
    def state_dtype(self) -> torch.dtype:
        """Of coefficients and moments: float32, or float64 where the parameter is."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32

    @property
    def kind(self) -> str:
        """For people: linear, embedding, vector, or other."""
        if not self.is_matrix:
            return "vector"
        if not self.in_forward:
            return "other"
        return "linear" if self.is_linear else "embedding"


def layout_of(module: nn.Module, attribute: str = "weight") -> Layout | None:
    """How a module uses one of its parameters; None where it is not of a kind we know.

    A subclass may compute something else, so a module counts only when its forward is the very function that we
    know; a Linear whose weight is packed has a forward of its own for that alone. Of an Embedding the lookup itself
    is perturbed, wherever it happens inside (OPT's positions add an offset before it, Gemma's embeddings a factor
    after it).
    """
    parameter = module.get_parameter(attribute)
    packed = isinstance(module, nn.Linear) and is_packed(module.weight)
    if attribute == "weight" and packed:
        return "linear"
    if attribute == "weight" and parameter.ndim == 2:
        if isinstance(module, nn.Embedding):
            return "embedding"
        return "linear" if _is(module, nn.Linear) else "transposed" if _is(module, Conv1D) else None
    if attribute == "bias" and parameter.ndim == 1 and (packed or _is(module, nn.Linear, Conv1D, nn.LayerNorm)):
        return "bias"
    if attribute == "weight" and parameter.ndim == 1:
        if _is(module, nn.LayerNorm):
            return "layer_norm"
        alone = len(list(module.parameters())) == 1 and not list(module.children())
        return "norm" if alone and type(module).__name__.endswith("Norm") else None
    return None


def _is(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    if isinstance(module, NonDynamicallyQuantizableLinear):  # MultiheadAttention reads its weight and never calls it
        return False
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_packed(parameter: Tensor) -> bool:
    """Whether a quantiser keeps the values in a form of its own, which takes no gradient."""
    return not parameter.is_floating_point() or type(parameter.data).__module__.startswith("torchao.")


def find_targets(model: nn.Module) -> list[Target]:
    """Every parameter of `model` that is not frozen, tied ones once.

    Frozen is what has `requires_grad=False`, and a packed tensor, which cannot have it, under an adapter of PEFT.
    """
    adapted = hasattr(model, "peft_config")
    sites: dict[int, list[Site]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            sites.setdefault(id(parameter), []).append(Site(module_name, module, layout_of(module, attribute)))
    return [
        Target(name, parameter, tuple(sites[id(parameter)]))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or (is_packed(parameter) and not adapted)
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


def place_of(module: nn.Module, parameter: Tensor) -> torch.device:
    """Where a module computes with one of its parameters, which may lie elsewhere meanwhile."""
    hook = getattr(module, "_hf_hook", None)  # accelerate's
    offloaded = parameter.device.type == "meta" and getattr(hook, "execution_device", None) is not None
    return torch.device(hook.execution_device) if hook is not None and offloaded else parameter.device


def device_of(model: nn.Module) -> torch.device:
    """Where the first of the model's weights computes."""
    return next(place_of(module, p) for module in model.modules() for p in module.parameters(recurse=False))


@torch.no_grad()
def matrix_of(target: Target) -> Tensor:
    """The values of a matrix (M, N): what is stored where that can be read, else what its module makes of I."""
    data = target.parameter.data
    if target.is_writable:
        return data.flatten(0, -2)
    if isinstance(data, DTensor):
        return data.full_tensor().flatten(0, -2)
    site = target.sites[0]
    side = target.matrix_shape[0 if site.layout == "transposed" else 1]
    dtype = data.dtype if data.is_floating_point() else torch.float32
    eye = torch.eye(side, device=target.device, dtype=dtype)
    found: Tensor = site.module(eye) - site.module(torch.zeros_like(eye[:1]))
    return found if site.layout == "transposed" else found.T


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


def only_input(args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor:
    """What a module of one input was called with, by position or by name."""
    return args[0] if args else next(iter(kwargs.values()))
