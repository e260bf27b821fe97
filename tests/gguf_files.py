"""Tiny Llamas of known weights as GGUF files."""

import ctypes
import json
from itertools import cycle
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize, quantize

from tezo.engines.llama_cpp.model import LlamaModel

HEADS, GROUPS = 4, 2


def tiny_llama(vocabulary: int, **changes: Any) -> transformers.LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "initializer_range": 0.2, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
    }  # fmt: skip
    config = transformers.LlamaConfig(**settings | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def in_llama_cpp_order(name: str, weight: torch.Tensor, counts: tuple[int, int] = (HEADS, GROUPS)) -> torch.Tensor:
    """Rows of queries and keys as llama.cpp rotates them: the two halves of each head interleaved."""
    heads = dict(zip(("attn_q", "attn_k"), counts, strict=True)).get(name.split(".")[-2])
    if heads is None:
        return weight
    dim = weight.shape[0] // heads
    order = [head * dim + half * dim // 2 + i for head in range(heads) for i in range(dim // 2) for half in range(2)]
    return weight[order]


def tensors_of(model) -> dict[str, torch.Tensor]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    found = {names.get_name(name, (".weight",)): weight.detach() for name, weight in model.named_parameters()}
    return {name: in_llama_cpp_order(name, weight) for name, weight in found.items()}


def packed_as(weight: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A weight in a type of GGUF; where gguf packs nothing as it, blocks of random bytes, whose values are finite."""
    try:
        return quantize(weight.numpy(), kind)
    except NotImplementedError:
        draw, (entries, size) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[kind]
        blocks = draw.integers(0, 256, (weight.numel() // entries, size), dtype=np.uint8)
        while (wrong := ~np.isfinite(values_of(blocks, kind)).all(axis=1)).any():
            blocks[wrong] = draw.integers(0, 256, (int(wrong.sum()), size), dtype=np.uint8)
        return blocks.reshape(*weight.shape[:-1], -1)


def values_of(blocks: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return dequantize(blocks, kind)


def write_gguf(path, model, tokenizer, *, packed=None, pre="smollm", architecture="llama", more=None):
    """A file of a Llama as llama.cpp has it; matrices in the type `packed`, in several types in turn, or in float32."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    for name in ("bos", "eos", "pad", "unk"):
        getattr(writer, f"add_{name}_token_id")(getattr(tokenizer, f"{name}_token_id"))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    for key, value in (more or {}).items():
        {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    kinds = cycle(packed if isinstance(packed, list) else [packed or gguf.GGMLQuantizationType.F32])
    for name, weight in tensors_of(model).items():
        kind = next(kinds) if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, packed_as(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sentence_pieces(path, tokenizer, *, space):
    """A file with the tokenizer of a Llama 2, of pieces with scores, and nothing else that a model needs."""
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    pieces = sorted(inner["vocab"], key=inner["vocab"].get)
    ranks = {
        "".join(pair) if isinstance(pair, list) else pair.replace(" ", ""): i for i, pair in enumerate(inner["merges"])
    }
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([float(-ranks[piece]) if piece in ranks else -1e6 for piece in pieces])
    writer.add_token_types([kinds.get(piece, 6 if piece.startswith("<0x") else 1) for piece in pieces])
    for name in ("bos", "eos"):
        getattr(writer, f"add_{name}_token_id")(getattr(tokenizer, f"{name}_token_id"))
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(space)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_by_llama_cpp(path, texts):
    """The tokens of texts by llama.cpp, of a file without a model too."""
    model, found = LlamaModel(path, vocabulary_only=True), (ctypes.c_int32 * 512)()
    split = []
    for text in map(str.encode, texts):
        count = model.lib.llama_tokenize(model.vocabulary, text, len(text), found, 512, False, True)
        split.append(found[:count])
    return split
