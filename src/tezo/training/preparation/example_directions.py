"""Whether the examples of a batch get directions of their own, where the settings leave it open."""

import math
from collections.abc import Callable

from tezo.errors import NonFiniteLossError, RequestError
from tezo.estimators.estimate import Closure
from tezo.optim.methods import AUTO, Tuner, method
from tezo.optim.optimizer import PER_EXAMPLE, SHARED
from tezo.progress.meter import DIRECTIONS, current
from tezo.training.configuration.recipe import Config


def resolve_directions(
    config: Config, build: Callable[[Config], Tuner], loss: Closure | None, *, rows_share_inputs: bool
) -> tuple[Config, list[str]]:
    """Replaces "auto" in method.directions; returns (configuration, notices for the user).

    Directions are per-example where the objective is the loss, processes share rows, no row needs inputs of its own for
    it, and a step on a copy of the settings (rank 1, learning rate 0, four passes) finds that each row is measured on
    its own; otherwise shared.

    Args:
        config: with method.directions, or without it where it is at its default.
        build: makes the optimizer of a configuration.
        loss: on a few training rows, two where there are as many; None: no pass is made, and each row is assumed to be
            measured on its own.
        rows_share_inputs: whether a pass has inputs for all rows together, such as an encoder's descriptions of the
            labels; with directions of its own each row would need them again.
    """
    chosen = method(config.method.name)
    if config.method.options.get("directions", chosen.defaults().get("directions")) != AUTO:
        return config, []
    if not config.train.minimises_loss or rows_share_inputs or config.train.parallel == "directions":
        return config.with_options(directions=SHARED), []
    found, reason = config.with_options(directions=PER_EXAMPLE), None
    trial = None
    try:
        cheap = {"rank": 1, "basis": "gaussian", "lr": 0.0}
        trial = build(found.with_options(**{key: value for key, value in cheap.items() if key in chosen.options()}))
        trial.own_loss = math.inf  # the steps of the run say what this one would
        if loss is not None:
            with current().phase(DIRECTIONS):
                trial.take_step(loss, trial.kinds[0])
    except NonFiniteLossError:
        pass  # the first step of the run says so
    except RequestError as error:
        reason = str(error)
    finally:
        if trial is not None:
            trial.close()
    if reason is None:
        return found, []
    return config.with_options(directions=SHARED), [f"directions are shared by the rows of a batch: {reason}"]
