"""Models whose weights stay in their file: for engines, which read the file themselves.

Such a model has the modules and names of any other, with parameters on the meta device. Where torch runs it all the
same, for a look at a few rows, each layer's weights are unpacked for its own forward and dropped.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tezo.models.gguf import ARCHITECTURES, GgufWeights, gguf_tokenizer, reading_once
from tezo.models.identity import fingerprint, stamp
from tezo.models.loading import CLASSES, LoadedModel, loading, resolve_name, set_padding
from tezo.system.errors import RequestError
from tezo.system.files import NumberCache, default_cache
from tezo.system.progress import LOADING, current


class Unread(Mapping[str, Tensor]):
    """Weights by the names of parameters, whose file is opened at the first use and closed by `close`.

    Args:
        open_file: opens it.
    """

    def __init__(self, open_file: Callable[[], Mapping[str, Tensor]]) -> None:
        self._open = open_file

    @cached_property
    def _found(self) -> Mapping[str, Tensor]:
        return self._open()

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def close(self) -> None:
        """Closes the file, which the next use opens again."""
        vars(self).pop("_found", None)


def read_at_use(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Gives each module its own weights for its forward: parameters on the meta device stay the same objects."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class OwnWeights(ModelHook):  # type: ignore[misc]
        """Loads the weights of one module before its forward; its device is where `place_of` finds it."""

        execution_device = torch.device("cpu")

        def __init__(self, prefix: str, stored: dict[str, nn.Parameter]) -> None:
            self._prefix, self._stored = prefix, stored

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for name in self._stored:
                setattr(module, name, nn.Parameter(weights[f"{self._prefix}{name}"], requires_grad=False))
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            for name, stored in self._stored.items():
                setattr(module, name, stored)
            return output

    for prefix, module in model.named_modules():
        stored = dict(module.named_parameters(recurse=False))
        if stored:
            add_hook_to_module(module, OwnWeights(f"{prefix}.".lstrip("."), stored))


def load_in_file(name: str) -> tuple[LoadedModel, str]:
    """Returns (a model whose weights stay in its GGUF file, the path of the file).

    Raises:
        RequestError: it is no GGUF file, or not of an architecture in `ARCHITECTURES`.
    """
    from accelerate import init_empty_weights

    source = resolve_name(name)
    if not Path(source).is_file():
        raise RequestError(f"model.engine is llama.cpp, which reads GGUF files, and {name} is none; give such a file.")
    with current().phase(LOADING), loading(name), reading_once():
        before = stamp(source)
        config = AutoConfig.from_pretrained(source, gguf_file=source)
        with init_empty_weights(include_buffers=False):
            model = CLASSES["causal"].from_config(copy.deepcopy(config), dtype=torch.float32).eval()
        if type(model).__name__ not in ARCHITECTURES:
            raise RequestError(
                f"model.engine is llama.cpp, for which layers of {', '.join(ARCHITECTURES)} have been compared, and "
                f"{name} is {type(model).__name__}; leave model.engine out."
            )
        model.requires_grad_(True)
        model.tie_weights()
        model.name_or_path = model.config.name_or_path = source
        tokenizer, notices = gguf_tokenizer(source)
        set_padding(name, model, tokenizer, "causal")
        current().watch(model)
        made = fingerprint(model, "causal", tokenizer, file=_digest(source, before))
        read_at_use(model, Unread(partial(GgufWeights, source, model)))
    return LoadedModel(model, tokenizer, "causal", made, tuple(notices)), source


def _digest(source: str, known_as: str | None) -> str:
    """Returns the SHA-256 of a file, which is kept in the cache folder under `known_as`."""
    cache = NumberCache(default_cache(), "weights")
    key = hashlib.sha256(f"file {known_as}".encode()).hexdigest()
    if known_as is not None and key in cache.numbers:
        return f"{cache.numbers[key]:064x}"
    with Path(source).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if known_as is not None and known_as == stamp(source):
        cache.numbers[key] = int(found, 16)
        cache.save()
    return found
