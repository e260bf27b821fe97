"""Quantises a folder's model in the forms that servers read, by the field's own tools.

    python benchmarks/quantised_folders.py FOLDER OUT FORM

For the python of an environment with llmcompressor, auto-round and gptqmodel: it imports nothing of tezo.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCHEMES = {
    "FP8, a scale for each row": "FP8_DYNAMIC",
    "FP8, a scale for all inputs": "FP8",
    "INT8 weights and inputs": "W8A8",
    "compressed-tensors, 4 bits": "W4A16",
    "compressed-tensors, 8 bits": "W8A16",
}
"""Form -> scheme of llmcompressor."""
ROUNDED = {"GPTQ's format, 4 bits": "auto_gptq", "AWQ's format, 4 bits": "auto_awq"}
"""Form -> format of auto-round. Both have the same weights, rounded to nearest."""
TEXTS = [f"Row {number} of the rows: the answer is {number * 7 % 13}, and so on it goes." for number in range(16)]


def compress(model: Any, tokenizer: Any, out: Path, scheme: str) -> None:
    """Writes a folder of compressed-tensors: 4 bits by GPTQ's algorithm, others rounded to nearest."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    modifier = GPTQModifier if scheme == "W4A16" else QuantizationModifier
    rows = [dict(tokenizer(text, truncation=True, max_length=48)) for text in TEXTS]
    oneshot(
        model=model,
        recipe=[modifier(targets="Linear", scheme=scheme, ignore=["lm_head"])],
        dataset=Dataset.from_list(rows),
        num_calibration_samples=len(rows),
        max_seq_length=48,
    )
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def round_to_nearest(model: Any, tokenizer: Any, out: Path, form: str) -> None:
    """Writes a folder in GPTQ's or AWQ's own format, of 4 bits in groups of 128."""
    from auto_round import AutoRound

    by = AutoRound(model, tokenizer, scheme="W4A16", iters=0, device_map="cpu", disable_opt_rtn=True)
    by.quantize_and_save(str(out), format=form)


def main() -> None:
    """Writes one folder."""
    folder, out, form = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if form in ROUNDED:
        round_to_nearest(model, tokenizer, out, ROUNDED[form])
    else:
        compress(model, tokenizer, out, SCHEMES[form])


if __name__ == "__main__":
    main()
