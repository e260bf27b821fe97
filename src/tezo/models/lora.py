"""Exact LoRA adapters: made from an optimizer, saved, loaded, attached and merged.

For `tezo`, `tezo-m` and `tezo-cadam` on linear layers, W_t = W_0 + U diag(c) V^T is a LoRA of rank r:

    B = U sign(c) sqrt|c|  (M x r),   A = (V sqrt|c|)^T  (r x N),   W_t = W_0 + B A.

The file has PEFT's format: float32, every layer padded with zeros to one rank R that vLLM takes, and lora_alpha = R,
so that the scale is 1. PEFT, vLLM and llama.cpp all read a uniform rank correctly (vLLM ignores rank patterns).
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from tezo.directions.targets import Site, Target, layout_of, only_input, place_of
from tezo.forward.beside_weight import join
from tezo.forward.state_dict import InStateDict, require_plain
from tezo.models.identity import check_model, fingerprint
from tezo.models.kinds import Kind, kind_of
from tezo.models.stored import files_of
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.system.errors import RequestError
from tezo.system.files import own_object, plain_file, read_object
from tezo.system.progress import MERGING, current

ALLOWED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for `max_lora_rank`; it keeps memory for that rank whatever the adapter's is."""
BASE = "base.json"
"""File in the folder of an adapter with the fingerprint of its base model."""
TASK_TYPES: dict[Kind | None, str] = {"causal": "CAUSAL_LM", "encoder": "FEATURE_EXTRACTION"}
"""PEFT's types; it would save a classifier's head whole, beside the change of the head that the adapter has."""
_PREFIX = "base_model.model."
_LINEAR = ("linear", "transposed", "like_linear")
"""Layouts of layers that can have an adapter."""

Handle = RemovableHandle | InStateDict


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of uniform rank and scale 1.

    Attributes:
        rank: R; `for_file` raises it to one that vLLM takes.
        pairs: module name -> (A_RI, B_OR), float32; x A^T B^T is added to the module's output, for x with I columns.
    """

    rank: int
    pairs: dict[str, tuple[Tensor, Tensor]]


def make_adapter(optimizer: BaseOptimizer) -> Adapter:
    """Returns the adapter that equals the change an optimizer has trained; `RequestError` if there is none."""
    reason = optimizer.why_no_adapter()
    if reason is not None:
        raise RequestError(f"there is no exact adapter, because {reason}; export the merged model.")
    changes, pairs = optimizer.low_rank_changes(), {}
    rank = max(max(change.rank, sum(left.shape[1] for left, _ in change.parts)) for change in changes)
    for change in changes:
        rows, columns = change.target.matrix_shape
        left_MR, right_NR = torch.zeros(rows, rank), torch.zeros(columns, rank)
        if change.parts:
            left, right = (factor.cpu() for factor in join(change.parts, torch.float32))
            left_MR[:, : left.shape[1]], right_NR[:, : right.shape[1]] = left, right
        site = change.target.sites[0]
        if site.layout == "transposed":  # Conv1D: x W, with W = left right^T
            left_MR, right_NR = right_NR, left_MR
        pairs[site.name] = right_NR.T.contiguous(), left_MR.contiguous()
    return Adapter(rank, pairs)


def next_allowed(rank: int) -> int:
    """Returns the smallest of `ALLOWED_RANKS` that is not below `rank`; `rank` itself above the largest."""
    return next((allowed for allowed in ALLOWED_RANKS if allowed >= rank), rank)


def for_file(adapter: Adapter) -> Adapter:
    """Returns the same change at the rank that the file has: A gets rows of zeros, and B columns."""
    rank = next_allowed(adapter.rank)
    more = rank - adapter.rank
    return Adapter(
        rank, {name: (pad(a_RI, (0, 0, 0, more)), pad(b_OR, (0, more))) for name, (a_RI, b_OR) in adapter.pairs.items()}
    )


def save_adapter(adapter: Adapter, folder: Path, *, model: Any, base: str) -> None:
    """Writes adapter_model.safetensors and adapter_config.json in PEFT's format, at the rank of `for_file`.

    The folder is created if needed. `base` is the name of the base model, for adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapter = for_file(adapter)
    tensors = {
        f"{_PREFIX}{name}.lora_{half}.weight": tensor
        for name, pair in adapter.pairs.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(kind_of([type(model).__name__])),
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": all(layout_of(model.get_submodule(name)) == "transposed" for name in adapter.pairs),
        "target_modules": target_modules(model, set(adapter.pairs)),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def target_modules(model: nn.Module, names: set[str]) -> list[str]:
    """Returns PEFT's target_modules: last parts of names if they select exactly `names`, otherwise the full names."""
    suffixes = {name.rpartition(".")[2] for name in names}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes if meant == names else names)


