"""The kinds of model: causal, masked, encoder and classifier."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from tezo.errors import RequestError

Kind = Literal["causal", "masked", "encoder", "classifier"]
"""How a model answers: it continues a text, fills in a mask, compares embeddings, or has a head of trained classes."""

_ENDINGS: dict[str, Kind] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "classifier",
    "Model": "encoder",
}
"""Ending of a class name of transformers -> kind; the first that fits counts."""


def kind_of(architectures: Sequence[str]) -> Kind | None:
    """The kind of a model with these class names (`config.architectures` of transformers); None if none fits."""
    fitting = (kind for ending, kind in _ENDINGS.items() if any(name.endswith(ending) for name in architectures))
    return next(fitting, None)


def choose_kind(asked: str, architectures: Sequence[str], config: Any) -> Kind:
    """The kind that `model.kind` asks for, or for "auto" the kind of the architecture.

    Args:
        asked: a kind, or "auto".
        architectures: class names of the model; none are taken for those of an encoder.
        config: its configuration.

    Raises:
        RequestError: there is no such kind, or no kind is the model's.
    """
    name = ", ".join(architectures) or type(config).__name__
    kind = asked if asked != "auto" else kind_of(architectures) if architectures else "encoder"
    known: Kind
    for known in get_args(Kind):
        if kind == known:
            _check_supported(name, known, config)
            return known
    if kind is not None:
        raise RequestError(f"model.kind is {kind!r}; it must be auto, {', '.join(get_args(Kind))}.")
    _check_supported(name, "encoder", config)
    raise RequestError(
        f"model.name: {name} is no causal, masked or classification model, and no encoder without a head; set "
        "model.kind to what it is to be used as."
    )


def _check_supported(name: str, kind: Kind, config: Any) -> None:
    """An error for encoder-decoders, for images and sound unless in a causal model, and for heads without classes."""
    if getattr(config, "is_encoder_decoder", False):
        raise RequestError(f"model.name: {name} is an encoder-decoder, which is not supported; give another model.")
    if kind != "causal" and (hasattr(config, "vision_config") or hasattr(config, "audio_config")):
        raise RequestError(
            f"model.name: {name} takes images or sound besides text; give another model, or set model.kind=causal if "
            "transformers has a causal model of it, to tune that on text."
        )
    if kind == "classifier" and (config.num_labels < 2 or config.problem_type == "multi_label_classification"):
        raise RequestError(
            f"model.name: the head of {name} is for {config.problem_type or 'regression'}, which is not supported; "
            "give a model whose classes exclude each other, or set model.kind=encoder."
        )


def is_unused(name: str, kind: Kind) -> bool:
    """Whether no loss of this kind of model depends on the parameter: only classification heads read poolers."""
    return kind != "classifier" and "pooler" in name.split(".")
