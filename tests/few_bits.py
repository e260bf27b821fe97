"""Folders whose weights are in few bits, with and without what is needed to read them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SHAPES = {"rows": (-1,), "rows x 1": (-1, 1), "one": (1,), "number": ()}
LAYER = "model.layers.0.mlp.down_proj.weight"
Tensors = dict[str, torch.Tensor]


def rewritten(plain: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a folder whose tensors a function changes; its configuration says that they are quantised."""
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return folder


def in_few_bits(kind: torch.dtype, shape: str) -> Callable[[Tensors], None]:
    """Returns what quantises the linear layers: to numbers of this type, with scales of a shape."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "proj" in name]:
            weight = tensors[name]
            per_row = weight.abs().amax(1, keepdim=True) / LARGEST[kind]
            scale = per_row if shape in ("rows", "rows x 1") else per_row.max()
            whole = weight / scale
            tensors[name] = (whole.round() if kind == torch.int8 else whole).to(kind)
            tensors[f"{name}_scale"] = scale.reshape(SHAPES[shape]).contiguous()

    return change


def in_groups(tensors: Tensors) -> None:
    """Gives each row of a layer two scales."""
    in_few_bits(torch.int8, "rows")(tensors)
    tensors[f"{LAYER}_scale"] = torch.ones(len(tensors[LAYER]), 2)
