"""Models and adapters in GGUF, the format of llama.cpp: weights, tokenizer and chat template in one file.

transformers reads the file of a model. Its weights are unpacked, so that they can be tuned and saved like any others;
nothing is read of what lies beside the file. Where transformers builds another tokenizer than llama.cpp does from the
same file, llama.cpp's is what the model was made with.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from packaging.version import Version
from tokenizers import normalizers, pre_tokenizers
from torch import Tensor

from tezo.models.gguf_types import every_type, type_name, unpacked_types
from tezo.models.lora import Adapter
from tezo.system.errors import RequestError
from tezo.system.files import reading

_DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Names of tokenizers that split as GPT-2's, each digit alone; transformers 5.23 takes them for GPT-2's."""

_AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "jina-es", "jina-de"}
"""Names of tokenizers that split as GPT-2's."""

_WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
}  # fmt: skip
"""Names of tokenizers that take a word of the vocabulary whole, and begin with BOS unless the file says otherwise."""

GGUF_FILE = "adapter.gguf"

OLDEST = "5.18"
"""Version of transformers from which it reads Q4_1 and many more quantizations; 5.17 reads Q8_0 and three others."""

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class of transformers -> architecture in GGUF, of those whose layers have been compared with llama.cpp's names."""

BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Setting of transformers -> the layers of a block that have a bias by it, as GGUF names them."""

ROTATIONS = "rope_freqs.weight"
"""The tensor with a factor for each frequency of the rotations, which is divided by it; files of Llama 3 have it."""


def is_gguf(name: str | Path) -> bool:
    """Returns whether this is the path of a GGUF file, by its ending or its first bytes."""
    path = Path(name)
    return path.suffix.lower() == ".gguf" or (path.is_file() and _magic(path) == b"GGUF")


def _magic(path: Path) -> bytes:
    with reading(f"model.name: {path} cannot be read", "give another file"), path.open("rb") as file:
        return file.read(4)


def check_gguf_file(path: Path) -> None:
    """Raises a `RequestError` where there is no whole model in this file; its weights are not read yet."""
    what = f"model.name: {path}"
    if not path.is_file():
        raise RequestError(f"{what} is no file; give the path of a GGUF file, of the hub after downloading it.")
    if _magic(path) != b"GGUF":
        raise RequestError(f"{what} is not a GGUF file; give one, a folder with config.json, or a hub name.")
    lacking = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if lacking:
        raise RequestError(f"{what} is GGUF, which needs the package {lacking[0]}: pip install 'tezo[gguf]'.")
    if Version(transformers.__version__) < Version(OLDEST):
        raise RequestError(
            f"{what} is GGUF, which transformers reads from {OLDEST} on, and {transformers.__version__} is installed; "
            "upgrade it, or give the model's folder with safetensors."
        )
    metadata, header = _read_header(path)
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise RequestError(f"{what} is of the type {kind!r}, not a model; give the file that has the model.")
    named = re.search(r"-\d{5}-of-(\d{5})\.gguf$", path.name)
    parts = max(metadata.get("split.count", 1), int(named[1]) if named else 1)
    if parts > 1:
        raise RequestError(
            f"{what} is one of {parts} parts of a split model; join them by `llama-gguf-split --merge` of llama.cpp, "
            "and give the file that it writes."
        )
    for tensor in header.tensors:
        if tensor.ggml_type not in unpacked_types():
            raise RequestError(
                f"{what} has {tensor.name} as {type_name(tensor.ggml_type)}, which gguf {version('gguf')} does not "
                "unpack; upgrade gguf, or give the model in another quantization, or as safetensors."
            )
    size, end = (
        path.stat().st_size,
        header.data_start + max((at.offset + at.nbytes for at in header.tensors), default=0),
    )
    if size < end:
        raise RequestError(f"{what} ends after {size:,} of {end:,} bytes; download it again.")


def _read_header(path: str | Path) -> tuple[dict[str, Any], Any]:
    """(metadata, transformers' header) of a file."""
    from transformers.integrations.gguf import GgufHeader, read_gguf_metadata

    again = "download it again, or give the model as safetensors"
    with reading(f"model.name: {path} cannot be read", again), every_type():
        return read_gguf_metadata(str(path))[0], GgufHeader.from_file(str(path))


def gguf_config(path: str) -> Any:
    """Returns the configuration of the model in a file, with the biases and the rotations that its tensors say it has.

    transformers reads a configuration of the metadata alone, where neither stands.
    """
    import gguf

    config = transformers.AutoConfig.from_pretrained(path, gguf_file=path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for setting, layers in BIASES.items():
        there = [layer for layer in layers if f"blk.0.{layer}.weight" in tensors]
        if hasattr(config, setting) and there and all(f"blk.0.{layer}.bias" in tensors for layer in there):
            setattr(config, setting, True)
    if ROTATIONS in tensors and hasattr(config, "rope_parameters"):
        # transformers' name for frequencies that are each divided by a factor, the same for short and long texts
        factors, longest = tensors[ROTATIONS].data.astype(float).tolist(), config.max_position_embeddings
        own = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
        own |= {"rope_type": "longrope", "original_max_position_embeddings": longest}
        config.rope_parameters = {**config.rope_parameters, **own}
    return config


def _check_all_read(path: str, model: Any, unexpected: Collection[str]) -> None:
    """Raises a `RequestError` where llama.cpp computes with tensors of a file that the model has no parameters for.

    Args:
        path: of the file.
        model: the model that was loaded from it.
        unexpected: names that transformers itself could not place; it says nothing of older architectures.
    """
    from transformers import modeling_gguf_pytorch_utils as older
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    metadata, header = _read_header(path)
    architecture, left = metadata["general.architecture"], sorted(unexpected)
    if not is_gguf_arch_supported(architecture):
        taken = older.get_gguf_hf_weights_map(model, older.TENSOR_PROCESSORS.get(architecture, older.TensorProcessor)())
        left = [tensor.name for tensor in header.tensors if tensor.name not in (*taken, ROTATIONS)]
    if model.get_output_embeddings() is None:  # of an encoder
        left = [name for name in left if not name.startswith("output.")]
    if left:
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise RequestError(
            f"model.name: {path} has tensors that transformers does not read ({left[0]}{others}), so torch would "
            "compute another model than llama.cpp does; set model.engine=llama.cpp, or give the model's own folder."
        )


def load_gguf(
    path: str, config: Any, build: Callable[[], Any], dtype: torch.dtype | str, **options: Any
) -> tuple[Any, Any]:
    """Returns (the model in a file, its weights unpacked; loading info, which `options` must ask for).

    `path` is absolute. `build` makes the model without its weights, and is called on the meta device. `dtype` "auto" is
    that of the file where its weights are plain numbers, float32 where they are packed. `options` go to
    `from_pretrained`.

    Raises:
        RequestError: the file has tensors that this model does not take.
    """
    with torch.device("meta"):
        architecture = type(build())
    if dtype == "auto":
        dtype = _read_header(path)[1].dtype or torch.float32
    unpacked = transformers.GgufConfig(dequantize=True)
    nothing_beside = str(Path(__file__).parent)  # transformers would load an adapter that lies beside the file
    model, report = architecture.from_pretrained(
        nothing_beside, config=config, gguf_file=path, quantization_config=unpacked, dtype=dtype, **options
    )
    _check_all_read(path, model, report["unexpected_keys"])
    model.name_or_path = model.config.name_or_path = path
    return model, report


def gguf_tokenizer(path: str) -> tuple[Any, list[str]]:
    """Returns (the tokenizer in a file, notices on what llama.cpp does with the file and transformers does not)."""
    metadata, _ = _read_header(path)
    split = metadata.get("tokenizer.ggml.pre")
    begins = {"add_bos_token": True} if split in _WHOLE_WORDS else {}  # what the file says comes before it
    tokenizer = transformers.PreTrainedTokenizerFast(name_or_path=str(Path(path).parent), gguf_file=path, **begins)
    tokenizer.name_or_path = path
    backend, notices = tokenizer.backend_tokenizer, []
    if split in _DIGITS_ALONE:
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if metadata.get("tokenizer.ggml.model") == "llama":  # as llama.cpp, which has a space behind special tokens too
        space = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    as_gpt2 = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if metadata.get("tokenizer.ggml.model") == "gpt2" and as_gpt2 and split not in _AS_GPT2:
        notices.append(
            f"model.name: the tokenizer splits text as {split!r}, which transformers does not know, and is read as "
            "GPT-2's; some texts become other tokens than in llama.cpp. The model's own folder has no such difference."
        )
    scaling = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    if scaling != "none":
        notices.append(
            "model.name: the file scales positions (RoPE), which transformers does not read from GGUF; long texts are "
            "understood less well. The model's own folder has no such difference."
        )
    return tokenizer, notices


def settle_gguf(model: Any) -> None:
    """Names a model that transformers has loaded from a GGUF file by that file, and lets it be saved.

    transformers names it by the folder of the file, and takes its weights for packed after it has unpacked them.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or getattr(model, "quantization_method", None) != "gguf":
        return
    file = Path(model.name_or_path, quantizer.quantization_config.gguf_file)
    if file.is_file():
        model.name_or_path = str(file)
    if all(parameter.is_floating_point() for parameter in model.parameters()):
        quantizer.remove_quantization_config(model)


@contextmanager
def reading_once() -> Iterator[None]:
    """Lets transformers read a GGUF file once, with every type of tensor, and show no progress bar of its own.

    transformers 5.23 parses the whole file for the configuration and again for the weights, and makes the same table of
    names for each module of the model: two thirds of the time of loading a small model.
    """
    from unittest.mock import patch

    import gguf

    with (
        every_type(),
        patch("gguf.GGUFReader", cache(gguf.GGUFReader)),
        patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        patch("transformers.modeling_gguf_pytorch_utils.tqdm", lambda tensors, **_: tensors),
    ):
        yield


def check_gguf(adapter: Adapter, model: Any, untied: Collection[str] = ()) -> None:
    """Raises a `RequestError` where an adapter cannot be written as GGUF here, or llama.cpp would refuse it.

    llama.cpp refuses an adapter with a tensor that its base lacks. A base whose head is tied has none for the head.

    Args:
        adapter: of the model.
        model: the base model.
        untied: names of the parameters that are tied to others in the base, and have weights of their own here.
    """
    heads = [module for module in adapter.pairs if f"{module}.weight" in untied]
    if heads:
        raise RequestError(
            f"format is gguf-lora, and the adapter changes {heads[0]}, which is tied to the embeddings in the base: "
            "llama.cpp refuses it, because a GGUF file of that base has no weights for the head. Use the format "
            "merged, and then `python convert_hf_to_gguf.py FOLDER` of llama.cpp."
        )
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise RequestError(
            f"format is gguf-lora, which is written for {', '.join(ARCHITECTURES)}, and the model is {name}; use "
            "the format lora, and then `python convert_lora_to_gguf.py FOLDER --base BASE` of llama.cpp."
        )
    if find_spec("gguf") is None:
        raise RequestError("format is gguf-lora, which needs the package gguf: pip install 'tezo[gguf]'.")


def save_gguf(adapter: Adapter, folder: Path, *, model: Any) -> None:
    """Writes adapter.gguf, in float32, which llama.cpp adds to a base model in GGUF.

    The file has the tensors blk.N.<layer>.weight.lora_a (R x I) and .lora_b (O x R) for x A^T B^T, and
    adapter.lora.alpha; llama.cpp adds alpha / R times B A.

    Raises:
        RequestError: see `check_gguf`, or a layer has no name in GGUF.
    """
    check_gguf(adapter, model)
    write_gguf_lora(folder / GGUF_FILE, adapter.rank, adapter.pairs, GgufNames(model))


class Names(Protocol):
    """How a model's layers are called in GGUF."""

    @property
    def architecture(self) -> str:
        """The name of the architecture in GGUF."""
        ...

    def name(self, parameter: str) -> str | None:
        """Returns the name of a parameter's tensor; None if there is none."""
        ...

    def to_gguf(self, module: str, rows: Tensor) -> Tensor:
        """Returns the rows of a layer's weight, factor or output in llama.cpp's order."""
        ...


@dataclass(frozen=True)
class FileNames:
    """The names of a file, by which its layers are called: blk.0.attn_q for blk.0.attn_q.weight.

    Attributes:
        architecture: its name in GGUF.
    """

    architecture: str

    def name(self, parameter: str) -> str | None:
        """See `Names`; the name is the same."""
        return parameter

    def to_gguf(self, module: str, rows: Tensor) -> Tensor:
        """See `Names`; the order is the same."""
        del module
        return rows


class GgufNames:
    """How a model of transformers is written in GGUF: names, and the order of rows that llama.cpp rotates.

    Args:
        model: of a class in `ARCHITECTURES`.

    Attributes:
        architecture: its name in GGUF.
    """

    def __init__(self, model: Any) -> None:
        import gguf

        config = model.config
        self.architecture = ARCHITECTURES[type(model).__name__]
        number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def name(self, parameter: str) -> str | None:
        """Returns the name of a tensor; None if there is none."""
        found: str | None = self._names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        return found

    def to_gguf(self, module: str, rows: Tensor) -> Tensor:
        """Returns the rows of a layer's weight or factor in llama.cpp's order."""
        heads = self._rotated(module)  # it rotates neighbouring pairs of a head here, where transformers rotates halves
        return (
            rows if heads is None else rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        )

    def from_gguf(self, module: str, rows: Tensor) -> Tensor:
        """Undoes `to_gguf`."""
        heads = self._rotated(module)
        return (
            rows if heads is None else rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        )

    def _rotated(self, module: str) -> int | None:
        return self._heads.get(module.rpartition(".")[2]) if self.architecture == "llama" else None


def write_gguf_lora(path: str | Path, alpha: int, pairs: Mapping[str, tuple[Tensor, Tensor]], names: Names) -> None:
    """Writes a LoRA adapter; see `save_gguf`.

    Args:
        path: of the file.
        alpha: llama.cpp adds alpha / R times B A; for 0 it adds B A, whatever the rank of a layer.
        pairs: module name -> (A_RI, B_OR).
        names: of the base model.

    Raises:
        RequestError: a layer has no name in GGUF.
    """
    import gguf

    tensors = {}
    for name, (a_RI, b_OR) in in_gguf(pairs, names).items():
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = a_RI, b_OR
    writer = gguf.GGUFWriter(path, names.architecture)
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
        for name, value in tensors.items():
            writer.add_tensor(name, value.to(torch.float32).contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def in_gguf(pairs: Mapping[str, tuple[Tensor, Tensor]], names: Names) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns name of a tensor in GGUF -> (A_RI, B_OR), its rows in llama.cpp's order, of module name -> the same.

    Raises:
        RequestError: a layer has no name in GGUF.
    """
    found = {}
    for module, (a_RI, b_OR) in pairs.items():
        name = names.name(f"{module}.weight")
        if name is None:
            raise RequestError(f"{module} has no name in GGUF, which an adapter for llama.cpp needs; leave it out.")
        found[name] = a_RI, names.to_gguf(module, b_OR)
    return found


class GgufWeights(Mapping[str, Tensor]):
    """The weights of a file by the names of their parameters in transformers, read and unpacked at each use.

    Args:
        path: of the file.
        model: its model, of a class in `ARCHITECTURES`.
    """

    def __init__(self, path: str, model: Any) -> None:
        import gguf

        self._path, self._names = path, GgufNames(model)
        self._parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._tensors = {
            tensor.name: (tensor.tensor_type, tensor.data.dtype, int(tensor.data_offset), tensor.data.shape)
            for tensor in gguf.GGUFReader(path).tensors
        }

    def __getitem__(self, parameter: str) -> Tensor:
        import gguf

        name = self._names.name(parameter) or ""
        tied = "token_embd.weight" if name == "output.weight" and name not in self._tensors else name
        kind, dtype, offset, shape = self._tensors[tied]
        # not a map of the whole file, of which the engine has one
        stored = np.memmap(self._path, dtype, "r", offset, shape)
        values = gguf.quants.dequantize(stored, kind)
        values = values if values.flags.writeable else values.copy()  # plain numbers are a view of the file
        return self._names.from_gguf(parameter.rpartition(".")[0], torch.from_numpy(values).float())

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
