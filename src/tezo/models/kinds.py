"""The kinds of model, by how they answer."""

from collections.abc import Sequence
from typing import Literal

Kind = Literal["causal", "masked", "encoder"]
"""How a model answers: by continuing a text, by filling in a mask, or by the likeness of embeddings."""


def kind_of(architectures: Sequence[str]) -> Kind:
    """How a model answers, by the names of its classes."""
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return "causal"
    return "masked" if any(name.endswith("ForMaskedLM") for name in architectures) else "encoder"
