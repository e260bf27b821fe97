"""The identity of a base model, in digests: its weights, its configuration and its tokenizer.

A run has the fingerprint of its base, and is opened on no other one.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import tokenizers
import transformers
from torch import nn

from tezo.models.gguf_model import GgufForCausalLM
from tezo.models.kinds import Kind, is_unused
from tezo.models.stored import kept_digest
from tezo.system.digests import digest
from tezo.system.errors import RequestError

Fingerprint = Mapping[str, str]
"""Part -> its digest, or its JSON text where that is short. Parts are "config.KEY", "generation.KEY", "tokenizer.NAME";
"weights", as they are in memory, and "form", their data type there; "stored", of the files that have the weights;
"saved.NAME", of what changes no figure and is saved with a tuned model; and "versions"."""

_BY_FILE = GgufForCausalLM.__name__
_SHORT = 120
"""Longest JSON text of a setting that stands for itself, and that a message shows, in characters."""
_NO_EFFECT = frozenset(
    {"dtype", "torch_dtype", "quantization_config", "architectures", "transformers_version", "use_cache"}
)
"""Keys of a configuration that the settings of a run have too, or that change no number."""
_ENDS = ("eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")
"""Keys of a generation configuration that greedy decoding goes by and no option of this library replaces."""
_SAVED = ("architectures", "use_cache")
"""Keys of a configuration that change no number, and that no setting of a run replaces where a model is saved."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def fingerprint(
    model: Any,
    kind: Kind,
    tokenizer: Any = None,
    *,
    stored: str | None = None,
    loaded_from: str | None = None,
    in_memory: bool = True,
) -> dict[str, str]:
    """Returns the fingerprint of a model as it is loaded, the same on every device and placement.

    Args:
        model: of transformers. Packed weights count as they are packed; weights that no loss of this kind depends on do
            not count.
        kind: of the model.
        tokenizer: of the model.
        stored: digest of the files that the weights were read from; None: they are not known.
        loaded_from: names the files and the way of loading (see `tezo.models.stored.stamp`), where the digest of the
            weights in memory is to be kept in the cache folder, and not made again.
        in_memory: whether the weights are in memory; otherwise they stay in their files.
    """
    parts = {"config.class": type(model).__name__}
    if stored is not None:
        parts["stored"] = stored
    if in_memory:
        packed = getattr(model.config, "quantization_config", None) is not None
        parts["form"] = f"{model.dtype}{', packed' * packed}".removeprefix("torch.")
        parts["weights"] = _weights(model, kind) if loaded_from is None else _kept_weights(model, kind, loaded_from)
    parts |= {f"config.{key}": _text(value) for key, value in _settings(model.config.to_dict()).items()}
    parts["saved.configuration"] = _text({key: getattr(model.config, key, None) for key in _SAVED})
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        parts["saved.generation_configuration"] = _text(_settings(generation.to_dict()))
    if generation is not None and kind == "causal":
        parts |= {f"generation.{key}": _text(getattr(generation, key, None)) for key in _ENDS}
    if tokenizer is not None:
        parts |= {f"tokenizer.{name}": _text(value) for name, value in _of_tokenizer(tokenizer).items()}
    return parts | {"versions": f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"}


def check_model(
    found: Mapping[str, Any], loaded: Fingerprint, *, packed_alike: bool = True, saved: bool = False
) -> None:
    """Raises a `RequestError` if a base model is not the one of a run; the message names the difference.

    Weights count as they are in memory, where both have them in the same form, and else as they are stored; those of a
    model that was in memory from the start, and is there in another form now, cannot be compared. Parts that only one
    of the two has, the rules of the tokenizer and what is only saved count where both were made by the same versions of
    libraries: a new one has settings that an old one had not.

    Args:
        found: the fingerprint that the run has kept.
        loaded: the fingerprint of the model that is loaded; parts of the tokenizer may be missing.
        packed_alike: whether equal weights would have been packed into equal numbers.
        saved: whether parts that are saved with a tuned model, and change no figure, count too.
    """
    classes = [part.get("config.class") for part in (found, loaded)]
    if classes[0] != classes[1] and _BY_FILE in classes:
        engines = ["llama.cpp" if each == _BY_FILE else "torch" for each in classes]
        forms = "of export, gguf and gguf-lora" if classes[0] == _BY_FILE else "of export, lora and merged"
        raise RequestError(
            f"model.engine: the run began in {engines[0]}, where layers of this file have other names than in "
            f"{engines[1]}; set model.engine={engines[0]} ({forms} are its formats)."
        )
    alike = found.get("versions") == loaded["versions"]
    in_one_form = packed_alike and found.get("form") == loaded.get("form")
    ways = (way for way in ("weights", "stored") if way in found and way in loaded and (in_one_form or way == "stored"))
    weights = next(ways, None)
    if weights is not None and found[weights] != loaded[weights]:
        raise _not_as_it_was("its weights are not those that the run began with")
    compared = (found.keys() | loaded.keys()) - {"versions", "form", "weights", "stored"}
    if not any(part.startswith("tokenizer.") for part in loaded):
        compared = {part for part in compared if not part.startswith("tokenizer.")}
    if not (saved and alike):
        compared = {part for part in compared if not part.startswith("saved.")}
    for part in sorted(compared, key=lambda part: (part.startswith("saved."), part == "tokenizer.rules", part)):
        before, now = found.get(part), loaded.get(part)
        if before == now or not (alike or (part in found and part in loaded and part != "tokenizer.rules")):
            continue
        section, _, name = part.partition(".")
        if section == "tokenizer":
            fault = f"the {name.replace('_', ' ')} of its tokenizer differ from what the run began with"
        elif section == "saved":
            fault = f"its {name.replace('_', ' ')}, which is saved with the model, is not what the run began with"
        else:
            shown = [repr(value)[1 : _SHORT + 1].rstrip("'") if value else "not set" for value in (now, before)]
            where = "configuration" if section == "config" else "generation configuration"
            fault = f"{name} is {shown[0]} in its {where}, and the run began with {shown[1]}"
        raise _not_as_it_was(fault)


def _not_as_it_was(fault: str) -> RequestError:
    return RequestError(f"model.name: {fault}; give the base model as it was.")


def _weights(model: nn.Module, kind: Kind) -> str:
    """Of parameters and of buffers that are stored with them."""
    # state_dict() would add changes that an optimizer keeps beside the weights
    computed = {
        f"{name}.{buffer}".lstrip(".")
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
    }
    stored = {name: buffer for name, buffer in model.named_buffers() if name not in computed}
    tensors = dict(model.named_parameters()) | stored
    return digest({name: tensor for name, tensor in tensors.items() if not is_unused(name, kind)})


def _kept_weights(model: nn.Module, kind: Kind, loaded_from: str) -> str:
    return kept_digest(f"{loaded_from} {kind} {transformers.__version__}", lambda: _weights(model, kind))


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what changes no number, and without private keys."""
    return {
        str(key): _settings(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if key not in _NO_EFFECT and not str(key).startswith("_")
    }


def _of_tokenizer(tokenizer: Any) -> dict[str, Any]:
    inner = getattr(tokenizer, "backend_tokenizer", None)
    text = "" if inner is None else inner.to_str()
    tokens = {role: (getattr(tokenizer, f"{role}_token"), getattr(tokenizer, f"{role}_token_id")) for role in _ROLES}
    sides = [tokenizer.padding_side, tokenizer.truncation_side, int(tokenizer.model_max_length)]
    return {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "rules": text[text.find('"added_tokens"') :],  # behind truncation and padding, which are of its last call
        "special_tokens": [tokens, sorted(map(str, tokenizer.all_special_tokens)), sides],
        "chat_template": getattr(tokenizer, "chat_template", None),
    }


def _text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= _SHORT else hashlib.sha256(text.encode()).hexdigest()
