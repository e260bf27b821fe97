"""A model ready for backpropagation, to be set beside steps without: an adapter, and gradient checkpointing."""

import warnings
from typing import Any, Literal

from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.peft import add_adapter


def trainable(model: Any, peft: Literal["none", "lora"], *, checkpointed: bool) -> Any:
    """The model with a new adapter, ready for a backward pass; the given one is changed in place.

    Args:
        model: a causal model.
        peft: kind of the adapter; "none": the model itself is trained.
        checkpointed: whether activations are recomputed in the backward pass.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT and transformers call checkpointing by two names
        adapted = add_adapter(LoadedModel(model, None, "causal"), ModelConfig(name="", peft=peft), seed=0).model
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return adapted
