"""Every method, with options that suit tiny models: one row enrols a method in all behaviour tests."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tiny import lm_loss, tokens
from torch import Tensor, nn

from tezo.forward.beside_weight import InForward
from tezo.methods import METHODS
from tezo.optim.optimizer import ZerothOrderOptimizer

RANK = 3
INTERVAL = 5


@dataclass(frozen=True)
class Case:
    """A method with options.

    Attributes:
        name: in METHODS.
        options: for tiny models.
        lr: that minimises `tiny.Regression` within a few hundred steps.
        base_untouched: whether matrices of known modules are only read, however long the run.
        first_step_parallel: whether the first step is along the measured direction.
        spans: whether its directions span all weights.
        has_state: whether its state has tensors.
        passes: forward passes of a step.
        single_direction: whether it is defined for one direction per step only.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 2e-2
    base_untouched: bool = False
    first_step_parallel: bool = True
    spans: bool = True
    has_state: bool = True
    passes: int = 2
    single_direction: bool = False

    def build(self, model: nn.Module, **overrides: Any) -> ZerothOrderOptimizer:
        return METHODS[self.name].build(model, **({"lr": self.lr} | self.options | overrides))

    @property
    def low_rank(self) -> bool:
        return "rank" in self.options

    @property
    def plain(self) -> bool:
        """Whether every step, not the first alone, is along the measured direction."""
        return self.name in ("mezo", "lozo", "subzo", "tezo")


_LAZY = {"rank": RANK, "lazy_update_interval": INTERVAL}
_FIXED = {"rank": RANK}
_ADAMU = {"anneal_start": 3, "anneal_stop": 12}

CASES = {
    case.name: case
    for case in (
        Case("mezo", has_state=False),
        Case("mezo-m"),
        Case("mezo-adam", first_step_parallel=False),
        Case("mezo-norm"),
        Case("mezo-sign", first_step_parallel=False, has_state=False),
        Case("mezo-conservative", has_state=False, passes=5, single_direction=True),
        Case("sparse-mezo", {"sparsity": 0.5}, spans=False, has_state=False),
        Case("fzoo", {"num_directions": 4}, has_state=False, passes=5, first_step_parallel=False),
        Case("lozo", _LAZY),
        Case("lozo-m", _LAZY),
        Case(
            "head-feedback", _FIXED | {"basis": "gaussian"}, base_untouched=True, first_step_parallel=False, spans=False
        ),
        Case("subzo", _LAZY),
        Case("zo-adamu", _ADAMU, first_step_parallel=False, single_direction=True),
        Case("tezo", _FIXED, base_untouched=True, spans=False),
        Case("tezo-m", _FIXED, base_untouched=True, spans=False),
        Case("tezo-adam", _FIXED, first_step_parallel=False, spans=False),
        Case("tezo-cadam", _FIXED, base_untouched=True, first_step_parallel=False, spans=False),
    )
}

OF_A_LOSS = {
    name for name, own in METHODS.items() if not own.takes_rows and own.defaults().get("directions") != "per-example"
}
"""Methods by default of closures that return one loss; those of losses of rows have tests of their own."""

ONE_OF_EACH_KIND = ("mezo-adam", "lozo-m", "subzo", "zo-adamu", "tezo-cadam")
"""A method for each kind of direction."""


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Values of a parameter, which are slow but for some."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def tuples_mostly_slow(tuples: Iterable[tuple[Any, ...]], *fast: tuple[Any, ...]) -> list[Any]:
    """The same of several parameters, whose values are together in tuples."""
    return [own if own in fast else pytest.param(*own, marks=pytest.mark.slow) for own in tuples]


every_method = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_method_fast_for_kinds = pytest.mark.parametrize(
    "case", mostly_slow(CASES.values(), *(CASES[name] for name in ONE_OF_EACH_KIND)), ids=CASES.keys()
)


def choose(*names: str) -> pytest.MarkDecorator:
    """Parametrises a test by some of the cases."""
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


def effective_weight(optimizer: ZerothOrderOptimizer, name: str) -> Tensor:
    """What the model computes with between steps: the stored tensor and the change kept beside it."""
    moving = optimizer.parameters[name]
    weight = moving.weight.detach().clone()
    if isinstance(moving, InForward):
        for left_MR, right_NR in moving.trained():
            weight = weight + left_MR.to(moving.target.state_dtype) @ right_NR.to(moving.target.state_dtype).T
    return weight


def effective_weights(optimizer: ZerothOrderOptimizer) -> dict[str, Tensor]:
    return {name: effective_weight(optimizer, name) for name in optimizer.parameters}


def run(optimizer: ZerothOrderOptimizer, start: int, stop: int) -> list[float]:
    """Steps `start` to `stop` on a language model, a batch of its own each; their losses."""
    return [optimizer.step(lm_loss(optimizer.model, tokens(seed=step))) for step in range(start, stop)]
