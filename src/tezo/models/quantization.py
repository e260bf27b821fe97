"""Quantization of a base model's linear layers: one entry of `QUANTIZERS` for each format."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from tezo.system.errors import RequestError


@dataclass(frozen=True)
class Quantizer:
    """A quantised format of weights.

    Attributes:
        package: the library that implements it.
        config: (dtype of the other tensors, patterns of the modules to leave as they are or None for the library's
            choice) -> quantization_config of `from_pretrained`.
        inputs_on_cpu: on a CPU the number of inputs of a layer must be a multiple of this, or unpacking is wrong.
    """

    package: str
    config: Callable[[torch.dtype, list[str] | None], Any]
    inputs_on_cpu: int = 1


def _nf4(dtype: torch.dtype, left: list[str] | None) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=left
    )


def _int8wo(_: torch.dtype, left: list[str] | None) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=left)


QUANTIZERS = {
    # with another number of inputs, bitsandbytes 0.50 unpacks wrong values on AVX-512
    "nf4": Quantizer("bitsandbytes", _nf4, inputs_on_cpu=64),
    "int8": Quantizer(
        "bitsandbytes", lambda _, left: transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=left)
    ),
    "int8wo": Quantizer("torchao", _int8wo),
}
"""nf4: 4-bit NormalFloat (QLoRA). int8: LLM.int8(), which also rounds the inputs of a layer. int8wo: weights only."""


def quantizer(name: str) -> Quantizer:
    """Returns the entry of `QUANTIZERS`; `RequestError` if its package is not installed."""
    entry = QUANTIZERS[name]
    if find_spec(entry.package) is None:
        raise RequestError(f"model.quantization is {name}, which needs {entry.package}; pip install {entry.package}.")
    return entry


def quantization_config(
    name: str, dtype: torch.dtype, device: torch.device, build: Callable[[], Any]
) -> tuple[Any, list[str]]:
    """Returns (quantization_config of `from_pretrained`, notices); layers that cannot be unpacked are left as they are.

    `dtype` is that of the tensors that are not packed, `device` where the model will compute. `build` makes the model,
    and is called on the meta device, so that no weight is stored. Raises `RequestError` as `quantizer` does.
    """
    entry = quantizer(name)
    if device.type != "cpu" or entry.inputs_on_cpu == 1:
        return entry.config(dtype, None), []
    with torch.device("meta"):
        model = build()
    usual, left = get_keys_to_not_convert(model), []
    for layer, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and layer not in usual:
            inputs = module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0]
            left += [layer] if inputs % entry.inputs_on_cpu else []
    if not left:
        return entry.config(dtype, None), []
    notice = (
        f"{len(left)} layers are not packed, such as {left[0]}: on a CPU {name} needs a number of inputs that is a "
        f"multiple of {entry.inputs_on_cpu}."
    )
    return entry.config(dtype, [*usual, *(f"^{re.escape(layer)}$" for layer in left)]), [notice]


def stay_packed(model: nn.Module) -> None:
    """Keeps bitsandbytes 0.50 from repacking layers at their first forward pass on CPUs with AVX512-BF16.

    Repacking changes the stored weights, and computes with scales in bfloat16.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def stored_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters and buffers, including the scales of quantised ones."""
    return sum(map(bytes_of, (*model.parameters(), *model.buffers())))


def bytes_of(tensor: Any) -> int:
    """Returns the bytes of a tensor, including its scales if it is quantised."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torchao tensors, and FSDP2 shards of this rank
    if flatten is not None:
        parts = [getattr(tensor, name) for name in flatten()[0]]
        return sum(bytes_of(part) for part in parts if isinstance(part, Tensor))
    state = getattr(tensor, "quant_state", None)  # bitsandbytes tensors
    scales = state.as_dict(packed=True).values() if state is not None else [getattr(tensor, "SCB", None)]
    return int(tensor.nbytes) + sum(int(part.nbytes) for part in scales if isinstance(part, Tensor))
