"""Exact LoRA adapters: made from an optimizer, saved, loaded, attached and merged.

For `tezo`, `tezo-m` and `tezo-cadam` on linear layers, W_t = W_0 + U diag(c) V^T is a LoRA of rank r:

    B = U sign(c) sqrt|c|  (M x r),   A = (V sqrt|c|)^T  (r x N),   W_t = W_0 + B A.

The file has PEFT's format: float32, every layer padded with zeros to one rank R that vLLM takes, and lora_alpha = R,
so that the scale is 1. PEFT, vLLM and llama.cpp all read a uniform rank correctly (vLLM ignores rank patterns).

The rank that an adapter has in its file: the next that vLLM takes.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.directions.targets import Site, Target, layout_of, only_input, place_of
from tezo.forward.low_rank import join
from tezo.forward.perturbed_parameter import InStateDict, require_plain
from tezo.models.identity import Fingerprint, check_model, fingerprint
from tezo.models.kinds import Kind, kind_of
from tezo.optim.tuner import LowRankChange, Tuner
from tezo.system.errors import RequestError
from tezo.system.files import own_object, plain_file, read_object, write_file

_PREFIX = "base_model.model."
BASE = "base.json"
"""File in the folder of an adapter with the fingerprint of its base model."""
TASK_TYPES: dict[Kind | None, str] = {"causal": "CAUSAL_LM", "encoder": "FEATURE_EXTRACTION"}
"""PEFT's types; it would save a classifier's head whole, beside the change of the head that the adapter has."""

Handle = RemovableHandle | InStateDict
"""Has `remove()`."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of uniform rank and scale 1.

    Attributes:
        rank: R; `for_file` raises it to one that vLLM takes.
        pairs: module name -> (A_RI, B_OR), float32; x A^T B^T is added to the module's output, for x with I columns.
    """

    rank: int
    pairs: dict[str, tuple[Tensor, Tensor]]


def make_adapter(optimizer: Tuner) -> Adapter:
    """The adapter that equals the change an optimizer has trained; `RequestError` if there is none."""
    reason = optimizer.why_no_adapter()
    if reason is not None:
        raise RequestError(f"there is no exact adapter, because {reason}; export the merged model.")
    changes = optimizer.low_rank_changes()
    rank = max(max(change.rank, sum(left.shape[1] for left, _ in change.parts)) for change in changes)
    return Adapter(rank, {change.target.sites[0].name: _pair(change, rank) for change in changes})


def for_file(adapter: Adapter) -> Adapter:
    """The same change at the rank that the file has."""
    rank = next_allowed(adapter.rank)
    return Adapter(rank, {name: padded(pair, rank) for name, pair in adapter.pairs.items()})


def _pair(change: LowRankChange, rank: int) -> tuple[Tensor, Tensor]:
    rows, columns = change.target.matrix_shape
    left_MR, right_NR = torch.zeros(rows, rank), torch.zeros(columns, rank)
    if change.parts:
        left, right = (factor.cpu() for factor in join(change.parts, torch.float32))
        left_MR[:, : left.shape[1]], right_NR[:, : right.shape[1]] = left, right
    if change.target.sites[0].layout == "transposed":  # Conv1D: x W, with W = left right^T
        left_MR, right_NR = right_NR, left_MR
    return right_NR.T.contiguous(), left_MR.contiguous()


def save_adapter(adapter: Adapter, folder: Path, *, model: Any, base: str) -> None:
    """Writes adapter_model.safetensors and adapter_config.json in PEFT's format, at the rank of `for_file`.

    Args:
        adapter: the adapter.
        folder: folder to write into; it is created if needed.
        model: the model whose modules the adapter names.
        base: name of the base model, for adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapter, tensors = for_file(adapter), {}
    for name, (a_RI, b_OR) in adapter.pairs.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a_RI
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b_OR
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    transposed = {layout_of(model.get_submodule(name)) == "transposed" for name in adapter.pairs}
    config = {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(kind_of([type(model).__name__])),
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed == {True},
        "target_modules": target_modules(model, set(adapter.pairs)),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_base(folder: Path, base: Fingerprint) -> None:
    """Writes into the folder of an adapter what its base model is, if that is known."""
    if base:
        write_file(folder / BASE, (json.dumps(dict(base), indent=2, sort_keys=True) + "\n").encode())


def check_base(folder: Path, model: Any) -> None:
    """Raises a `RequestError` if the base model of an adapter is another one; an adapter that does not say fits any.

    Args:
        folder: of the adapter.
        model: a model of torch, in the data type in which it was loaded; in another one its weights are not compared,
            and nothing is of one whose weights are offloaded.
    """
    kind = kind_of([type(model).__name__])
    offloaded = any(weight.is_meta for weight in model.parameters())
    if not os.path.lexists(folder / BASE) or kind is None or not hasattr(model, "config") or offloaded:
        return
    found = own_object(folder / BASE, "put an intact copy in its place")
    try:
        check_model(found, fingerprint(model, kind))
    except RequestError as error:
        said = str(error).removeprefix("model.name: ")
        raise RequestError(f"model: {said} Without {BASE} in {folder} the adapter is attached all the same.") from None


def target_modules(model: nn.Module, names: set[str]) -> list[str]:
    """PEFT's target_modules: last name parts if they select exactly the modules `names`, otherwise the full names."""
    suffixes = {name.rpartition(".")[2] for name in names}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes if meant == names else names)


