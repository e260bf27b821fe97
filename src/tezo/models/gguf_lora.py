"""An adapter as a GGUF file, which llama.cpp adds to a base model in GGUF.

The file has the tensors blk.N.<layer>.weight.lora_a (R x I) and .lora_b (O x R) for x A^T B^T, and adapter.lora.alpha;
llama.cpp adds alpha / R times B A. The files of some architectures have the rows of the query and key projections in
another order than transformers, since llama.cpp rotates neighbouring pairs of a head where transformers rotates halves;
B has its rows in the same order then.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tezo.errors import RequestError
from tezo.models.lora import Adapter

GGUF_FILE = "adapter.gguf"

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class of transformers -> architecture in GGUF, of those whose layers have been compared with llama.cpp's names."""

PAIRED_ROWS = {"llama"}
"""Architectures in GGUF with another order of rows in the query and key projections."""


def check_gguf(model: Any) -> None:
    """An error where the adapter of this model cannot be written as GGUF here."""
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise RequestError(
            f"format is gguf-lora, which is written for {', '.join(ARCHITECTURES)}, and the model is {name}; use "
            "--format lora, and then `python convert_lora_to_gguf.py FOLDER --base BASE` of llama.cpp."
        )
    if find_spec("gguf") is None:
        raise RequestError("format is gguf-lora, which needs the package gguf: pip install 'tezo[gguf]'.")


def save_gguf(adapter: Adapter, folder: Path, *, model: Any) -> None:
    """Writes adapter.gguf, in float32.

    Args:
        adapter: the adapter.
        folder: folder to write into.
        model: the base model, of a class in `ARCHITECTURES`.

    Raises:
        RequestError: see `check_gguf`, or a layer has no name in GGUF.
    """
    check_gguf(model)
    import gguf

    architecture = ARCHITECTURES[type(model).__name__]
    tensors = _tensors(adapter, model.config, architecture)
    writer = gguf.GGUFWriter(folder / GGUF_FILE, architecture)
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(adapter.rank))
        for name, value in tensors.items():
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _tensors(adapter: Adapter, config: Any, architecture: str) -> dict[str, "np.ndarray[Any, Any]"]:
    """Name in GGUF -> values."""
    import gguf

    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {}
    for module, (a_RI, b_OR) in adapter.pairs.items():
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if name is None:
            raise RequestError(f"format is gguf-lora, and {module} has no name in GGUF; use --format lora.")
        if architecture in PAIRED_ROWS:
            b_OR = _in_pairs(b_OR, module.rpartition(".")[2], config)
        for ending, value in (("lora_a", a_RI), ("lora_b", b_OR)):
            tensors[f"{name}.{ending}"] = value.to(torch.float32).contiguous().numpy()
    return tensors


def _in_pairs(rows: Tensor, layer: str, config: Any) -> Tensor:
    """The rows of a query or key projection with the two halves of each head interleaved; of others as they are."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if layer not in heads:
        return rows
    return rows.reshape(heads[layer], 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
