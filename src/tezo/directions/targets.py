"""The parameters to be tuned, each with the modules that use it."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from tezo.system.errors import RequestError, nearest

Layout = Literal["linear", "like_linear", "transposed", "embedding", "bias", "layer_norm", "norm"]
"""How a module uses a parameter: x W^T ("linear"; "like_linear" where the forward is not torch's), x W (GPT-2's Conv1D,
"transposed"), lookup of rows ("embedding"); a vector added to the output ("bias"), the scale of a LayerNorm, or the
only parameter of another norm ("norm")."""

_LINEAR: tuple[Layout, ...] = ("linear", "like_linear", "transposed")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALL_LINEAR = "all-linear"
ALL = "all"


@dataclass(frozen=True)
class Site:
    """A module that has the parameter; `layout` is None if how its forward uses the parameter is unknown."""

    name: str
    module: nn.Module
    layout: Layout | None


@dataclass(frozen=True)
class Target:
    """A parameter to be tuned, with all modules that have it: more than one if it is tied.

    `name` is that in `model.named_parameters()`, the first one if the parameter is tied.
    """

    name: str
    parameter: nn.Parameter
    sites: tuple[Site, ...]

    @cached_property
    def shape(self) -> torch.Size:
        """Shape of the values; a packed tensor is stored in another shape."""
        for site in self.sites:
            if is_packed(self.parameter) and isinstance(site.module, nn.Linear):
                return torch.Size((site.module.out_features, site.module.in_features))
        return self.parameter.shape

    @property
    def device(self) -> torch.device:
        """Device on which its modules compute; an offloaded tensor is there during their forward only."""
        return place_of(self.sites[0].module, self.parameter) if self.sites else self.parameter.device

    @property
    def is_writable(self) -> bool:
        """Whether it is a plain float tensor; in-place adds to quantised, offloaded, sharded ones fail or are lost."""
        data = self.parameter.data
        return type(data) is Tensor and data.dtype in _FLOATS and data.device.type != "meta"

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions or more; only then does it have low-rank directions."""
        return len(self.shape) >= 2

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, N); leading dimensions of a 3-D (expert) parameter are flattened into M."""
        return int(self.shape[:-1].numel()), int(self.shape[-1])

    @cached_property
    def stored_shape(self) -> torch.Size:
        """(M, N) of a matrix, (M,) of a vector, (1,) of a scalar: the shape that is divided into dense tiles."""
        return torch.Size(self.matrix_shape if self.is_matrix else (self.shape.numel(),))

    @cached_property
    def in_forward(self) -> bool:
        """Whether it can be perturbed in the forward pass: the layout of every module that owns it is known."""
        return len(self.shape) in (1, 2) and all(site.layout is not None for site in self.sites)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of linear layers only."""
        return self.in_forward and all(site.layout in _LINEAR for site in self.sites)

    @property
    def input_role(self) -> Literal["u", "v"] | None:
        """Role of the side that is multiplied by a layer's inputs: "v" (columns) or "u" (rows); None: neither."""
        layouts = {site.layout for site in self.sites}
        if not self.is_linear or len(layouts) > 1:
            return None
        return "u" if layouts == {"transposed"} else "v"

    @property
    def state_dtype(self) -> torch.dtype:
        """Data type of coefficients and moments: float64 for a float64 parameter, else float32."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32

    @property
    def kind(self) -> str:
        """Kind of parameter for display: "linear", "embedding", "vector" or "other"."""
        if not self.is_matrix or not self.in_forward:
            return "other" if self.is_matrix else "vector"
        return "linear" if self.is_linear else "embedding"


def layout_of(module: nn.Module, attribute: str = "weight") -> Layout | None:
    """Returns how a module uses one of its parameters; None if that is unknown.

    A subclass may compute something else, so a module qualifies only if its forward is exactly the known function. A
    Linear with a packed weight is an exception: its forward differs only by the packing. So is a subclass of Linear
    whose overridden forward gives a Linear's output (Falcon's). For an Embedding, the lookup inside the forward is
    perturbed, so subclasses qualify (OPT's positions add an offset before the lookup, Gemma's embeddings multiply by a
    factor after it).
    """
    dimensions = module.get_parameter(attribute).ndim
    packed = isinstance(module, nn.Linear) and is_packed(module.weight)
    if attribute == "bias":
        known = packed or _is(module, nn.Linear, Conv1D, nn.LayerNorm)
        return "bias" if dimensions == 1 and known else None
    if attribute != "weight":
        return None
    if packed:
        return "linear"
    if dimensions == 2:
        if isinstance(module, nn.Embedding):
            return "embedding"
        if _is(module, nn.Linear):
            return "linear"
        return "transposed" if _is(module, Conv1D) else "like_linear" if _computes_as_linear(module) else None
    if dimensions == 1:
        if _is(module, nn.LayerNorm):
            return "layer_norm"
        alone = len(list(module.parameters())) == 1 and not list(module.children())
        return "norm" if alone and type(module).__name__.endswith("Norm") else None
    return None


def _is(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    # MultiheadAttention reads the weight of its NonDynamicallyQuantizableLinear, whose forward never runs
    special = isinstance(module, NonDynamicallyQuantizableLinear)
    return not special and any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


@torch.no_grad()
def _computes_as_linear(module: nn.Module) -> bool:
    """Returns whether the overridden forward of a Linear subclass gives a Linear's output for an input."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return False
    x_1N = torch.linspace(-1, 1, module.in_features, device=module.weight.device).to(module.weight.dtype).unsqueeze(0)
    close = 4 * torch.finfo(x_1N.dtype).eps * module.in_features**0.5  # the rounding of a sum of so many terms
    try:
        given = type(module).forward(module, x_1N)  # without hooks
        expected = functional.linear(x_1N, module.weight, module.bias)
        return bool((given - expected).abs().max() <= close * expected.abs().max())
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it takes or gives something else, or is offloaded
        return False


