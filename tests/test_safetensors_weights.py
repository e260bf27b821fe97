"""Weights of a folder: in few bits they are what their scales make of them, or are refused with their form."""

import pytest
import torch
import transformers
from few_bits import LARGEST, LAYER, SHAPES, in_few_bits, in_groups, rewritten
from folders import bpe_tokenizer, saved
from gguf_files import tiny_llama
from safetensors.torch import load_file

from tezo.models.in_file import load_folder
from tezo.models.safetensors_weights import SafetensorsWeights
from tezo.system.errors import RequestError


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = bpe_tokenizer()
    saved(tiny_llama(64 * -(-len(tokenizer) // 64)), tokenizer, folder)
    return folder


def weights_of(folder):
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig.from_pretrained(folder))
    return SafetensorsWeights([folder / "model.safetensors"], model)


@pytest.mark.parametrize("kind", LARGEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_in_few_bits_are_multiplied_by_their_scales(plain, tmp_path, kind, shape):
    folder = rewritten(plain, tmp_path, in_few_bits(kind, shape))
    stored, before = (load_file(path / "model.safetensors") for path in (folder, plain))
    weights = weights_of(folder)
    assert weights.why_not is None
    for name in (name for name in weights if "proj" in name):
        scales = stored[f"{name}_scale"].reshape(-1).expand(len(before[name])).tolist()
        pairs = zip(scales, stored[name].float().tolist(), strict=True)
        rows = [[scale * number for number in row] for scale, row in pairs]
        torch.testing.assert_close(weights[name], torch.tensor(rows), rtol=1e-6, atol=0)
        assert (weights[name] - before[name]).abs().max() < 0.15 * before[name].abs().max()
    assert all(weights[name].dtype == torch.float32 for name in weights)


def test_torch_computes_with_a_folder_in_few_bits_as_with_its_weights_in_full(plain, tmp_path):
    loaded, _ = load_folder(str(rewritten(plain, tmp_path, in_few_bits(torch.float8_e4m3fn, "rows x 1"))))
    model, weights = transformers.AutoModelForCausalLM.from_pretrained(plain), weights_of(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        ids = torch.tensor([[5, 6, 7, 8]])
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, model(input_ids=ids).logits)


def renamed(tensors):
    tensors[LAYER.replace("weight", "qweight")] = tensors.pop(LAYER)


def packed(tensors):
    tensors[LAYER] = torch.zeros(1024, 1, dtype=torch.uint8)


def without_scale(tensors):
    tensors[LAYER] = tensors[LAYER].to(torch.float8_e4m3fn)


def with_zero_point(tensors):
    in_few_bits(torch.int8, "rows")(tensors)
    tensors[f"{LAYER}_zero_point"] = torch.zeros(32, 1, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, f"it has no {LAYER}"),
        (packed, rf"{LAYER} is packed: \[1024, 1\] of U8 for \[32, 64\]"),
        (without_scale, f"{LAYER} is in F8_E4M3 without {LAYER}_scale"),
        (with_zero_point, f"{LAYER} is in I8 with a zero point"),
        (in_groups, rf"{LAYER} is in I8 with scales \[32, 2\]"),
    ],
)
def test_other_forms_are_refused_and_not_taken_for_weights(plain, tmp_path, change, said):
    weights = weights_of(rewritten(plain, tmp_path, change))
    with pytest.raises(RequestError, match=said):
        weights[LAYER]
    assert weights.why_not is not None and LAYER in weights.why_not
    assert weights["model.norm.weight"].shape == (32,)
    with pytest.raises(KeyError):
        weights["model.layers.7.mlp.down_proj.weight"]
