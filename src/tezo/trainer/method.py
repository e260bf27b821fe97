"""A method for Trainer's model: its configuration and optimizer, and TrainingArguments without gradients."""

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from tezo.methods import AUTO, METHODS
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError
from tezo.training.settings import MethodConfig

logger = logging.getLogger(__name__)


OF_TRAINER = [name for name, method in METHODS.items() if not method.takes_rows]
"""Methods that need nothing but the loss of a batch."""


def check_same(saved: MethodConfig, given: MethodConfig, folder: str) -> None:
    """An error where a checkpoint is of another method, or of another value of an option that is given."""
    if saved.name != given.name:
        raise RequestError(f"{folder} is of method {saved.name}, not {given.name}; give method={saved.name!r}.")
    for key, value in given.options.items():
        kept = saved.options.get(key)
        if value != AUTO and plain(value) != plain(kept):
            raise RequestError(
                f"{folder} was trained with {key} {kept!r}, not {value!r}; give that, or start from the beginning."
            )


def plain(value: Any) -> Any:
    """The value as JSON has it: a tuple is a list."""
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


REFUSED = {
    "optim": "the method takes the place of a gradient optimizer; give TezoTrainer method=..., and leave optim out",
    "max_grad_norm": "there is no gradient to clip; leave it out, or set it to 0",
    "deepspeed": "it shards for a backward pass; leave it out",
    "fsdp": "it shards for a backward pass; leave it out",
    "torch_compile": "a compiled model is not supported here; leave it out",
    "fp16_full_eval": "it changes the dtype that the method is bound to; load the model with dtype=torch.float16",
    "bf16_full_eval": "it changes the dtype that the method is bound to; load the model with dtype=torch.bfloat16",
    "neftune_noise_alpha": "steps run in evaluation mode, where it adds no noise; leave it out",
    "auto_find_batch_size": "a step that ran out of memory looks like a finished one; set the batch size",
}
"""Fields of TrainingArguments that are refused where they are set to more than the default -> why, and the way out."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def forward_only(args: Any) -> Any:
    """A copy of the arguments, with clipping, gradient scaling and autocast off.

    Args:
        args: transformers.TrainingArguments, or a subclass.

    Raises:
        RequestError: a field needs gradients, or there are several processes.
    """
    if args is None:
        raise RequestError("args is missing; give TrainingArguments(output_dir=...), or TRL's SFTConfig.")
    defaults = default_values(args)
    for name, reason in REFUSED.items():
        value = getattr(args, name, None)
        if value and value != defaults.get(name):
            raise RequestError(f"{name} is {value}: {reason}.")
    if args.learning_rate != defaults["learning_rate"]:
        raise RequestError(
            f"learning_rate is {args.learning_rate}, and that of TrainingArguments is for gradients; give "
            f"method_options={{'lr': {args.learning_rate}}}, and leave learning_rate out."
        )
    if args.load_best_model_at_end and args.save_only_model:
        raise RequestError(
            "save_only_model leaves out the state that load_best_model_at_end restores; set one of them to False."
        )
    if args.world_size > 1:
        raise RequestError(
            f"Trainer runs in {args.world_size} processes, which do not exchange losses here; start one, or use "
            "`torchrun ... tezo train`, which shares a step among them."
        )
    copied = copy.copy(args)
    copied.max_grad_norm = 0.0
    copied.bf16 = copied.fp16 = False
    copied.mixed_precision = "no"
    return copied


def default_values(args: Any) -> Mapping[str, Any]:
    """Field -> its default, in the class of the arguments."""
    return {field.name: field.default for field in dataclasses.fields(args)}


def check_precision(args: Any, dtype: torch.dtype) -> None:
    """A warning where the arguments ask for mixed precision, which is off, in another dtype than the model's.

    TRL's turn bf16 on by themselves, where their field is None: that is not asked for.

    Args:
        args: as the user gave them.
        dtype: that the model computes in.
    """
    defaults = default_values(args)
    asked = next((name for name in _DTYPES if getattr(args, name) and defaults.get(name) is not None), None)
    if asked is not None and _DTYPES[asked] != dtype:
        logger.warning(
            "%s: autocast is off, and the model computes in %s, as it was loaded; dtype=%s there takes less memory.",
            asked,
            dtype,
            _DTYPES[asked],
        )


class OptimizerView(torch.optim.Optimizer):
    """A view of a zeroth-order optimizer whose `step` does nothing: `training_step` has taken the step.

    Learning rates that a scheduler sets are those of the optimizer, whose `param_groups` it shares. Its state dict has
    the rates alone; `tezo.trainer.state` saves the rest.

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
        """Restores the rates; torch's method would replace the groups that are shared."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
