"""Counts what a warm step passes through: files and functions of `src/tezo`, and the depth of the stack.

    python benchmarks/step_walk.py [METHOD ...]

Each method takes three steps on a small OPT with random weights and a step that is counted; the model's own frames and
those of torch are left out of the counts. The depth is of this
library's frames from `optimizer.step` on. With -v the files are named.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

import tezo

SOURCE = str(Path(tezo.__file__).parent)


@dataclass
class Walk:
    """What was passed through."""

    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    deepest: int = 0
    """Most frames of this library on the stack at once."""


@contextmanager
def walked() -> Iterator[Walk]:
    """Counts what is called while it is open."""
    walk, depth = Walk(), 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE):
            return
        if event == "call":
            depth += 1
            walk.deepest = max(walk.deepest, depth)
            walk.files.add(name[len(SOURCE) + 1 :])
            walk.functions.add(
                (name, frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
            )
        elif event == "return":
            depth -= 1

    sys.setprofile(see)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def walk_of(name: str) -> Walk:
    """The walk of a warm step of a method."""
    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=64,
            word_embed_proj_dim=32,
        )
    ).eval()
    batch = {"input_ids": torch.arange(32).view(2, 16)}
    batch["labels"] = batch["input_ids"]
    build: Callable[..., Any] = tezo.METHODS[name].build
    optimizer = build(model, lr=1e-6)
    closure = tezo.closure(model, batch)
    for _ in range(3):
        optimizer.step(closure)
    with walked() as walk:
        optimizer.step(closure)
    return walk


def main() -> None:
    """Prints a line for each method."""
    for name in [a for a in sys.argv[1:] if a[0] != "-"] or tezo.METHODS:
        walk = walk_of(name)
        print(f"{name:<18} {len(walk.files):>3} files {len(walk.functions):>4} functions {walk.deepest:>3} deep")
        if "-v" in sys.argv:
            print("  " + "\n  ".join(sorted(walk.files)))


if __name__ == "__main__":
    main()
