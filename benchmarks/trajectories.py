"""Prints a digest of what each method computes, so that two checkouts can be compared to the bit.

    python benchmarks/trajectories.py > before.txt    # in one checkout; then in the other, and `diff`

Each line is of a small OPT with random weights: the losses of eleven steps and the tuned weights at the end, for each
method, with shared directions and with one for each example, in float32 and bfloat16, with a closure of the library and
a plain one, over refreshes of the factors.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

import tezo

SHAPE = {
    "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "word_embed_proj_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
STEPS = 11


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(label, method, options)."""
    for name, method in tezo.METHODS.items():
        options: dict[str, Any] = {"lr": 1e-4, "seed": 3}
        known = method.options()
        if "rank" in known:
            options["rank"] = 4
        if "scale" in known:
            options["scale"] = "unit"
        if "lazy_update_interval" in known and name != "head-feedback":
            options["lazy_update_interval"] = 4
        yield name, name, options
        if "basis" in known:
            yield f"{name}, activation", name, options | {"basis": "activation"}
        if name in ("tezo", "tezo-m", "tezo-cadam", "lozo", "lozo-m", "head-feedback"):
            yield f"{name}, per example", name, options | {"directions": "per-example"}
        if name not in ("head-feedback", "tezo-cadam") and name not in ("mezo-conservative", "zo-adamu"):
            yield f"{name}, 2 directions", name, options | {"num_directions": 2}
        yield f"{name}, all parameters", name, options | {"targets": ("all",)}


def digest_of(method: str, options: dict[str, Any], dtype: torch.dtype, *, plain: bool) -> str:
    """A digest of the losses and of the weights at the end."""
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**SHAPE)).to(dtype).eval()
    optimizer = tezo.METHODS[method].build(model, **options)
    found = hashlib.sha256()
    for step in range(STEPS):
        rows = torch.arange(48).view(3, 16) * (step + 1) % 61
        batch = {"input_ids": rows, "labels": rows}

        def loss(batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        closure: Callable[[], Any] = loss if plain else tezo.closure(model, batch)
        found.update(repr(optimizer.step(closure)).encode())
    optimizer.merge()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.float().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Prints a line for each case."""
    torch.set_num_threads(1)
    for label, method, options in cases():
        for dtype in (torch.float32, torch.bfloat16):
            for plain in (False, True):
                try:
                    found = digest_of(method, options, dtype, plain=plain)
                except tezo.TezoError as error:
                    found = f"refused: {error}"
                print(
                    f"{label} | {str(dtype).removeprefix('torch.')} | {'plain' if plain else 'own'} closure | {found}"
                )


if __name__ == "__main__":
    main()
