"""Quantization of a base model's linear layers: one entry of `QUANTIZERS` for each format."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tezo.errors import RequestError, nearest


def _nothing(model: nn.Module) -> None:
    """Does nothing."""
    del model


@dataclass(frozen=True)
class Quantizer:
    """A quantised format of weights.

    Attributes:
        package: the library that implements it.
        bits: bits per weight, without scales.
        inputs_on_cpu: on a CPU the number of inputs of a layer must be a multiple of this, or unpacking is wrong.
        config: dtype of the other tensors -> quantization_config of `from_pretrained`.
        settle: called on the loaded model; keeps the library from changing the stored weights later.
    """

    package: str
    bits: int
    config: Callable[[torch.dtype], Any]
    inputs_on_cpu: int = 1
    settle: Callable[[nn.Module], None] = _nothing


def _nf4(dtype: torch.dtype) -> Any:
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _stay_packed(model: nn.Module) -> None:
    """Keeps bitsandbytes 0.50 from repacking layers at their first forward pass on CPUs with AVX512-BF16.

    Repacking changes the stored weights, and computes with scales in bfloat16.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _int8(dtype: torch.dtype) -> Any:
    del dtype
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def _int8wo(dtype: torch.dtype) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    del dtype
    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


QUANTIZERS = {
    # with another number of inputs, bitsandbytes 0.50 unpacks wrong values on AVX-512
    "nf4": Quantizer("bitsandbytes", 4, _nf4, inputs_on_cpu=64, settle=_stay_packed),
    "int8": Quantizer("bitsandbytes", 8, _int8),
    "int8wo": Quantizer("torchao", 8, _int8wo),
}
"""nf4: 4-bit NormalFloat (QLoRA). int8: LLM.int8(), which also rounds the inputs of a layer. int8wo: weights only."""


def quantizer(name: str) -> Quantizer:
    """The quantizer `name`, a key of `QUANTIZERS`.

    Raises:
        RequestError: there is none, or its package is not installed.
    """
    if name not in QUANTIZERS:
        raise RequestError(f"model.quantization: there is no {name!r}. " + nearest(name, ("none", *QUANTIZERS)))
    entry = QUANTIZERS[name]
    if find_spec(entry.package) is None:
        raise RequestError(f"model.quantization is {name}, which needs {entry.package}; pip install {entry.package}.")
    return entry


def check_unpacks(name: str, model: nn.Module, device: torch.device) -> None:
    """Raises `RequestError` if the library would unpack other values than it packed; see `Quantizer.inputs_on_cpu`."""
    multiple = QUANTIZERS[name].inputs_on_cpu
    for layer, module in model.named_modules():
        packed = isinstance(module, nn.Linear) and not module.weight.is_floating_point()
        if device.type == "cpu" and packed and module.in_features % multiple:
            raise RequestError(
                f"model.quantization is {name}, which a CPU unpacks wrongly if the number of a layer's inputs is not a "
                f"multiple of {multiple} ({layer} has {module.in_features}); use int8wo."
            )


def stored_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, including the scales of quantised ones."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return sum(bytes_of(tensor) for tensor in tensors)


def bytes_of(tensor: Any) -> int:
    """Bytes of a tensor, including its scales if it is quantised."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torchao tensors, and FSDP2 shards of this rank
    if flatten is not None:
        parts = [getattr(tensor, name) for name in flatten()[0]]
        return sum(bytes_of(part) for part in parts if isinstance(part, Tensor))
    state = getattr(tensor, "quant_state", None)  # bitsandbytes tensors
    scales = state.as_dict(packed=True).values() if state is not None else [getattr(tensor, "SCB", None)]
    return int(tensor.nbytes) + sum(int(part.nbytes) for part in scales if isinstance(part, Tensor))