def is_packed(parameter: Tensor) -> bool:
    """Returns whether a quantiser stores the values in a packed format, which takes no gradient."""
    return not parameter.is_floating_point() or type(parameter.data).__module__.startswith("torchao.")


def find_targets(model: nn.Module) -> list[Target]:
    """Returns every parameter of `model` that is not frozen; a tied parameter is listed once.

    A parameter is frozen if `requires_grad` is False and that of another is True: where no parameter requires a
    gradient, as after PEFT's merge_and_unload, none is frozen. A packed tensor, which cannot require a gradient, is
    frozen if the model has a PEFT adapter; with one, a model without gradients is frozen as a whole.
    """
    adapted = hasattr(model, "peft_config")
    sites: dict[int, list[Site]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            sites.setdefault(id(parameter), []).append(Site(module_name, module, layout_of(module, attribute)))
    found = [Target(name, parameter, tuple(sites[id(parameter)])) for name, parameter in model.named_parameters()]
    free = [t for t in found if t.parameter.requires_grad or (is_packed(t.parameter) and not adapted)]
    return free if free or adapted else found


def frozen_notice(model: nn.Module) -> list[str]:
    """Says that nothing is frozen where no parameter requires a gradient; see `find_targets`."""
    if hasattr(model, "peft_config") or any(p.requires_grad or is_packed(p) for p in model.parameters()):
        return []
    return [
        "no parameter of the model requires a gradient, as after merge_and_unload(), so none is taken for frozen; "
        "requires_grad_(True) on some leaves the others as they are."
    ]


def select_targets(model: nn.Module, patterns: Sequence[str] = (ALL_LINEAR,)) -> list[Target]:
    """Returns the parameters selected by `patterns`, in the model's order.

    Args:
        model: the model. Its frozen parameters are never selected.
        patterns: applied in order. "all-linear" adds the weights of all linear layers except the output head, as in
            PEFT, so that such a run can be exported exactly. "all" adds every parameter, as in the paper. Any other
            pattern adds the parameters that it matches; with a leading "!" it removes them. A pattern without "*" must
            match whole dotted parts of the name: "q_proj" means "*.q_proj.*".

    Raises:
        RequestError: a pattern matches nothing, or no parameter remains.
    """
    available = find_targets(model)
    head = getattr(output_head(model), "weight", None)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {target.name for target in available if _matches(target, pattern.removeprefix("!"), head)}
        if not matched:
            raise _no_match(pattern, available)
        chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    if not chosen:
        raise RequestError(
            f"method.targets: {list(patterns)} leaves no parameter to train; start with 'all-linear' or 'all'."
        )
    return [target for target in available if target.name in chosen]


def output_head(model: Any) -> nn.Module | None:
    """Returns the output head of a model of transformers, if it has one."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _matches(target: Target, pattern: str, head: Tensor | None) -> bool:
    if pattern == ALL_LINEAR:
        return target.is_linear and target.parameter is not head
    if "*" in pattern:
        return fnmatch.fnmatchcase(target.name, pattern)
    return pattern == ALL or f".{pattern}." in f".{target.name}."


def _no_match(pattern: str, available: Sequence[Target]) -> RequestError:
    if not available:
        return RequestError(
            "method.targets: all parameters of this model and of its adapter are frozen; call requires_grad_(True) on "
            "those to be tuned (PeftModel.from_pretrained(..., is_trainable=True))."
        )
    fault = f"method.targets: the pattern {pattern!r} matches no trainable parameter"
    parts = dict.fromkeys(part for target in available for part in target.name.split(".") if not part.isdigit())
    if pattern == ALL_LINEAR:
        return RequestError(
            f"{fault}, since no linear layer is trainable; set it to 'all', or to some of: {', '.join(parts)}."
        )
    return RequestError(f"{fault}. " + nearest(pattern.strip("!*."), [ALL_LINEAR, ALL, *parts]))


def place_of(module: nn.Module, parameter: Tensor) -> torch.device:
    """Returns the device on which a module computes with a parameter, which is stored elsewhere if it is offloaded."""
    hook = getattr(module, "_hf_hook", None)  # accelerate's
    offloaded = parameter.device.type == "meta" and getattr(hook, "execution_device", None) is not None
    return torch.device(hook.execution_device) if hook is not None and offloaded else parameter.device


def device_of(model: nn.Module) -> torch.device:
    """Returns the device on which the module of the model's first parameter computes."""
    return next(place_of(module, p) for module in model.modules() for p in module.parameters(recurse=False))


@torch.no_grad()
def matrix_of(target: Target) -> Tensor:
    """Returns the values of a matrix (M, N): the stored ones, or those of its module's output for the identity."""
    data = target.parameter.data
    if target.is_writable:
        return data.flatten(0, -2)
    if isinstance(data, DTensor):
        return data.full_tensor().flatten(0, -2)
    site = target.sites[0]
    side = target.matrix_shape[0 if site.layout == "transposed" else 1]
    dtype = data.dtype if data.is_floating_point() else torch.float32
    eye = torch.eye(side, device=target.device, dtype=dtype)
    product: Tensor = site.module(eye) - site.module(torch.zeros_like(eye[:1]))
    return product if site.layout == "transposed" else product.T


def never_called(targets: Sequence[Target], run: Callable[[], object]) -> list[Target]:
    """Returns the targets none of whose modules `run()` calls: hooks on these modules cannot perturb the loss."""
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
    """Returns the input of a module with one input, passed by position or by keyword."""
    return args[0] if args else next(iter(kwargs.values()))
