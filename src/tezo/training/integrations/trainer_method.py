"""From a method's name and options to an optimizer for Trainer's model: what was left open is resolved as in a run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tezo.directions.targets import ALL
from tezo.errors import RequestError, nearest
from tezo.forward import is_changed_beside, settle
from tezo.models.in_memory import SETTLED
from tezo.models.model_config import IN_MEMORY
from tezo.models.untied_head import check_head_not_tied
from tezo.optim.methods import AUTO, METHODS
from tezo.optim.optimizer import PER_EXAMPLE, SHARED, ZerothOrderOptimizer
from tezo.training.configuration.config import parse_config
from tezo.training.configuration.recipe import Config, MethodConfig
from tezo.training.integrations.trainer_loss import StepLoss
from tezo.training.preparation.example_directions import resolve_directions
from tezo.training.preparation.perturbation_scale import resolve_rho

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
    config, notices, _ = resolve_rho(config, tuner, None if loss is None else loss.row_losses_or_loss)
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
