"""The kinds of model, the section `model` of a recipe, and the labels that lie beside a merged model."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, read_object, write_file

Kind = Literal["causal", "masked", "encoder", "classifier"]
"""How a model answers: it continues a text, fills in a mask, compares embeddings, or has a head of trained classes."""

AskedKind = Kind | Literal["auto"]
"""A value of `model.kind`; "auto" is the kind of the architecture."""

_ENDINGS: dict[str, Kind] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "classifier",
    "Model": "encoder",
}
"""Ending of a class name of transformers -> kind; the first that fits counts."""


def kind_of(architectures: Sequence[str]) -> Kind | None:
    """Returns the kind of a model with these class names (`config.architectures`); None if none fits."""
    fitting = (kind for ending, kind in _ENDINGS.items() if any(name.endswith(ending) for name in architectures))
    return next(fitting, None)


def choose_kind(asked: AskedKind, architectures: Sequence[str], config: Any) -> Kind:
    """Returns the kind that `model.kind` asks for, or for "auto" the kind of the model's class names.

    A model without class names is taken for an encoder.

    Raises:
        RequestError: it is an encoder-decoder, is not causal and takes images or sound, has a head without classes, or
            is of no kind.
    """
    name, found = ", ".join(architectures) or type(config).__name__, kind_of(architectures or ["Model"])
    kind = (found or "encoder") if asked == "auto" else asked
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
    if asked == "auto" and found is None:
        raise RequestError(
            f"model.name: {name} is no causal, masked or classification model, and no encoder without a head; set "
            "model.kind to what it is to be used as."
        )
    return kind


def is_unused(name: str, kind: Kind) -> bool:
    """Returns whether no loss of this kind of model depends on a parameter: only classification heads read poolers."""
    return kind != "classifier" and "pooler" in name.split(".")


ADDRESS = "http"
"""Kind of an engine that is a server, or several, named by addresses."""


def engine_kind(engine: str) -> str:
    """Returns the kind of a value of `model.engine`: itself, or `ADDRESS`."""
    return ADDRESS if engine.startswith(("http://", "https://")) else engine


IN_MEMORY = "in memory"
"""Stands for the name of an object that was given to `tezo.train`, and has no name or file."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The section `model`: the base model, and where and how its weights are held."""

    name: str
    """Model folder, GGUF file, hub name, embedded:smollm2-135m, or embedded:all-minilm-l6-v2."""
    engine: str = "torch"
    """Program that runs the forward passes: torch, llama.cpp (of a GGUF file), or addresses of vLLM servers."""
    workers: int = 0
    """Number of Ray actors that share the passes, each with a separate engine. Default 0: only this process."""
    kind: Literal["auto", "causal", "masked", "encoder", "classifier"] = "auto"
    """Kind of model: causal, masked, encoder or classifier. Default auto: by its architecture."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Data type of the weights. Default auto: as stored, or float32 where a GGUF file has them packed."""
    device: str = "auto"
    """Device to compute on, such as cpu or cuda. Default auto: the first GPU, otherwise the CPU."""
    quantization: Literal["none", "nf4", "int8", "int8wo"] = "none"
    """Quantization of the linear layers: nf4 and int8 by bitsandbytes, int8wo (weights only) by torchao."""
    placement: Literal["device", "spread", "cpu", "disk", "shards"] = "device"
    """Where weights are kept: device; spread over all devices; cpu or disk (offloaded); shards (FSDP2, by torchrun)."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    untie_head: bool = False
    """Whether an output head tied to the input embeddings gets separate weights, to be tuned (MeZO's RoBERTa)."""
    peft: Literal["none", "lora", "prefix", "prompt"] = "none"
    """Train a PEFT adapter instead of the model: lora (in PEFT's default layers), prefix or prompt."""
    lora_rank: int = 8
    """Rank of the LoRA adapter. MeZO uses 8."""
    lora_alpha: int = 16
    """LoRA alpha; the adapter is scaled by alpha / rank. MeZO uses 16."""
    prefix_length: int = 5
    """Virtual tokens of the prefix or the prompt. MeZO uses 5."""


MEAN = "mean"
"""The one pooling: an embedding is the mean of the last hidden states over the tokens of a text."""
_LABELS_FILE = "tezo_labels.json"


@dataclass(frozen=True)
class CarriedLabels:
    """How a model was tuned to be asked, written beside the weights of a merged model.

    Attributes:
        label_words: label -> word, description or class, as data.label_words has them.
        template: as data.template has it; None: the default of the kind of model.
        pooling: of an encoder, how token states become an embedding; None for other kinds.
        temperature: of the probabilities of labels, fitted to the dev rows of the run; None: it has fitted none.
    """

    label_words: Mapping[str, str]
    template: str | None = None
    pooling: str | None = None
    temperature: float | None = None

    def write(self, folder: Path) -> None:
        """Writes them into the folder of a model."""
        write_file(folder / _LABELS_FILE, (json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode())


def read_labels(folder: Path) -> CarriedLabels | None:
    """Reads the labels in the folder of a model; returns None if it has none.

    Raises:
        RequestError: the file is damaged, or names a pooling that is not known.
    """
    path = folder / _LABELS_FILE
    if not path.exists():
        return None
    try:
        found = read_object(path.resolve())
        words, template, pooling = found.get("label_words"), found.get("template"), found.get("pooling")
        if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
            raise UntrustedError("label_words is no object of strings")
        if not isinstance(template, str | None):
            raise UntrustedError("template is no string")
        if pooling not in (None, MEAN):
            raise UntrustedError(f"pooling is {pooling!r}, and {MEAN} is known")
        temperature = found.get("temperature")
        if temperature is not None and not (isinstance(temperature, float) and 0 < temperature < math.inf):
            raise UntrustedError("temperature is not a positive number")
    except UntrustedError as error:
        raise RequestError(
            f"model.name: {path} is not the file of a merged run ({error}); export the run again."
        ) from None
    return CarriedLabels(words, template, pooling, temperature)
