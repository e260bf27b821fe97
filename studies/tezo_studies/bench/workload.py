"""The workload of a benchmark: a model, a batch, and the loss by plain forward passes and for the optimizer."""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tezo.models.loading import choose_device
from tezo.optim.closures import Closure, Losses
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.evaluators import logits_at
from tezo.tasks.objectives.objective import Encoded
from tezo_studies.bench.captured_pass import CapturedLosses, by_cuda_graph
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.shapes import build_model


class NoWords:
    """A tokenizer of rows that are made of numbers."""

    pad_token_id, eos_token_id, chat_template = 0, None, None
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: Mapping[int, str] = {}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        del text
        return {"input_ids": []}


class LastPosition(CausalObjective):
    """The loss at the last position of each row, with the row's first token as target; so every token is needed."""

    def asked(self, sequence: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
        del answer
        return [len(sequence) - 1], [sequence[0]]


class InOnePass(Losses):
    """A closure of which two models share a pass, however many tokens it has."""

    most_copies = 2

    def __init__(self, closure: Losses) -> None:
        self._closure = closure

    @property
    def tokens(self) -> int:
        return self._closure.tokens

    def losses(self, copies: int) -> Tensor:
        return self._closure.losses(copies)


class Work:
    """A model and one batch of random rows with given lengths; the loss is taken at the last position of each row.

    Attributes:
        settings: settings of the benchmark.
        device: device of the model.
        model: the stock model of transformers; nothing is attached to it.
        inputs: the batch, padded to its longest row, for published code and stock passes.
        tokens: number of tokens of the batch without padding.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = choose_device(settings.device)
        self.model = build_model(settings.model, settings.dtype, self.device)
        lengths, vocabulary = settings.lengths(), int(self.model.config.vocab_size)
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (len(lengths), max(lengths)), generator=draw)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
        self.tokens = sum(lengths)
        self.inputs = {"input_ids": (ids * mask).to(self.device), "attention_mask": mask.to(self.device)}
        self._last_S1 = torch.tensor(lengths, device=self.device).unsqueeze(1) - 1
        rows = [tuple(row[:length]) for row, length in zip(ids.tolist(), lengths, strict=True)]
        self._encoded = [Encoded((row,), (1,), Example("", "", (), None, "the benchmark")) for row in rows]
        self._objective = LastPosition(NoWords(), self.device, max(lengths), ())

    def twin(self) -> Any:
        """Another module tree with the same weight tensors, so that hooks on one tree do not affect another."""
        scales = [getattr(parameter, "quant_state", None) for parameter in self.model.parameters()]  # bitsandbytes'
        shared = chain(self.model.parameters(), self.model.buffers(), filter(None, scales))
        return copy.deepcopy(self.model, {id(part): part for part in shared})

    def with_settings(self, settings: Settings) -> "Work":
        """The same model and batch, for methods with other settings."""
        other = copy.copy(self)
        other.settings = settings
        return other

    def stock_loss(self, model: Any) -> Callable[[], Tensor]:
        """The loss by a plain forward pass that computes the logits of all positions."""
        rows_S1 = torch.arange(len(self._last_S1), device=self.device).unsqueeze(1)
        return lambda: self._cross_entropy(model(**self.inputs).logits[rows_S1, self._last_S1])

    def graphed_loss(self, model: Any) -> Callable[[], Tensor]:
        """`stock_loss` of the compiled model: CUDA graphs, split where a hook adds a direction.

        Raises:
            RequestError: the device is not a GPU.
        """
        if self.device.type != "cuda":
            raise RequestError(f"CUDA graphs need a GPU, and the device is {self.device.type}.")
        torch.compiler.reset()  # what was compiled for a twin without hooks would be taken for this one
        return self.stock_loss(torch.compile(model, mode="reduce-overhead"))

    def captured_closure(self, model: Any) -> Closure:
        """`closure`, whose passes are captured as CUDA graphs, hooks included.

        Raises:
            RequestError: the device is not a GPU.
        """
        if self.device.type != "cuda":
            raise RequestError(f"CUDA graphs need a GPU, and the device is {self.device.type}.")
        return CapturedLosses(self._losses(model), by_cuda_graph)

    def one_pass_closure(self, model: Any) -> Closure:
        """`closure`, of which both signs of a step share a pass."""
        return InOnePass(self._losses(model))

    def needed_loss(self, model: Any) -> Callable[[], Tensor]:
        """The loss by a plain forward pass that applies the head only at the last positions."""
        return lambda: self._cross_entropy(logits_at(model, self.inputs, self._last_S1))

    def joint_loss(self, model: Any) -> Callable[[], Tensor]:
        """The sum of two losses by one pass over the doubled batch, as both signs of a step share one pass."""
        closure = self._losses(model)
        return lambda: closure.losses(2).sum()

    def _cross_entropy(self, logits_SKV: Tensor) -> Tensor:
        wide = logits_SKV.to(torch.promote_types(logits_SKV.dtype, torch.float32))
        return functional.cross_entropy(wide.flatten(0, 1), self.inputs["input_ids"][:, 0])

    def closure(self, model: Any) -> Closure:
        """The closure for `optimizer.step`, made as in training."""
        return self._losses(model)

    def _losses(self, model: Any) -> Losses:
        return self._objective.closure(model, self._objective.batches(self._encoded))

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