def check_base(folder: Path, model: Any) -> None:
    """Raises a `RequestError` if the base model of an adapter is another one; an adapter that does not say fits any.

    Weights are compared where the model has the data type that the base had; in another one, its file is compared,
    where its name leads to one. Offloaded models are not compared at all.
    """
    kind = kind_of([type(model).__name__])
    offloaded = any(weight.is_meta for weight in model.parameters())
    if not os.path.lexists(folder / BASE) or kind is None or not hasattr(model, "config") or offloaded:
        return
    found = own_object(folder / BASE, "put an intact copy in its place")
    loaded = fingerprint(model, kind)
    if found.get("form") != loaded["form"]:
        loaded = fingerprint(model, kind, stored=files_of(getattr(model, "name_or_path", "")).digest(), in_memory=False)
    try:
        check_model(found, loaded)
    except RequestError as error:
        said = str(error).removeprefix("model.name: ")
        raise RequestError(f"model: {said} Without {BASE} in {folder} the adapter is attached all the same.") from None


_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config",
        "task_type", "fan_in_fan_out", "lora_dropout", "eva_config", "megatron_core", "qalora_group_size",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    }
)  # fmt: skip
"""Settings of PEFT that change nothing of an adapter whose factors are read: they say what it was made of, how it was
trained, or which layers it has, which its tensors say too."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # not those that take something off the base weights first
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Setting of PEFT -> the values with which PEFT adds the product of the two factors, and nothing else."""


