"""The optimizer as Trainer, accelerate and learning-rate schedulers see it: rates pass through, steps are elsewhere."""

from typing import Any

import torch

from tezo.optim.optimizer import ZerothOrderOptimizer


class OptimizerView(torch.optim.Optimizer):
    """A view of a zeroth-order optimizer whose `step` does nothing: `training_step` has taken the step.

    Learning rates that a scheduler sets are those of the optimizer, whose `param_groups` it shares. Its state dict has
    the rates alone; `tezo.training.integrations.trainer_state` saves the rest.

    Args:
        tuner: the optimizer.
    """

    def __init__(self, tuner: ZerothOrderOptimizer) -> None:
        super().__init__([target.parameter for target in tuner.targets], dict(tuner.defaults))
        self.param_groups = tuner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the step has been taken."""
        del closure

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the rates; torch's own method would replace the groups that are shared."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
