"""An output head that is tied to the input embeddings, given weights of its own so that it can be tuned alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tezo.directions.targets import ALL, ALL_LINEAR, select_targets
from tezo.errors import RequestError


def untie_head(model: Any) -> list[str]:
    """Copies the weights that are tied to others, in place; the configuration then says so, and a saved model too.

    MeZO's RoBERTa is tuned with such a head. A head that has weights of its own is left as it is.

    Args:
        model: a model of transformers.

    Returns:
        Notices for the user.

    Raises:
        RequestError: the model has no output head, or its weights are offloaded.
    """
    if model.get_output_embeddings() is None:
        raise RequestError("model.untie_head is true, but this model has no output head; leave it out.")
    tied = dict(model.all_tied_weights_keys)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    own = {name: source for name, source in tied.items() if name not in model.all_tied_weights_keys}
    return [
        f"model.untie_head: {name} has values of its own, no longer those of {source} ({_copy(model, name)} MB more)."
        for name, source in own.items()
    ]


def _copy(model: nn.Module, name: str) -> str:
    """Gives the module of a parameter a copy of it; returns the size in MB."""
    parent, _, attribute = name.rpartition(".")
    weight = model.get_parameter(name)
    if weight.is_meta:
        raise RequestError(
            f"model.untie_head is true, but {name} is offloaded; set model.placement=device, or leave it out."
        )
    copy = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    setattr(model.get_submodule(parent), attribute, copy)
    return f"{copy.nbytes / 1e6:.3g}"


def check_head_not_tied(model: Any, patterns: Sequence[str]) -> None:
    """An error where a pattern of `method.targets` means an output head that is tied, and so has another name."""
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        for pattern in patterns:
            named = pattern not in (ALL, ALL_LINEAR) and not pattern.startswith("!")
            if named and _selects(_with_parameter(name), pattern) and not _selects(model, pattern):
                raise RequestError(
                    f"method.targets: {pattern!r} is {name}, which is tied to {source}; name that one to tune both, or "
                    "set model.untie_head=true to tune the head alone."
                )


def _selects(model: nn.Module, pattern: str) -> bool:
    try:
        return bool(select_targets(model, (pattern,)))
    except RequestError:
        return False


def _with_parameter(name: str) -> nn.Module:
    """A module with one parameter, of this name."""
    *parents, attribute = name.split(".")
    module = nn.Module()
    module.register_parameter(attribute, nn.Parameter(torch.zeros(1, 1)))
    for parent in reversed(parents):
        outer = nn.Module()
        outer.add_module(parent, module)
        module = outer
    return module
