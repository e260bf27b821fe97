"""The kinds of model: causal, masked and encoder."""

from collections.abc import Sequence
from typing import Literal

Kind = Literal["causal", "masked", "encoder"]
"""How a model answers: it continues a text, fills in a mask, or compares embeddings."""


def kind_of(architectures: Sequence[str]) -> Kind:
    """The kind of a model with these class names (`config.architectures` of transformers)."""
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return "causal"
    return "masked" if any(name.endswith("ForMaskedLM") for name in architectures) else "encoder"


def is_unused(name: str) -> bool:
    """Whether no loss depends on the parameter: poolers, which some files lack, are read by classification heads."""
    return "pooler" in name.split(".")
