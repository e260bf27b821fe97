"""The options of methods: those that methods share, and a check of the types of all that are given."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, get_args, get_type_hints

from torch import nn

from tezo.directions.ranks import RankCriterion, chosen_rank
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.optimizer import Directions, ZerothOrderOptimizer
from tezo.optim.settings import DEFAULT, GIVEN, Setting, Settings
from tezo.system.errors import RequestError, nearest
from tezo.system.values import coerce

P = ParamSpec("P")
T = TypeVar("T", bound=BaseOptimizer)


class Least(TypedDict, total=False):
    """Options of every method whose default is that of `ZerothOrderOptimizer`."""

    targets: Sequence[str]
    seed: int


class Basic(Least, total=False):
    """Options of most methods; see `ZerothOrderOptimizer`."""

    weight_decay: float


class Common(Basic, total=False):
    """Options of every method by two points; see `ZerothOrderOptimizer`."""

    rho: float
    num_directions: int
    in_forward: bool
    directions: Directions
    frozen_rank: int | None


class Ranked(Common, total=False):
    """Options of methods by two points that may choose the rank of each layer; see `chosen_rank`."""

    rank_rule: RankCriterion
    rank_threshold: float
    max_rank: int


@functools.cache
def options_of(build: Callable[..., BaseOptimizer]) -> dict[str, tuple[Any, Any]]:
    """Returns option -> (annotated type, default) of a method's function, the shared ones of its `**` included."""
    named = inspect.signature(build).parameters.values()
    shared = inspect.signature(chosen_rank).parameters | inspect.signature(ZerothOrderOptimizer.__init__).parameters
    found = {p.name: (p.annotation, p.default) for p in named if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for p in named:
        if p.kind is inspect.Parameter.VAR_KEYWORD:
            (options,) = get_args(p.annotation)
            found |= {name: (kind, shared[name].default) for name, kind in get_type_hints(options).items()}
    return found


def with_settings(build: Callable[P, T]) -> Callable[P, T]:
    """Makes a method's function check the types of its options, and put `optimizer.settings` on what it builds."""
    known = options_of(build)

    @functools.wraps(build)
    def built(*args: P.args, **given: P.kwargs) -> T:
        named: Any = dict(given)
        models = [*args, *([named.pop("model")] if "model" in named else [])]
        if models and not isinstance(models[0], nn.Module):
            raise RequestError(
                f"the model is {_kind(models[0])}; give the model itself, whose parameters method.targets selects: "
                f"tezo.{build.__name__}(model)."
            )
        for name in named:
            if name not in known:
                raise RequestError(f"method.{name}: tezo.{build.__name__} has no such option. " + nearest(name, known))
        options = {name: coerce(f"method.{name}", value, known[name][0]) for name, value in named.items()}
        optimizer = build(*models, **options)
        optimizer.settings = Settings(
            {name: Setting(options.get(name, default), GIVEN if name in options else DEFAULT)
             for name, (_, default) in known.items()}
        )  # fmt: skip
        return optimizer

    return built


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
