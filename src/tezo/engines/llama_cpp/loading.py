"""Loads a GGUF file for llama.cpp: layers by the names of the file, and its tokenizer as llama.cpp has it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from tezo.engines.llama_cpp.engine import BLOCK, LlamaCpp
from tezo.engines.llama_cpp.file import GgufHeader
from tezo.engines.llama_cpp.library import load_library
from tezo.engines.llama_cpp.model import LlamaModel
from tezo.engines.llama_cpp.tensors import WEIGHT
from tezo.engines.llama_cpp.tokenizer import LlamaTokenizer
from tezo.models.gguf import ARCHITECTURES, FileNames, GgufNames
from tezo.models.gguf_model import GgufConfig, GgufForCausalLM
from tezo.models.identity import fingerprint
from tezo.models.in_file import load_in_file
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel, embedded_source
from tezo.models.stored import files_of
from tezo.system.errors import RequestError
from tezo.system.progress import LOADING, current

ROUTER = "ffn_gate_inp"
"""Part of the names of layers that choose experts."""
EXPERTS = "_exps."
"""Likewise of the matrices of experts."""


def load_llama_cpp(config: ModelConfig) -> LoadedModel:
    """Loads a GGUF file into llama.cpp.

    Raises:
        RequestError: there is no llama.cpp, or the file is none that it reads.
    """
    load_library()
    path = file_of(config.name)
    known = GgufHeader(path).text("general.architecture") in ARCHITECTURES.values()
    return (_load_as_in_transformers(config.name) if known else None) or load_by_file(path)


def _load_as_in_transformers(name: str) -> LoadedModel | None:
    """Loads a file with the names of transformers; None: that does not read it, or expects layers of other sizes."""
    try:
        loaded, path = load_in_file(name)
    except RequestError:
        return None
    names = GgufNames(loaded.model)
    engine = LlamaCpp(LlamaModel(path), names)
    for module, layer in loaded.model.named_modules():
        weight = names.name(f"{module}{WEIGHT}") or ""
        if isinstance(layer, nn.Linear) and weight.startswith(BLOCK):
            found = engine.layers.get(weight)
            if found is None or (found.inputs, found.outputs) != (layer.in_features, layer.out_features):
                return None
    return replace(loaded, engine=engine)


def file_of(name: str) -> str:
    """Returns the absolute path of a GGUF file that a model's name means.

    Raises:
        RequestError: it is no file.
    """
    path = embedded_source(name) if name.startswith("embedded:") else Path(name).expanduser()
    if not path.is_file():
        raise RequestError(f"model.engine is llama.cpp, which reads GGUF files, and {name} is none; give such a file.")
    return str(path.absolute())


def load_by_file(path: str) -> LoadedModel:
    """Loads a file of any architecture that llama.cpp runs; nothing of its weights is held by torch.

    Raises:
        RequestError: llama.cpp does not read it, or it is not a causal model.
    """
    with current().phase(LOADING):
        header, files = GgufHeader(path), files_of(path)
        _check(header)
        model = LlamaModel(path)
        lib, pointer = model.lib, model.pointer
        architecture = str(header.text("general.architecture"))
        if lib.llama_model_has_encoder(pointer) or not lib.llama_model_has_decoder(pointer):
            raise RequestError(
                f"model.name: {path} is of the architecture {architecture}, which is not a causal model; engines run "
                "no others."
            )
        engine = LlamaCpp(model, FileNames(architecture))
        positions = lib.llama_model_n_ctx_train(pointer)
        tokenizer = LlamaTokenizer(model, path, positions)
        tuned = {name: own for name, own in engine.layers.items() if name in engine.adapted and ROUTER not in name}
        own = GgufConfig(
            architectures=[architecture],
            hidden_size=lib.llama_model_n_embd(pointer),
            vocab_size=model.tokens,
            max_position_embeddings=positions,
        )
        sizes = {name.removesuffix(WEIGHT): (layer.inputs, layer.outputs) for name, layer in tuned.items()}
        stub = GgufForCausalLM(path, own, sizes, tokenizer.ends)
        made = fingerprint(stub, "causal", tokenizer, stored=files.digest(), in_memory=False)
        notices = _notices(header, engine, list(tuned))
        if not tuned:
            raise RequestError(
                f"model.name: llama.cpp takes a change of no layer of {path} ({architecture}); give another file."
            )
    current().watch(stub)
    unread = f"llama.cpp alone reads those of {path}"
    return LoadedModel(stub, tokenizer, "causal", made, tuple(notices), engine=engine, files=files, unread=unread)


def _check(header: GgufHeader) -> None:
    kind = header.text("general.type") or "model"
    if kind != "model":
        raise RequestError(
            f"model.name: {header.path} is of the type {kind!r}, not a model; give the file that has the model."
        )


def _notices(header: GgufHeader, engine: LlamaCpp, tuned: Sequence[str]) -> list[str]:
    """On layers that are left as they are."""
    experts = [name for name in header.tensors if EXPERTS in name]
    routers = [name for name in engine.layers if ROUTER in name and name.startswith(BLOCK)]
    others = [name for name in engine.layers if name.startswith(BLOCK) and name not in (*tuned, *routers)]
    found = []
    if experts:
        found.append(
            f"a mixture of experts: its {len(experts)} matrices of experts and {len(routers)} layers that choose them "
            f"are not tuned, and the other {len(tuned)} layers are."
        )
    if others:
        found.append(f"not tuned, since llama.cpp adds no LoRA to them: {', '.join(others[:3])}"
                     f"{f' and {len(others) - 3} others' if len(others) > 3 else ''}.")  # fmt: skip
    return found
