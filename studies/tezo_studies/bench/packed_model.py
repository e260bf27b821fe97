"""A base in nf4 whose layers are packed where they lie, one after another: no file, and no second model in memory."""

from importlib import import_module
from typing import Any

from tezo.directions.targets import select_targets
from tezo.models.quantization import quantizer, stay_packed
from tezo.system.errors import RequestError


def packed(model: Any) -> Any:
    """The model with its linear layers in nf4, with the bits of `from_pretrained`; the given one is changed in place.

    Args:
        model: a causal model with plain linear layers, on its device.

    Raises:
        RequestError: bitsandbytes is missing, or cannot unpack a layer on this device.
    """
    entry = quantizer("nf4")
    names = [target.name.removesuffix(".weight") for target in select_targets(model)]
    for name in names:
        layer = model.get_submodule(name)
        if layer.weight.device.type == "cpu" and layer.in_features % entry.inputs_on_cpu:
            raise RequestError(
                f"{name} has {layer.in_features} inputs; on a CPU nf4 needs a multiple of {entry.inputs_on_cpu}."
            )
        model.set_submodule(name, _packed_layer(layer))
    model.is_loaded_in_4bit = True  # where PEFT looks
    stay_packed(model)
    return model


def _packed_layer(layer: Any) -> Any:
    nn4: Any = import_module("bitsandbytes.nn")
    weight, shape = layer.weight, (layer.in_features, layer.out_features)
    new = nn4.Linear4bit(*shape, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta")
    plain = nn4.Params4bit(weight.data, quant_type="nf4", compress_statistics=False, module=new)
    new.weight, new.bias = plain.to(weight.device), layer.bias  # the move packs it
    return new.eval()
