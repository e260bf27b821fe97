"""Writes a folder with quantised weights, in an environment with llmcompressor and auto-round.

    PYTHON benchmarks/quantise.py FOLDER SCHEME OUT

A scheme is of `SCHEMES`. Texts that calibrate it are a few made sentences. Prints the tool and its version.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCHEMES = {
    "FP8_DYNAMIC": "llmcompressor", "W4A16": "llmcompressor", "auto_gptq": "auto-round", "auto_awq": "auto-round",
    "W8A8": "llmcompressor", "FP8": "llmcompressor", "W8A16": "llmcompressor",
}  # fmt: skip
"""Scheme -> tool; of auto-round the formats of an export, in W4A16."""


def main() -> None:
    """Reads a folder, and writes another."""
    source, scheme, out = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if SCHEMES[scheme] == "auto-round":
        from auto_round import AutoRound

        rounding = AutoRound(model, tokenizer, scheme="W4A16", iters=0, device_map="cpu", disable_opt_rtn=True)
        rounding.quantize_and_save(out, format=scheme)
        (written,) = Path(out).rglob("model.safetensors")
        for path in [*written.parent.iterdir()]:
            path.rename(Path(out) / path.name)
    else:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

        texts = [f"Row {i} of these rows has the answer {i * 7 % 13}, and so it goes on." for i in range(16)]
        data = Dataset.from_list([dict(tokenizer(text)) for text in texts])
        modifier = GPTQModifier if scheme == "W4A16" else QuantizationModifier
        recipe = modifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        needs_texts = scheme in ("FP8", "W8A8", "W4A16")
        given = {"dataset": data, "num_calibration_samples": len(texts)} if needs_texts else {}
        oneshot(model=model, recipe=[recipe], **given)
        model.save_pretrained(out, save_compressed=True)
        tokenizer.save_pretrained(out)
    print(f"{SCHEMES[scheme]} {version(SCHEMES[scheme])}")


if __name__ == "__main__":
    main()
