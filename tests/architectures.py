"""Tiny random models of many architectures as GGUF files, of the tensors that llama.cpp itself makes for each.

llama.cpp is given the metadata of a model and makes its tensors, whose names and shapes are written down; the file has
random values in their place, packed in any of ggml's types by ggml's own quantiser.
"""

import ctypes
import hashlib
import json
import tempfile
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from folders import bpe_tokenizer

from tezo.engines.llama_cpp.layouts import Parameters, ReadParameters
from tezo.engines.llama_cpp.library import find_library, load_library
from tezo.engines.llama_cpp.tensors import Tensors

WIDTH, INSIDE, BLOCKS, HEADS, POSITIONS = 256, 512, 2, 4, 256
GROUPED = {"attention.head_count_kv": 2}
MIXTURE = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256, "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 256, "leading_dense_block_count": 1, "expert_weights_scale": 1.0,
    "expert_gating_func": 1,
}  # fmt: skip
STATE = {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.inner_size": 512, "ssm.time_step_rank": 8,
         "ssm.group_count": 1}  # fmt: skip
DELTA = {"ssm.conv_kernel": 4, "ssm.state_size": 64, "ssm.inner_size": 256, "ssm.time_step_rank": 4,
         "ssm.group_count": 2, "full_attention_interval": 2, "attention.key_length": 64,
         "attention.value_length": 64}  # fmt: skip
PARTS = {"block_count": 5, "embedding_length_per_layer_input": 256, "attention.shared_kv_layers": 0,
         "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 64,
         "attention.value_length_swa": 64, "rope.freq_base_swa": 10000.0,
         "attention.sliding_window_pattern": [True, True, True, True, False]}  # fmt: skip
LATENT = {"attention.q_lora_rank": 256, "attention.kv_lora_rank": 256, "attention.key_length": 64,
          "attention.value_length": 64, "rope.dimension_count": 32}  # fmt: skip
WINDOW = {"attention.sliding_window": 32}

ARCHITECTURES = {
    "llama": GROUPED,
    "mistral3": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"attention.key_length": 64, "attention.value_length": 64},
    "qwen3moe": GROUPED | MIXTURE,
    "gemma": {"attention.key_length": 64, "attention.value_length": 64},
    "gemma2": GROUPED | WINDOW | {"attention.key_length": 64, "attention.value_length": 64},
    "gemma3": GROUPED | WINDOW | {"attention.key_length": 64, "attention.value_length": 64},
    "phi2": {},
    "phi3": WINDOW,
    "granite": GROUPED | {"logit_scale": 2.0},
    "granitehybrid": STATE | {"attention.head_count_kv": [2, 0], "logit_scale": 2.0},
    "olmo2": {},
    "olmoe": MIXTURE,
    "falcon": GROUPED,
    "falcon-h1": GROUPED | STATE,
    "mamba": STATE | {"ssm.time_step_rank": 16, "attention.head_count": 0, "feed_forward_length": 0},
    "mamba2": STATE | {"attention.head_count": 0, "feed_forward_length": 0},
    "gpt2": {},
    "gptneox": {"use_parallel_residual": True},
    "stablelm": {},
    "command-r": {"logit_scale": 1.0},
    "cohere2": WINDOW | {"logit_scale": 1.0},
    "smollm3": GROUPED,
    "exaone": GROUPED,
    "exaone4": GROUPED | WINDOW,
    "gpt-oss": GROUPED | MIXTURE | WINDOW,
    "nemotron": GROUPED,
    "deepseek": MIXTURE,
    "deepseek2": MIXTURE | LATENT,
    "bloom": {},
    "mpt": {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.0},
    "starcoder": {},
    "starcoder2": GROUPED,
    "internlm2": GROUPED,
    "minicpm": {},
    "glm4": GROUPED,
    "lfm2": {"attention.head_count_kv": [2, 0], "shortconv.l_cache": 3},
    "jamba": STATE | {"attention.head_count_kv": [2, 0], "ssm.time_step_rank": 16},
    "nemotron_h": STATE | {"attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 512], "block_count": 3},
    "qwen3next": GROUPED | MIXTURE | DELTA,
    "qwen35": GROUPED | DELTA | {"rope.dimension_sections": [8, 8, 8, 8]},
    "gemma3n": GROUPED | WINDOW | {"block_count": 22},
    "gemma4": GROUPED | WINDOW | PARTS,
    "seed_oss": GROUPED,
    "hunyuan-dense": GROUPED,
    "ernie4_5": GROUPED,
    "arcee": GROUPED,
}
"""Architecture -> keys of its metadata, beside those that all have."""

BIASED = {"llama": (), "qwen2": ("attn_q", "attn_k", "attn_v"), "qwen3": ()}
"""Architecture that transformers reads from GGUF -> its layers with a bias here. llama.cpp also takes others, and
"rope_freqs", factors of rotations."""

ROOTS = {"gemma3n": 8.0, "gemma4": 8.0}
"""Architectures whose attention does not divide its scores by the root of the width of a head -> that root. Their norms
of queries and keys, which would be around 1, do so instead: else attention is so much sharper than in the others."""

TYPES = {
    "F32": "F32", "F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0", "Q5_0": "Q5_0", "Q4_K_M": "Q4_K", "Q6_K": "Q6_K",
    "IQ4_NL": "IQ4_NL",
}  # fmt: skip
"""Name of a kind of file -> the type of most of its matrices. Files of the kind Q4_K_M have others in Q6_K and Q5_0."""


