"""A method for Trainer's model: its configuration and optimizer, and TrainingArguments without what is of gradients."""

import copy
import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from tezo.directions.targets import ALL
from tezo.forward.perturbed_parameter import is_changed_beside, settle
from tezo.methods import AUTO, BASELINES, METHODS
from tezo.models.kinds import IN_MEMORY
from tezo.models.loading import SETTLED, check_head_not_tied
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError, nearest
from tezo.training.config import parse_config
from tezo.training.recipe import Config, MethodConfig
from tezo.training.schedule import KEYS

logger = logging.getLogger(__name__)


OF_TRAINER = [name for name, method in METHODS.items() if not method.takes_rows]
"""Methods that need nothing but the loss of a batch."""


def parse_method(name: str, options: Mapping[str, Any], known: Collection[str] = METHODS) -> Config:
    """A configuration with this method and these options, whose other settings are at their defaults.

    `feedback_first` and `feedback_last`, which are settings of a run, may be among the options.

    Raises:
        RequestError: the method is not among the `known`, or an option is unknown or of another type.
    """
    if name not in known:
        if name not in (*METHODS, *BASELINES):
            raise RequestError(f"method is {name!r}, and there is no such method. {nearest(name, known)}")
        ways = "tezo.train or tezo.prepare" if name in METHODS else "tezo.train"
        raise RequestError(
            f"method is {name!r}, which needs more than the loss of a batch; use {ways} for it, or give another method."
        )
    own = {key: value for key, value in options.items() if key not in KEYS}
    return parse_config(
        {
            "model": {"name": IN_MEMORY},
            "data": {"train": IN_MEMORY},
            "method": {"name": name, **own},
            "train": {key: options[key] for key in KEYS if key in options},
        }
    )


def build(config: Config, model: Any, seed: int) -> ZerothOrderOptimizer:
    """The optimizer of a configuration; of a model with an adapter of PEFT it tunes the adapter.

    Raises:
        RequestError: the model cannot be tuned this way.
    """
    if settle(model.parameters(), keep=True):
        logger.warning(SETTLED)
    if is_changed_beside(model.parameters()):
        raise RequestError(
            "model has been tuned by another trainer, run or optimizer, whose change is not in the weights; call that "
            "one's merge() to keep it, or close() to drop it."
        )
    options = {key: value for key, value in config.method.options.items() if value != AUTO}
    chosen = METHODS[config.method.name]
    adapted = getattr(model, "peft_config", None) is not None
    targets = options.pop("targets", (ALL,) if adapted else chosen.defaults()["targets"])
    check_head_not_tied(model, targets)
    return chosen.build(model, seed=seed, targets=targets, **options)


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
    "auto_find_batch_size": "a step that ran out of memory cannot be told from one taken; set the batch size",
}
"""Fields of TrainingArguments that are refused where they are set to more than the default -> why, and the way out."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def forward_only(args: Any) -> Any:
    """A copy of the arguments, with clipping, gradient scaling and autocast off.

    Args:
        args: transformers.TrainingArguments, or a subclass.

    Raises:
        RequestError: a field asks for what there is not without gradients, or there are several processes.
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
    own = copy.copy(args)
    own.max_grad_norm = 0.0
    own.bf16 = own.fp16 = False
    own.mixed_precision = "no"
    return own


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
    the rates alone; `tezo.training.trainer.state` saves the rest.

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
