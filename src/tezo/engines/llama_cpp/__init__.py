"""llama.cpp: its shared library, models and contexts in it, and the engine that they make."""

from dataclasses import replace

from tezo.engines.llama_cpp.engine import LlamaCpp
from tezo.engines.llama_cpp.library import load_library
from tezo.engines.llama_cpp.model import LlamaModel
from tezo.models.gguf import GgufNames
from tezo.models.in_file import load_in_file
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel


def load_llama_cpp(config: ModelConfig) -> LoadedModel:
    """Loads a GGUF file into llama.cpp.

    Raises:
        RequestError: there is no llama.cpp, or the file is none that it reads.
    """
    load_library()
    loaded, path = load_in_file(config.name)
    return replace(loaded, engine=LlamaCpp(LlamaModel(path), GgufNames(loaded.model)))