def _check_computes_alike(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises a `RequestError` where PEFT adds something else than B A; the setting is named."""
    rank, alpha = config["r"], config["lora_alpha"]
    faults = [] if rank == alpha else [f"lora_alpha is {alpha!r:.40} and r {rank!r:.40}"]
    for key in sorted((config.keys() | {"peft_type"}) - _WITHOUT_EFFECT - {"r", "lora_alpha"}):
        value = config[key]
        if value not in _ALLOWED[key] if key in _ALLOWED else value:
            faults.append(f"{key} is {value!r:.40}")
    if faults:
        raise RequestError(
            f"{folder} is not an adapter of this library, which adds B A to linear layers, and nothing else: in its "
            f"adapter_config.json {faults[0]}. Use peft to load it."
        )


def load_adapter(folder: Path) -> Adapter:
    """Reads an adapter that `save_adapter` wrote, or one of PEFT that computes the same.

    Raises:
        RequestError: a file is missing or damaged, or PEFT would not add exactly the product of the factors; a setting
            that is not known here counts as such, unless it is empty or False.
    """
    try:
        config = read_object(folder / "adapter_config.json")
        _check_computes_alike(folder, config)
        tensors = load_file(plain_file(folder / "adapter_model.safetensors"))
        rank, pairs = int(config["r"]), {}
        for key in tensors:
            if not re.search(r"\.lora_[AB]\.weight$", key):
                raise RequestError(
                    f"{folder} is not an adapter of this library: it has {key:.200}. Use peft to load it."
                )
        for layer in sorted({re.sub(r"\.lora_[AB]\.weight$", "", key) for key in tensors}):
            a_RI, b_OR = (tensors[f"{layer}.lora_{half}.weight"] for half in "AB")
            if a_RI.ndim != 2 or b_OR.ndim != 2 or a_RI.shape[0] != rank or b_OR.shape[1] != rank:
                raise ValueError(f"{layer} does not have the shapes of rank {rank}")
            pairs[layer.removeprefix(_PREFIX)] = a_RI, b_OR
        return Adapter(rank, pairs)
    except RequestError:
        raise
    except (OSError, ValueError, KeyError, TypeError, OverflowError, SafetensorError) as error:
        raise RequestError(f"{folder} is not an adapter that can be read ({error}); export the run again.") from None


_attached: WeakKeyDictionary[Any, nn.Parameter] = WeakKeyDictionary()
"""Hook -> the weight of its module; a hook that is removed drops out by itself."""


def attach_adapter(model: nn.Module, adapter: Adapter) -> list[Handle]:
    """Adds the adapter in the forward pass with the same arithmetic as in training; the weights are only read.

    Returns the handles of the hooks. Raises `RequestError` if a module is missing, is not linear or has another shape.
    """
    handles: list[Handle] = []
    for name, (a_RI, b_OR) in adapter.pairs.items():
        try:
            module = model.get_submodule(name)
            weight, layout = module.get_parameter("weight"), layout_of(module)
        except AttributeError:
            raise RequestError(
                f"the adapter has a layer {name}, which this model lacks; give the base model that it was trained on."
            ) from None
        if layout not in _LINEAR:
            raise RequestError(
                f"the adapter has a layer {name}, which is not a linear layer of this model; give the base model that "
                "it was trained on."
            )
        shape = (b_OR.shape[0], a_RI.shape[1]) if layout != "transposed" else (a_RI.shape[1], b_OR.shape[0])
        if weight.is_floating_point() and tuple(weight.shape) != shape:
            raise RequestError(
                f"the adapter's {name} is for a weight of shape {shape}, but this model's has {tuple(weight.shape)}; "
                "give the base model that it was trained on."
            )
        dtype, place = weight.dtype if weight.is_floating_point() else torch.float32, place_of(module, weight)
        pair = a_RI.to(place, dtype), b_OR.to(place, dtype)
        term = partial(_add_term, *pair)
        _attached[term] = weight
        handles.append(module.register_forward_hook(term, with_kwargs=True))
        target = Target(f"{name}.weight", weight, (Site(name, module, layout),))
        handles.append(InStateDict(target, partial(_stored, target, *pair), _refuse_loading))
    return handles


def _add_term(a_RI: Tensor, b_OR: Tensor, _: object, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
    """Is the forward hook of a layer with an adapter."""
    return output + ((only_input(args, kwargs).to(a_RI.dtype) @ a_RI.T) @ b_OR.T).to(output.dtype)


@torch.no_grad()
def _stored(target: Target, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    require_plain(target)
    return _merged(target.sites[0].module, a_RI, b_OR).to(target.parameter.dtype)


def _refuse_loading() -> None:
    raise RequestError(
        "load_state_dict: the model has an adapter attached, which would be added to what is loaded; take it off first "
        "(remove() of each handle, or close() of its run)."
    )


def attached_to(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns module name -> (A_RI, B_OR) of what `attach_adapter` has attached to a model and is still attached."""
    terms = {id(weight): term.args for term, weight in _attached.items()}
    names = {name: id(getattr(module, "weight", None)) for name, module in model.named_modules()} if terms else {}
    return {name: terms[weight] for name, weight in names.items() if weight in terms}


def has_adapter(model: nn.Module) -> bool:
    """Returns whether `attach_adapter` has attached an adapter to the model that is still attached."""
    return bool(attached_to(model))


_left: WeakKeyDictionary[nn.Module, tuple[Sequence[Handle], Adapter]] = WeakKeyDictionary()
"""Model -> the adapter that is attached to it and that nobody can take off any more, and its handles."""


def leave_attached(model: Callable[[], nn.Module | None], handles: Sequence[Handle], adapter: Adapter) -> None:
    """Notes that nobody can take off an attached adapter any more; `settle_adapter` does."""
    found = model()
    if found is not None:
        _left[found] = handles, adapter


def settle_adapter(model: nn.Module, *, keep: bool) -> bool:
    """Takes off what was left attached to a model; returns whether there was an adapter that was kept, in the weights.

    Raises:
        RequestError: an adapter is to be kept, and the weights are packed.
    """
    if model not in _left:
        return False
    if keep and getattr(model, "is_quantized", False):  # set by transformers
        raise RequestError(
            "model has an adapter attached by a run that is gone, and packed weights, which cannot take it; load the "
            "model again."
        )
    handles, adapter = _left.pop(model)
    for handle in handles:
        handle.remove()
    if keep:
        merge_adapter(model, adapter)
    return keep


@torch.no_grad()
def merge_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Adds the adapter to the weights of a model in floating point, in place."""
    with current().phase(MERGING):
        for name, pair in adapter.pairs.items():
            module = model.get_submodule(name)
            module.get_parameter("weight").copy_(_merged(module, *pair))


def _merged(module: nn.Module, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """The weight with a layer's change added, in float32 or wider."""
    weight = module.get_parameter("weight")
    change = (b_OR @ a_RI).to(weight.device)
    change = change.T if layout_of(module) == "transposed" else change
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + change


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Saves the whole model with transformers: safetensors, configuration, tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
