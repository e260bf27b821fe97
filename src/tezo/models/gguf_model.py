"""A model by the names of its file: its layers without their weights, for engines, which read the file themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from tezo.system.errors import RequestError


class GgufConfig(PretrainedConfig):  # type: ignore[misc]
    """What a file says of its model, under the names of transformers."""

    model_type = "gguf"


@dataclass(frozen=True)
class InFile:
    """Says where a layer is computed whose weight is on the meta device, as hooks of accelerate do."""

    execution_device = torch.device("cpu")


class LayerInFile(nn.Linear):
    """A linear layer whose weight stays in the file."""

    _hf_hook = InFile()

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")


class EmbeddingInFile(nn.Embedding):
    """An embedding whose weight stays in the file."""

    _hf_hook = InFile()


class GgufForCausalLM(nn.Module):
    """The layers of a file by their names there, such as blk.0.attn_q; torch cannot run them.

    Args:
        path: of the file.
        config: of the model.
        layers: name of each layer inside of the model -> (size of its input, size of its output).
        ends: tokens that end an answer.

    Attributes:
        config: the configuration.
        generation_config: names the tokens that end an answer.
        name_or_path: the path.
    """

    def __init__(
        self, path: str, config: GgufConfig, layers: Mapping[str, tuple[int, int]], ends: Sequence[int]
    ) -> None:
        super().__init__()
        self.config, self.name_or_path = config, path
        config.name_or_path = path
        self.generation_config = GenerationConfig(eos_token_id=list(ends) or None)
        self.token_embd = EmbeddingInFile(config.vocab_size, config.hidden_size, device="meta")
        for name, sizes in layers.items():
            *parents, own = name.split(".")
            inside: nn.Module = self
            for parent in parents:
                if parent not in dict(inside.named_children()):
                    inside.add_module(parent, nn.Module())
                inside = inside.get_submodule(parent)
            inside.add_module(own, LayerInFile(*sizes))
        self.output = LayerInFile(config.hidden_size, config.vocab_size)
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        """float32, in which llama.cpp computes outputs."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The CPU, where what llama.cpp returns is."""
        return InFile.execution_device

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embeddings of tokens."""
        return self.token_embd

    def get_output_embeddings(self) -> nn.Module:
        """Returns the output head."""
        return self.output

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raises a `RequestError`."""
        raise RequestError(
            f"the layers of {self.name_or_path} are computed by llama.cpp alone, and a basis of activations needs "
            "torch to compute them; set method.name=gauss-newton, or method.basis=gaussian."
        )
