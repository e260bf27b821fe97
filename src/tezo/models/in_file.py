"""Models whose weights stay in their file: for engines, which read the file themselves.

Such a model has the modules and names of any other, with parameters on the meta device. If torch runs it nevertheless,
for a refresh on a few rows, each layer's weights are unpacked for its forward and dropped.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tezo.models.gguf import ARCHITECTURES, GgufWeights, gguf_config, gguf_tokenizer, reading_once
from tezo.models.identity import fingerprint
from tezo.models.kinds import choose_kind, read_labels
from tezo.models.loading import CLASSES, LoadedModel, loading, resolve_name, set_padding
from tezo.models.safetensors_weights import SafetensorsWeights
from tezo.models.stored import BaseFiles, files_of
from tezo.system.errors import RequestError
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
    """Gives each module its weights for its forward: parameters on the meta device stay the same objects."""
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
    source = resolve_name(name)
    if not Path(source).is_file():
        raise RequestError(f"model.engine is llama.cpp, which reads GGUF files, and {name} is none; give such a file.")
    with current().phase(LOADING), loading(name), reading_once():
        files = files_of(source)
        model = _without_weights(gguf_config(source), source)
        if type(model).__name__ not in ARCHITECTURES:
            raise RequestError(
                f"model.engine is llama.cpp, for which layers of {', '.join(ARCHITECTURES)} have been compared, and "
                f"{name} is {type(model).__name__}; leave model.engine out."
            )
        tokenizer, notices = gguf_tokenizer(source)
        return _ready(name, model, tokenizer, files, notices, partial(GgufWeights, source, model)), source


def load_folder(name: str) -> tuple[LoadedModel, str]:
    """Returns (a model whose weights stay in the safetensors of its folder, the folder), which may have none.

    Raises:
        RequestError: it is no folder or hub name of a causal model.
    """
    source = resolve_name(name, weights=False)
    if Path(source).is_file():
        raise RequestError(f"model.engine is a server of vLLM, which reads folders with safetensors, and {name} is a "
                           "GGUF file; give the folder that it serves, or --engine llama.cpp.")  # fmt: skip
    with current().phase(LOADING), loading(name):
        if not Path(source).is_dir():
            source = snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"])
        files, config = files_of(source), AutoConfig.from_pretrained(source)
        if choose_kind("auto", config.architectures or [], config) != "causal":
            raise RequestError(f"model.engine: {name} is no causal model, which engines run alone; leave it out.")
        model, tokenizer = _without_weights(config, source), AutoTokenizer.from_pretrained(source)
        model.generation_config = GenerationConfig.from_model_config(config)
        if (Path(source) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(source)
        loaded = _ready(name, model, tokenizer, files, [], partial(SafetensorsWeights, files.paths, model))
        unread = SafetensorsWeights(files.paths, model).why_not
        return replace(loaded, labels=read_labels(Path(source)), unread=unread), source


def _without_weights(config: Any, source: str) -> Any:
    try:
        from accelerate import init_empty_weights
    except ImportError:
        raise RequestError("model.engine needs the package accelerate: pip install accelerate.") from None
    with init_empty_weights(include_buffers=False):
        model = CLASSES["causal"].from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    model.requires_grad_(True)
    model.tie_weights()
    model.name_or_path = model.config.name_or_path = source
    model.config.dtype = config.dtype  # as stored
    return model


def _ready(
    name: str,
    model: Any,
    tokenizer: Any,
    files: BaseFiles,
    notices: Sequence[str],
    weights: Callable[[], Mapping[str, Tensor]],
) -> LoadedModel:
    made = fingerprint(model, "causal", tokenizer, stored=files.digest(), in_memory=False)
    set_padding(name, model, tokenizer, "causal")
    current().watch(model)
    read_at_use(model, Unread(weights))
    return LoadedModel(model, tokenizer, "causal", made, tuple(notices), files=files)
