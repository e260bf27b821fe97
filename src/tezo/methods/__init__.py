"""The named methods; each combines a perturbation and an update rule.

Symbols: W (M x N) is a weight, Z a direction of its shape, kappa = (f(W + rho Z) - f(W - rho Z)) / (2 rho) the
projected gradient, lr the learning rate, r the rank. 1-D parameters, if they are tuned, always have dense directions.
Options of all methods are in `Basic`, and those of methods by two points in `Common`.

A published method does what its paper says, with the paper's settings, wherever it is called by its name: rho = 1e-3,
lr = 1e-6 (plain and momentum steps; 1e-7 on OPT-13B) and lr = 1e-5 (Adam) are from the table of hyper-parameters in the
appendix. `head-feedback` is ours: a run chooses its learning rate, rho and directions.

Deviations from the published methods that all methods share, with reasons in docs/theory.md and docs/how-to-choose.md:
- low-rank directions are added in the forward pass, so that weights neither drift nor are rewritten in memory;
- a draw is a function of (seed, step, parameter), not of one global random stream;
- a rank above the smaller side of a matrix is lowered to that side, for that matrix (`optimizer.rank_and_way(name)`);
- the default weight decay is 0.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from tezo.methods.es import es as es
from tezo.methods.first_order import adam as adam
from tezo.methods.first_order import forward_gradient as forward_gradient
from tezo.methods.fzoo import fzoo as fzoo
from tezo.methods.gauss_newton import gauss_newton as gauss_newton
from tezo.methods.grzo import grzo as grzo
from tezo.methods.head_feedback import head_feedback as head_feedback
from tezo.methods.lozo import lozo as lozo
from tezo.methods.lozo import lozo_m as lozo_m
from tezo.methods.mezo import mezo as mezo
from tezo.methods.mezo import mezo_adam as mezo_adam
from tezo.methods.mezo import mezo_conservative as mezo_conservative
from tezo.methods.mezo import mezo_m as mezo_m
from tezo.methods.mezo import mezo_norm as mezo_norm
from tezo.methods.mezo import mezo_sign as mezo_sign
from tezo.methods.mezo import sparse_mezo as sparse_mezo
from tezo.methods.subspace import subzo as subzo
from tezo.methods.subspace import zo_adamu as zo_adamu
from tezo.methods.tezo import tezo as tezo
from tezo.methods.tezo import tezo_adam as tezo_adam
from tezo.methods.tezo import tezo_cadam as tezo_cadam
from tezo.methods.tezo import tezo_m as tezo_m
from tezo.optim.base_optimizer import BaseOptimizer as BaseOptimizer
from tezo.optim.first_order import FirstOrderOptimizer as FirstOrderOptimizer
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import options_of
from tezo.system.errors import RequestError, nearest

T = TypeVar("T", bound=BaseOptimizer, covariant=True)

AUTO = "auto"
"""The value of an option that a run chooses: of lr, a rate found by trials before the first step
(`tezo.optim.learning_rate`); of rho, a scale that is measured (`tezo.optim.measured_scale`); of directions, those of
each example where the rows allow it."""
Rate = float | Literal["auto"]
"""Type of lr and rho in a recipe; methods are built with numbers."""
FORWARD_PASSES = "forward passes"


@dataclass(frozen=True)
class Method(Generic[T]):
    """A named method.

    Attributes:
        name: name on the command line and in recipes.
        build: function that creates its optimizer.
        in_paper: whether the method is in the paper.
        exports_adapter: whether a run on linear layers results in an exact LoRA adapter.
        needs: what it takes of the model.
        chosen: options that a run chooses for itself unless they are given; the others have their defaults.
        takes_rows: whether its closures must give a loss or outputs for each row, not one loss.
        takes_outputs: whether they must give the outputs of each row.
        guarded: whether a run returns to its best state when the loss has risen, unless `train.guard` says otherwise.
        batch_size: default of `train.batch_size`.
        least_rows: its least value.
        steps: default of `train.steps`; None: by the number of rows.
        schedule: default of `train.schedule`.
    """

    name: str
    build: Callable[..., T]
    in_paper: bool = True
    exports_adapter: bool = False
    needs: str = FORWARD_PASSES
    chosen: tuple[str, ...] = ()
    takes_rows: bool = False
    takes_outputs: bool = False
    guarded: bool = False
    batch_size: int = 16
    least_rows: int = 1
    steps: int | None = None
    schedule: Literal["constant", "linear"] = "constant"

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return inspect.getdoc(self.build).partition("\n")[0]  # type: ignore[union-attr]

    def options(self) -> dict[str, Any]:
        """Option -> annotated type, for all options that a recipe may set."""
        kinds = {name: kind for name, (kind, _) in options_of(self.build).items()}
        if "directions" in kinds:
            kinds |= {"lr": Rate, "rho": Rate, "directions": Literal["auto", "shared", "per-example"]}
        kinds |= {name: Rate for name in self.chosen if kinds[name] is float}
        return {name: kind for name, kind in kinds.items() if name != "seed"}

    def defaults(self) -> dict[str, Any]:
        """Option -> default of a recipe, in the order of `options`."""
        return {name: self.default_in_python(name) for name in self.options()} | dict.fromkeys(self.chosen, AUTO)

    def default_in_python(self, option: str) -> Any:
        """Default of an option of `build`."""
        return options_of(self.build)[option][1]


ES = "es"
"""Compares the scores of a population."""
GAUSS_NEWTON = "gauss-newton"
"""Keeps the outputs of each row."""
HEAD_FEEDBACK = "head-feedback"
"""The default method of Trainers and of user loops, and of runs where `GAUSS_NEWTON` does not suit."""

METHODS: dict[str, Method[ZerothOrderOptimizer]] = {
    method.name: method
    for method in (
        Method(
            HEAD_FEEDBACK, head_feedback, in_paper=False, exports_adapter=True, guarded=True,
            chosen=("lr", "rho", "directions"), needs="forward passes, and the gradient of the output head",
        ),
        Method(GAUSS_NEWTON, gauss_newton, in_paper=False, exports_adapter=True, takes_rows=True, takes_outputs=True,
            guarded=True, batch_size=128, steps=6, needs="forward passes, and of free text the rows of the output head",
        ),
        Method(
            ES, es, in_paper=False, exports_adapter=True, takes_rows=True, guarded=True, chosen=("rho",), steps=30,
            schedule="linear",
        ),
        Method("mezo", mezo),
        Method("mezo-m", mezo_m),
        Method("mezo-adam", mezo_adam),
        Method("mezo-norm", mezo_norm, in_paper=False),
        Method("mezo-sign", mezo_sign, in_paper=False),
        Method("mezo-conservative", mezo_conservative, in_paper=False),
        Method("sparse-mezo", sparse_mezo, in_paper=False),
        Method("fzoo", fzoo, in_paper=False),
        Method("grzo", grzo, in_paper=False, least_rows=2),
        Method("lozo", lozo),
        Method("lozo-m", lozo_m),
        Method("subzo", subzo),
        Method("zo-adamu", zo_adamu),
        Method("tezo", tezo, exports_adapter=True),
        Method("tezo-m", tezo_m, exports_adapter=True),
        Method("tezo-adam", tezo_adam),
        Method("tezo-cadam", tezo_cadam, in_paper=False, exports_adapter=True),
    )
}  # fmt: skip


BASELINES: dict[str, Method[BaseOptimizer]] = {
    "adam": Method("adam", adam, needs="backpropagation"),
    "forward-gradient": Method(
        "forward-gradient", forward_gradient, in_paper=False, needs="derivatives by forward-mode differentiation"
    ),
}
"""Methods that need derivatives of the whole model."""


def method(name: str) -> Method[BaseOptimizer]:
    """The zeroth-order or first-order method with this name; the error for an unknown name suggests the nearest one.

    "auto" has the options of head-feedback, which it is if any is given.
    """
    name = HEAD_FEEDBACK if name == AUTO else name
    known: dict[str, Method[BaseOptimizer]] = {**METHODS, **BASELINES}
    if name not in known:
        raise RequestError(f"method.name: there is no method {name!r}. " + nearest(name, known))
    return known[name]
