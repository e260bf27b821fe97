"""Bases whose linear layers are held in fewer bits: a row of `QUANTIZERS` for each library and form."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tezo.errors import RequestError, nearest


def _as_it_is(model: nn.Module) -> None:
    """Nothing needs to be done."""
    del model


@dataclass(frozen=True)
class Quantizer:
    """A form of weights.

    Attributes:
        package: that does the work.
        bits: of a weight, scales left out.
        inputs_on_cpu: what the inputs of a layer must be a multiple of for a CPU to unpack it rightly.
        config: dtype of the other tensors -> what `from_pretrained` takes as its quantization_config.
        settle: makes a model that was loaded so keep what is stored as it is.
    """

    package: str
    bits: int
    config: Callable[[torch.dtype], Any]
    inputs_on_cpu: int = 1
    settle: Callable[[nn.Module], None] = _as_it_is


def _nf4(dtype: torch.dtype) -> Any:
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _stay_packed(model: nn.Module) -> None:
    """No layer is packed anew at its first forward, as bitsandbytes 0.50 does on CPUs with AVX512-BF16.

    That changes what is stored, and computes with scales in bfloat16.
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
    # bitsandbytes 0.50, AVX-512: others come back changed
    "nf4": Quantizer("bitsandbytes", 4, _nf4, inputs_on_cpu=64, settle=_stay_packed),
    "int8": Quantizer("bitsandbytes", 8, _int8),
    "int8wo": Quantizer("torchao", 8, _int8wo),
}
"""nf4: 4-bit NormalFloat (QLoRA); int8: LLM.int8(), which rounds the inputs of a layer too; int8wo: weights alone."""


def quantizer(name: str) -> Quantizer:
    """The row of that name.

    Raises:
        RequestError: there is none, or its package is not installed.
    """
    if name not in QUANTIZERS:
        raise RequestError(f"model.quantization: there is no {name!r}. " + nearest(name, ("none", *QUANTIZERS)))
    found = QUANTIZERS[name]
    if find_spec(found.package) is None:
        raise RequestError(f"model.quantization is {name}, which needs {found.package}; pip install {found.package}.")
    return found


def check_unpacks(name: str, model: nn.Module, device: torch.device) -> None:
    """An error where the library gives other values back than it packed."""
    multiple = QUANTIZERS[name].inputs_on_cpu
    for of, module in model.named_modules():
        packed = isinstance(module, nn.Linear) and not module.weight.is_floating_point()
        if device.type == "cpu" and packed and module.in_features % multiple:
            raise RequestError(
                f"model.quantization is {name}, which a CPU unpacks wrongly where a layer's inputs are no multiple of "
                f"{multiple} ({of} has {module.in_features}); use int8wo."
            )


def stored_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, with the scales that packed ones come with."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return sum(bytes_of(tensor) for tensor in tensors)


def bytes_of(tensor: Any) -> int:
    """Bytes of a tensor, with the scales that it comes with when it is packed."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torchao's, and the shards of FSDP2, which hold this rank's
    if flatten is not None:
        parts = [getattr(tensor, name) for name in flatten()[0]]
        return sum(bytes_of(part) for part in parts if isinstance(part, Tensor))
    state = getattr(tensor, "quant_state", None)  # bitsandbytes'
    scales = state.as_dict(packed=True).values() if state is not None else [getattr(tensor, "SCB", None)]
    return int(tensor.nbytes) + sum(int(part.nbytes) for part in scales if isinstance(part, Tensor))