def load_adapter(folder: Path) -> Adapter:
    """Reads an adapter that `save_adapter` wrote.

    Raises:
        RequestError: a file is missing or damaged, or the adapter is of another kind.
    """
    try:
        config = read_object(folder / "adapter_config.json")
        tensors = load_file(plain_file(folder / "adapter_model.safetensors"))
        if config["peft_type"] != "LORA" or config["r"] != config["lora_alpha"]:
            raise RequestError(
                f"{folder} is not an adapter of this library (LoRA with lora_alpha = r); use peft to load it."
            )
        return Adapter(int(config["r"]), _pairs(tensors, int(config["r"])))
    except RequestError:
        raise
    except (OSError, ValueError, KeyError, TypeError, OverflowError, SafetensorError) as error:
        raise RequestError(f"{folder} is not an adapter that can be read ({error}); export the run again.") from None


def _pairs(tensors: dict[str, Tensor], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    names = [key.removeprefix(_PREFIX).removesuffix(".lora_A.weight") for key in tensors if ".lora_A." in key]
    pairs = {n: (tensors[f"{_PREFIX}{n}.lora_A.weight"], tensors[f"{_PREFIX}{n}.lora_B.weight"]) for n in names}
    for name, (a_RI, b_OR) in pairs.items():
        if a_RI.ndim != 2 or b_OR.ndim != 2 or a_RI.shape[0] != rank or b_OR.shape[1] != rank:
            raise ValueError(f"{name} does not have the shapes of rank {rank}")
    return pairs


def attach_adapter(model: nn.Module, adapter: Adapter) -> list[Handle]:
    """Adds the adapter in the forward pass with the same arithmetic as in training; the weights are only read.

    Returns the handles of the hooks. Raises `RequestError` if a module is missing or has another shape.
    """
    handles: list[Handle] = []
    for name, (a_RI, b_OR) in adapter.pairs.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise RequestError(
                f"the adapter has a layer {name}, which this model lacks; give the base model that it was trained on."
            ) from None
        weight = module.get_parameter("weight")
        shape = (b_OR.shape[0], a_RI.shape[1]) if layout_of(module) != "transposed" else (a_RI.shape[1], b_OR.shape[0])
        if weight.is_floating_point() and tuple(weight.shape) != shape:
            raise RequestError(
                f"the adapter's {name} is for a weight of shape {shape}, but this model's has {tuple(weight.shape)}; "
                "give the base model that it was trained on."
            )
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
        place = place_of(module, weight)
        a_RI, b_OR = a_RI.to(place, dtype), b_OR.to(place, dtype)
        term = _adding(a_RI, b_OR)
        _attached[term] = weight
        handles.append(module.register_forward_hook(term, with_kwargs=True))
        target = Target(f"{name}.weight", weight, (Site(name, module, layout_of(module)),))
        handles.append(InStateDict(target, partial(_stored, target, a_RI, b_OR), _refuse_loading))
    return handles


@torch.no_grad()
def _stored(target: Target, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    require_plain(target)
    return _merged(target.sites[0].module, a_RI, b_OR).to(target.parameter.dtype)


def _refuse_loading() -> None:
    raise RequestError(
        "load_state_dict: the model has an adapter attached, which would be added to what is loaded; take it off first "
        "(remove() of each handle, or close() of its run)."
    )


_left: WeakKeyDictionary[nn.Module, tuple[Sequence[Handle], Adapter]] = WeakKeyDictionary()
"""Model -> the adapter that is attached to it and that nobody can take off any more, and its handles."""


def leave_attached(model: Callable[[], nn.Module | None], handles: Sequence[Handle], adapter: Adapter) -> None:
    """Notes that nobody can take off an attached adapter any more; `settle_adapter` does."""
    found = model()
    if found is not None:
        _left[found] = handles, adapter


def settle_adapter(model: nn.Module, *, keep: bool) -> bool:
    """Takes off what was left attached to a model; whether there was an adapter that was kept, in the weights."""
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


_attached: WeakKeyDictionary[Any, nn.Parameter] = WeakKeyDictionary()
"""Hook -> the weight of its module; a hook that is removed drops out by itself."""


def has_adapter(model: nn.Module) -> bool:
    """Whether `attach_adapter` has attached an adapter to the model that is still attached."""
    weights = {id(parameter) for parameter in model.parameters()}
    return any(id(weight) in weights for weight in _attached.values())


def _adding(a_RI: Tensor, b_OR: Tensor) -> Any:
    def add_term(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        del module
        return output + ((only_input(args, kwargs).to(a_RI.dtype) @ a_RI.T) @ b_OR.T).to(output.dtype)

    return add_term


@torch.no_grad()
def merge_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Adds the adapter to the weights of a model in floating point, in place."""
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


ALLOWED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for `max_lora_rank`; it keeps memory for that rank whatever the adapter's is."""

Pair = tuple[Tensor, Tensor]
"""(A_RI, B_OR) of a layer."""


def next_allowed(rank: int) -> int:
    """The smallest allowed rank that is not below `rank`; `rank` itself above the largest."""
    return next((allowed for allowed in ALLOWED_RANKS if allowed >= rank), rank)


def padded(pair: Pair, rank: int) -> Pair:
    """The pair with rows of A and columns of B that are zero, up to `rank`; B A stays what it is."""
    a_RI, b_OR = pair
    more = rank - a_RI.shape[0]
    if more == 0:
        return pair
    return torch.cat([a_RI, a_RI.new_zeros(more, a_RI.shape[1])]), torch.cat([b_OR, b_OR.new_zeros(len(b_OR), more)], 1)
