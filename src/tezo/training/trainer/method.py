"""From a method's name and options to an optimizer for Trainer's model: what was left open is resolved as in a run.

TrainingArguments for forward passes alone: what is of gradients is off, or refused in a sentence.

The optimizer as Trainer, accelerate and learning-rate schedulers see it: rates pass through, steps are elsewhere.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tezo.directions.targets import ALL
from tezo.forward.perturbed_parameter import is_changed_beside, settle
from tezo.models.kinds import IN_MEMORY
from tezo.models.loading import SETTLED, check_head_not_tied
from tezo.optim.methods import AUTO, METHODS, method
from tezo.optim.optimizer import PER_EXAMPLE, SHARED, ZerothOrderOptimizer
from tezo.system.errors import RequestError, nearest
from tezo.training.config import parse_config
from tezo.training.recipe import Config, MethodConfig
from tezo.training.resolution import resolve_directions, resolve_rho
from tezo.training.trainer.loss import StepLoss

logger = logging.getLogger(__name__)

LossOfRows = Callable[[int], StepLoss | None]
"""Number of training rows -> their loss; None: the rows cannot be looked at before they are trained on."""


def parse_method(name: str, options: Mapping[str, Any]) -> Config:
    """A configuration with this method and these options, whose other settings are at their defaults.

    Raises:
        RequestError: the method is unknown or takes gradients, or an option is unknown or of another type.
    """
    if name not in METHODS:
        raise RequestError(f"method is {name!r}, which is no method by forward passes. {nearest(name, METHODS)}")
    return parse_config(
        {"model": {"name": IN_MEMORY}, "data": {"train": IN_MEMORY}, "method": {"name": name, **options}}
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


def resolve(config: Config, model: Any, seed: int, loss_of: LossOfRows, *, shared: bool) -> Config:
    """The configuration with directions filled in; notices for the user are logged.

    Args:
        config: with a learning rate.
        model: the model.
        seed: of the directions.
        loss_of: the loss of some training rows.
        shared: whether rows have no losses of their own: the user gave the loss.
    """

    def make(settings: Config) -> ZerothOrderOptimizer:
        return build(settings, model, seed)

    few = None if shared else loss_of(2)
    wanted = config.method.options.get("directions", METHODS[config.method.name].defaults().get("directions"))
    if shared and wanted == PER_EXAMPLE:
        raise RequestError(
            "directions is per-example, and the loss is of the whole batch (compute_loss_func, or label smoothing); "
            "leave one of them out."
        )
    if few is None:
        return config.with_options(directions=SHARED) if wanted == AUTO else config
    config, notices = resolve_directions(config, make, few.row_losses, rows_share_inputs=False)
    return _told(config, notices)


def resolve_scale(config: Config, tuner: ZerothOrderOptimizer, loss: StepLoss | None) -> Config:
    """The configuration with rho filled in, which the optimizer has too; notices for the user are logged.

    Args:
        config: that the optimizer is of.
        tuner: the optimizer, before its first step.
        loss: of a batch of training rows; None: they are not at hand.
    """
    config, notices, measured = resolve_rho(config, tuner, None if loss is None else loss.row_losses_or_loss)
    if measured is not None:
        tuner.own_loss = measured.loss
    elif loss is not None:
        with torch.no_grad():
            tuner.own_loss = float(loss.loss())
    return _told(config, notices)


def _told(config: Config, notices: Sequence[str]) -> Config:
    for notice in notices:
        logger.warning(notice)
    return config


def closure_of(method: MethodConfig, loss: StepLoss) -> Callable[[], Any]:
    """What a step of this method evaluates: the loss of each row where each has its own directions, or their mean."""
    return loss.row_losses if method.options.get("directions") == PER_EXAMPLE else loss.loss


def check_same(saved: MethodConfig, given: MethodConfig, folder: str) -> None:
    """An error where a checkpoint is of another method, or of another value of an option that is given."""
    if saved.name != given.name:
        raise RequestError(f"{folder} is of method {saved.name}, not {given.name}; give method={saved.name!r}.")
    for key, value in given.options.items():
        kept = saved.options.get(key)
        if key != "lr" and value != AUTO and plain(value) != plain(kept):
            raise RequestError(
                f"{folder} was trained with {key} {kept!r}, not {value!r}; give that, or start from the beginning."
            )


def plain(value: Any) -> Any:
    """The value as JSON has it: a tuple is a list."""
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def with_method(config: Config, method: MethodConfig) -> Config:
    """The configuration with another method."""
    return replace(config, method=method)


logger = logging.getLogger(__name__)

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


def learning_rate(args: Any, name: str, options: Mapping[str, Any]) -> float:
    """The learning rate of a run.

    It is `learning_rate` of the arguments, unless that is at the default of their class, which is meant for gradients:
    then it is the default of the method. An option "lr" of the method comes first.

    Args:
        args: as the user gave them.
        name: of the method.
        options: of the method.

    Raises:
        RequestError: both are given, and differ.
    """
    default = default_values(args)["learning_rate"]
    if "lr" in options:
        if args.learning_rate not in (default, options["lr"]):
            raise RequestError(
                f"learning_rate is {args.learning_rate}, and method_options has lr {options['lr']}; leave one out."
            )
        return float(options["lr"])
    if args.learning_rate != default:
        return float(args.learning_rate)
    own = float(method(name).default_in_python("lr"))
    logger.warning(
        "learning_rate is %g, the default of %s, which is meant for gradients: %s uses its own default, %g. "
        "Set learning_rate, or method_options={'lr': ...} for exactly %g.",
        default,
        type(args).__name__,
        name,
        own,
        default,
    )
    return own


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
