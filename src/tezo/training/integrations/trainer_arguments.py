"""TrainingArguments for forward passes alone: what is of gradients is off, or refused in a sentence."""

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from tezo.errors import RequestError
from tezo.optim.methods import method

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
