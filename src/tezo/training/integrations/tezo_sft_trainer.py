"""TRL's SFTTrainer by forward passes alone."""

from typing import Any

from torch import Tensor, nn

from tezo.errors import RequestError
from tezo.training.integrations.forward_pass_trainer import ForwardPassTrainer

try:
    from trl import SFTTrainer
except ImportError as error:
    raise RequestError(f"TezoSFTTrainer needs TRL ({error}); pip install 'tezo[trainer]'.") from None


class TezoSFTTrainer(ForwardPassTrainer, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer with a zeroth-order method: `TezoSFTTrainer(model, args, method="lozo-adam", ...)`.

    See `ForwardPassTrainer` for the arguments that it adds to those of SFTTrainer, and docs/trainer.md.
    """

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        # a step runs in evaluation mode, and its metrics are those of training
        evaluated, self._metrics["eval"] = self._metrics["eval"], self._metrics["train"]
        if "attention_mask" in inputs:
            self._total_train_tokens += int(inputs["attention_mask"].sum())
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._metrics["eval"] = evaluated
