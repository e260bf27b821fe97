"""TRL's SFTTrainer with the steps of a zeroth-order method."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tezo.system.errors import RequestError
from tezo.trainer.trainer import ForwardPassTrainer

try:
    from trl import SFTTrainer
except ImportError as error:
    raise RequestError(f"TezoSFTTrainer needs TRL ({error}); pip install 'tezo[trainer]'.") from None


class TezoSFTTrainer(ForwardPassTrainer, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer with a zeroth-order method: `TezoSFTTrainer(model, args, method="head-feedback", ...)`.

    See `ForwardPassTrainer` for the arguments that it adds to those of SFTTrainer, and docs/trainer.md.
    """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        with self._metrics_set_aside():  # of the passes that choose directions and rho
            return super().create_optimizer(model)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if "attention_mask" in inputs:
            self._total_train_tokens += int(inputs["attention_mask"].sum())
        with self._metrics_set_aside() as of_training:
            self._metrics["eval"] = of_training  # a step runs in evaluation mode
            return super().training_step(model, inputs, num_items_in_batch)

    @contextmanager
    def _metrics_set_aside(self) -> Iterator[Any]:
        """While open, TRL collects its metrics elsewhere; yields those of training."""
        kept: dict[str, Any] = self._metrics
        self._metrics: dict[str, Any] = {mode: defaultdict(list) for mode in kept}
        try:
            yield kept["train"]
        finally:
            self._metrics = kept
