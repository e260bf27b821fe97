"""A model that is in memory already, and its tokenizer, as if they had been loaded by name."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tezo.directions.targets import frozen_notice
from tezo.errors import RequestError
from tezo.forward import is_changed_beside, settle
from tezo.models.gguf_files import settle_gguf
from tezo.models.identity import fingerprint
from tezo.models.kinds import choose_kind
from tezo.models.loading import DTYPES, LoadedModel, emulation_notice, set_padding
from tezo.models.lora import has_adapter, settle_adapter
from tezo.progress.meter import LOADING, current, watch


def from_objects(model: Any, tokenizer: Any, kind: str = "auto", *, keep: bool = True) -> LoadedModel:
    """The model and the tokenizer themselves, not copies.

    The model is put into evaluation mode and stays on its device and in its dtype. A tokenizer without a padding
    token gets one.

    Args:
        model: a model of transformers, whose weights are all that it computes with.
        tokenizer: its tokenizer.
        kind: one of `Kind`; "auto": by the class of the model.
        keep: whether what a run or optimizer that is gone has trained is added to the weights; else it is dropped.

    Raises:
        RequestError: it is another object or of no known kind, a tokenizer is missing, or the model computes with more
            than its weights: with layers of PEFT, an attached adapter, or what an optimizer has trained.
    """
    if not isinstance(model, PreTrainedModel):
        raise RequestError(
            f"model is {type(model).__name__}; give a folder, a hub name or a model of transformers "
            "(of a compiled model or one with an adapter of PEFT, the model inside)."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = repr(tokenizer) if isinstance(tokenizer, str) else type(tokenizer).__name__
        given = "not set" if tokenizer is None else given
        raise RequestError(
            f"tokenizer is {given}, and model is an object; give its tokenizer, as AutoTokenizer.from_pretrained "
            "returns it (of a processor, its .tokenizer)."
        )
    kept = [settle(model.parameters(), keep=keep), settle_adapter(model, keep=keep)]
    _check_plain(model)
    settle_gguf(model)
    found = choose_kind(kind, [type(model).__name__], model.config)
    set_padding(type(model).__name__, model, tokenizer, found)
    notices = [SETTLED] * any(kept) + frozen_notice(model) + emulation_notice(model)
    watch(model)
    with current().phase(LOADING):
        made = fingerprint(model, found, tokenizer)
    return LoadedModel(model.eval(), tokenizer, found, made, tuple(notices))


SETTLED = (
    "the model had been tuned by a run or optimizer that is gone: its change was added to the weights, from which "
    "this one begins; close() it before it goes to begin with the weights as they were."
)
"""Notice on what `settle` has kept."""


def dtype_name(model: Any) -> str:
    """The data type of the weights as `model.dtype` of a recipe has it."""
    own = getattr(model, "dtype", None) or next(model.parameters()).dtype  # only models of transformers have the first
    return next((name for name, dtype in DTYPES.items() if dtype == own), "auto")


def _check_plain(model: nn.Module) -> None:
    """An error where the model computes with more than its weights."""
    if is_changed_beside(model.parameters()):
        raise RequestError(
            "model has been tuned by another run or optimizer, whose change is not in the weights; call that one's "
            "merge() to keep it, or close() to drop it."
        )
    if has_adapter(model):
        raise RequestError(
            "model has an adapter attached; take it off (remove() of each handle, or close() of its run), or give a "
            "model that has it merged."
        )
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise RequestError(
            "model has layers of PEFT; give the base model, and peft='lora', 'prefix' or 'prompt' for a new adapter."
        )
