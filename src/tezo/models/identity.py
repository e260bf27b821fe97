"""What a base model is, in digests: its weights, its configuration and its tokenizer.

A run has the fingerprint of its base, and is opened on no other one.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn

from tezo.models.kinds import Kind, is_unused
from tezo.system.digests import digest
from tezo.system.errors import RequestError
from tezo.system.files import NumberCache, default_cache

Fingerprint = Mapping[str, str]
"""Part -> its digest, or its JSON text where that is short. Parts are "weights", "config.KEY", "generation.KEY",
"tokenizer.NAME"; "form", in which the weights count, and "versions"."""

_SHORT = 120
"""Longest JSON text of a setting that stands for itself, and that a message shows, in characters."""
_NO_EFFECT = frozenset(
    {"dtype", "torch_dtype", "quantization_config", "architectures", "transformers_version", "use_cache"}
)
"""Keys of a configuration that the settings of a run have too, or that change no number."""
_ENDS = ("eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")
"""Keys of a generation configuration that greedy decoding goes by and no option of this library replaces."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_JUST_NOW = 2.0
"""Seconds within which a file can change again and keep its time of change, on file systems with coarse clocks."""


def fingerprint(
    model: Any, kind: Kind, tokenizer: Any = None, *, loaded_from: str | None = None, file: str | None = None
) -> dict[str, str]:
    """Returns the fingerprint of a model as it is loaded, the same on every device and placement.

    Packed weights count as they are packed; weights that no loss of this kind depends on do not count. Where
    `loaded_from` names the files and the way of loading (see `stamp`), the digest of the weights is kept in the cache
    folder, and not made again. Weights that stay in their file count by `file`, its digest.
    """
    packed = getattr(model.config, "quantization_config", None) is not None
    weights, form = file, "in the file"
    if weights is None:
        weights = _weights(model, kind) if loaded_from is None else _kept_weights(model, kind, loaded_from)
        form = f"{model.dtype}{', packed' * packed}".removeprefix("torch.")
    parts = {
        "weights": weights,
        "form": form,
        "config.class": type(model).__name__,
    }
    parts |= {f"config.{key}": _text(value) for key, value in _settings(model.config.to_dict()).items()}
    generation = getattr(model, "generation_config", None)
    if generation is not None and kind == "causal":
        parts |= {f"generation.{key}": _text(getattr(generation, key, None)) for key in _ENDS}
    if tokenizer is not None:
        parts |= {f"tokenizer.{name}": _text(value) for name, value in _of_tokenizer(tokenizer).items()}
    return parts | {"versions": f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"}


def check_model(found: Mapping[str, Any], own: Fingerprint, *, weights: bool = True) -> None:
    """Raises a `RequestError` if a base model is not the one of a run; what differs is named.

    Weights count where both have them in the same form. Parts that only one of the two has, and the rules of the
    tokenizer, count where both were made by the same versions of libraries: a new one has settings that an old one had
    not.

    Args:
        found: the fingerprint that the run has kept.
        own: the fingerprint of the model that is loaded; parts of the tokenizer may be missing.
        weights: whether weights count at all.
    """
    alike = found.get("versions") == own["versions"]
    compared = (found.keys() | own.keys()) - {"versions", "form"}
    if not weights or found.get("form") != own["form"]:
        compared -= {"weights"}
    if not any(part.startswith("tokenizer.") for part in own):
        compared = {part for part in compared if not part.startswith("tokenizer.")}
    for part in sorted(compared, key=lambda part: (part != "weights", part == "tokenizer.rules", part)):
        before, now = found.get(part), own.get(part)
        if before == now or not (alike or (part in found and part in own and part != "tokenizer.rules")):
            continue
        section, _, name = part.partition(".")
        if section == "tokenizer":
            fault = f"the {name.replace('_', ' ')} of its tokenizer differ from what the run began with"
        elif section in ("config", "generation"):
            shown = [repr(value)[1 : _SHORT + 1].rstrip("'") if value else "not set" for value in (now, before)]
            where = "configuration" if section == "config" else "generation configuration"
            fault = f"{name} is {shown[0]} in its {where}, and the run began with {shown[1]}"
        else:
            fault = "its weights are not those that the run began with"
        raise RequestError(f"model.name: {fault}; give the base model as it was.")


def stamp(source: str) -> str | None:
    """Returns a digest of size, times and number of each file of a model; None where that does not tell a change.

    `source` is a folder, a file, or a name of the hub, of which the local copy counts.
    """
    path = Path(source)
    if not path.exists():
        found = try_to_load_from_cache(source, "config.json")
        if not isinstance(found, str):
            return None
        path = Path(found).parent
    files = [path] if path.is_file() else sorted(inside for inside in path.iterdir() if inside.is_file())
    states = [(str(file), file.stat()) for file in files]
    if not states or time.time() - max(max(s.st_mtime, s.st_ctime) for _, s in states) < _JUST_NOW:
        return None
    known = [(file, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_dev, s.st_ino) for file, s in states]
    return hashlib.sha256(repr(known).encode()).hexdigest()


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


def kept_digest(known_as: str, compute: Callable[[], str]) -> str:
    """Returns a digest in hexadecimal that is kept in the cache folder under a name, and computed the first time."""
    key = hashlib.sha256(known_as.encode()).hexdigest()
    cache = NumberCache(default_cache(), "weights")
    if key not in cache.numbers:
        cache.numbers[key] = int(compute(), 16)
        cache.save()
    return f"{cache.numbers[key]:064x}"


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