def metadata(architecture, more=None):
    """Keys of a file's metadata -> value."""
    own = {
        "vocab_size": len(tokens()[0]), "context_length": POSITIONS, "embedding_length": WIDTH, "block_count": BLOCKS,
        "feed_forward_length": INSIDE, "attention.head_count": HEADS, "attention.head_count_kv": HEADS,
        "attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": WIDTH // HEADS, "rope.freq_base": 10000.0,
    }  # fmt: skip
    own |= ARCHITECTURES[architecture] | (more or {})
    return {f"{architecture}.{key}": value for key, value in own.items()}


@cache
def tokens():
    """(tokens, their kinds, merges) of a tokenizer of byte pairs."""
    tokenizer = bpe_tokenizer()
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    found = sorted(inner["vocab"], key=inner["vocab"].get)
    kinds = [3 if token in tokenizer.all_special_tokens else 1 for token in found]
    return found, kinds, [" ".join(pair) for pair in inner["merges"]]


TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} : {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant : {% endif %}"
)


def writer_of(path, architecture, more=None, template=TEMPLATE, *, begins=False):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    for key, value in metadata(architecture, more).items():
        kind = {bool: "bool", int: "uint32", float: "float32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    found, kinds, merges = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(found)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for number, role in enumerate(("bos", "pad", "eos", "unk")):
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(begins)
    writer.add_chat_template(template)
    return writer


MAKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
"""(tensor, user data): gives a tensor its values."""


def makes_models():
    """Whether the library makes the tensors of a model from its metadata."""
    place = find_library()
    return place is not None and hasattr(ctypes.CDLL(str(place.path)), "llama_model_init_from_user")


@cache
def shapes(architecture):
    """Name of each tensor -> its shape, that of the innermost dimension first."""
    lib, tensors, found = load_library(), Tensors(load_library()), {}
    make = ctypes.CDLL(str(find_library().path)).llama_model_init_from_user
    make.restype, make.argtypes = ctypes.c_void_p, [ctypes.c_void_p, MAKER, ctypes.c_void_p, Parameters]

    @MAKER
    def note(tensor, _):
        shape = tensors.shape(tensor)
        found[tensors.name(tensor)] = shape[: max(1, 4 - [*reversed([n > 1 for n in shape]), True].index(True))]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metadata.gguf"
        writer = writer_of(path, architecture)
        writer.add_tensor("nothing", np.zeros(1, np.float32))
        finish(writer)
        header = lib.gguf_init_from_file(str(path).encode(), ReadParameters(True, None))
        model = make(header, note, None, lib.llama_model_default_params())
        lib.gguf_free(header)
    assert model, lib.errors()
    lib.llama_model_free(model)
    return found


def values(architecture, name, shape, seed=0):
    """Random values of a tensor, (..., rows, columns)."""
    own = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    drawn = np.random.default_rng(own).standard_normal(shape[::-1]).astype(np.float32)
    if name.endswith("ssm_a"):  # a state decays
        return -np.abs(drawn) - 0.1
    if len(shape) == 1:
        drawn = 0.1 * drawn + (1.0 if "norm" in name else 0.0)
        is_divided = "attn_q_norm" in name or "attn_k_norm" in name
        return drawn / ROOTS.get(architecture, 1.0) ** 0.5 if is_divided else drawn
    return drawn * (2.0 / shape[0]) ** 0.5


def kind_of_tensor(name, shape, kind):
    """The type of a tensor in a file of this kind."""
    unpacked = ("norm", "ssm_conv1d", "shortconv.conv", "altup", "laurel", "inp_gate", "proj.weight", "gate_inp")
    if len(shape) < 2 or not name.endswith(".weight") or any(part in name for part in unpacked):
        return gguf.GGMLQuantizationType.F32
    own = TYPES[kind]
    if kind == "Q4_K_M":
        own = "Q6_K" if "ffn_down" in name or "token_embd" in name else "Q5_0" if "attn_v" in name else own
    found = gguf.GGMLQuantizationType[own]
    entries, _ = gguf.GGML_QUANT_SIZES[found]
    return gguf.GGMLQuantizationType.F16 if shape[0] % entries else found  # as llama.cpp does, for narrow matrices


def packed(x, kind):
    """The bytes of rows, (..., row size), packed by ggml itself."""
    lib = load_library()
    x = np.ascontiguousarray(x, np.float32)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    size = width // lib.ggml_blck_size(kind) * lib.ggml_type_size(kind)
    found, numbers = np.zeros(rows * size, np.uint8), x.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    assert lib.ggml_quantize_chunk(kind, numbers, found.ctypes.data, 0, rows, width, None) == found.size
    return found.reshape(*x.shape[:-1], size)


def write_model(path, architecture, kind="F32", seed=0, change=None, biased=None):
    """Writes a model with random values, and a change of some weights added to them; returns the path.

    `biased`: layers that have a bias, in the place of those in `BIASED`.
    """
    writer = writer_of(path, architecture)
    for name, shape in shapes(architecture).items():
        if name.startswith("cls.") or name.endswith("scale"):  # of classifiers, and of a type that is not written
            continue
        biased = BIASED.get(architecture) if biased is None else biased
        is_optional = name.startswith("rope_freqs") or name.endswith(".bias")
        if biased is not None and is_optional and name.split(".")[-2] not in biased:
            continue
        own = kind_of_tensor(name, shape, kind)
        x = values(architecture, name, shape, seed) + (change or {}).get(name, 0.0)
        if own == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, x)
        else:
            writer.add_tensor(name, packed(x, own), raw_dtype=own)
    finish(writer)
    return path


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
