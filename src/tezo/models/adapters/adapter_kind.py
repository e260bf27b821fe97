"""What a kind of adapter is: the models that take it, PEFT's settings for it, and its initial values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo.errors import RequestError
from tezo.models.kinds import Kind
from tezo.models.loading import LoadedModel
from tezo.models.model_config import ModelConfig


@dataclass(frozen=True)
class NewAdapter:
    """An adapter that is to be added to a model.

    Attributes:
        settings: PEFT's settings.
        start_VD: initial values of V virtual tokens, float32; None: the adapter has none, and starts as PEFT draws it.
    """

    settings: Any
    start_VD: Tensor | None = None


def _nothing(model: Any) -> None:
    """Does nothing."""
    del model


@dataclass(frozen=True)
class AdapterKind:
    """A kind of PEFT's adapters.

    Attributes:
        models: the kinds of model that take it.
        make: (base model, configuration, seed) -> the adapter that is to be added.
        merges: whether its change can be merged into the weights of the base.
        settle: called on PEFT's model with the new adapter.
    """

    models: tuple[Kind, ...]
    make: Callable[[LoadedModel, ModelConfig, int], NewAdapter]
    merges: bool
    settle: Callable[[Any], None] = _nothing


def import_peft() -> Any:
    """The module `peft`; `RequestError` if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise RequestError(f"model.peft needs PEFT ({error}); pip install peft.") from None
    return peft


def virtual_task_type(kind: Kind) -> str:
    """PEFT's type of task with which its model puts virtual tokens in front of the input."""
    return "CAUSAL_LM" if kind == "causal" else "FEATURE_EXTRACTION"


def random_tokens(loaded: LoadedModel, count: int, seed: int) -> Tensor:
    """`count` token ids (1, count), uniform over the rows of the input embeddings, on the model's device.

    Raises:
        RequestError: they leave no position for a text.
    """
    if count >= loaded.positions:
        raise RequestError(
            f"model.prefix_length is {count}, but the model has {loaded.positions} positions for it and the text; "
            "lower it."
        )
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(rows, (1, count), generator=draw).to(loaded.device)
