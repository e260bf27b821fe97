"""llama.cpp: its shared library, models and contexts in it, and the engine that they make."""

from tezo.engines.llama_cpp.loading import load_llama_cpp

__all__ = ["load_llama_cpp"]
