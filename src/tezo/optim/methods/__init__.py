"""The named methods: each a perturbation and an update rule, put together.

Symbols: W (M x N) a weight, Z a direction of its shape, kappa = (f(W + rho Z) - f(W - rho Z)) / (2 rho) the
projected gradient, lr the learning rate, r the rank. 1-D parameters, where trained, always take dense
directions. Options that all methods share are in `Common`. Defaults: rho 1e-3 and the learning rates 1e-6
(plain and momentum steps) and 1e-5 (Adam) are the paper's (appendix, table of hyper-parameters; it uses 1e-7
for plain steps on OPT-13B).

Shared deviations from the published forms, argued in docs/theory.md and docs/how-to-choose.md:
- low-rank directions have unit variance (`scale="unit"`), `scale="raw"` gives the published scale;
- they are added in the forward pass, so that weights neither drift nor move through memory;
- a draw is a function of (seed, step, parameter), not of one global stream;
- there is no weight decay unless asked for.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from tezo.errors import RequestError, nearest
from tezo.optim.first_order import FirstOrderOptimizer as FirstOrderOptimizer
from tezo.optim.methods.common_options import Common
from tezo.optim.methods.fine_tuning import adam as adam
from tezo.optim.methods.lozo import lozo as lozo
from tezo.optim.methods.lozo import lozo_adam as lozo_adam
from tezo.optim.methods.lozo import lozo_m as lozo_m
from tezo.optim.methods.mezo import mezo as mezo
from tezo.optim.methods.mezo import mezo_adam as mezo_adam
from tezo.optim.methods.mezo import mezo_m as mezo_m
from tezo.optim.methods.mezo import mezo_norm as mezo_norm
from tezo.optim.methods.subzo import subzo as subzo
from tezo.optim.methods.tezo import tezo as tezo
from tezo.optim.methods.tezo import tezo_adam as tezo_adam
from tezo.optim.methods.tezo import tezo_cadam as tezo_cadam
from tezo.optim.methods.tezo import tezo_m as tezo_m
from tezo.optim.methods.zo_adamu import zo_adamu as zo_adamu
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.tuner import Tuner as Tuner

T = TypeVar("T", bound=Tuner, covariant=True)

AUTO = "auto"
"""A learning rate that is measured before the first step, by `tezo.optim.learning_rate`."""
Rate = float | Literal["auto"]
"""What a recipe may give for lr; a method is built with a number."""


@dataclass(frozen=True)
class Method(Generic[T]):
    """A named method.

    Attributes:
        name: on the command line and in recipes.
        build: the function that makes its optimizer.
        in_paper: whether the paper has it.
        exports_adapter: whether a run on linear layers is an exact LoRA adapter.
    """

    name: str
    build: Callable[..., T]
    in_paper: bool = True
    exports_adapter: bool = False

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return inspect.getdoc(self.build).partition("\n")[0]  # type: ignore[union-attr]

    def options(self) -> dict[str, Any]:
        """Option -> annotated type, of those that a recipe may set."""
        parameters = inspect.signature(self.build).parameters.values()
        kinds = {p.name: p.annotation for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            kinds |= Common.__annotations__
        kinds["lr"] = Rate
        return {name: kind for name, kind in kinds.items() if name != "seed"}

    def defaults(self) -> dict[str, Any]:
        """Option -> default, in the order of `options`."""
        shared = inspect.signature(ZerothOrderOptimizer.__init__).parameters
        own = inspect.signature(self.build).parameters
        return {name: (own if name in own else shared)[name].default for name in self.options()}


METHODS: dict[str, Method[ZerothOrderOptimizer]] = {
    method.name: method
    for method in (
        Method("mezo", mezo),
        Method("mezo-m", mezo_m),
        Method("mezo-adam", mezo_adam),
        Method("mezo-norm", mezo_norm, in_paper=False),
        Method("lozo", lozo),
        Method("lozo-m", lozo_m),
        Method("lozo-adam", lozo_adam, in_paper=False, exports_adapter=True),
        Method("subzo", subzo),
        Method("zo-adamu", zo_adamu),
        Method("tezo", tezo, exports_adapter=True),
        Method("tezo-m", tezo_m, exports_adapter=True),
        Method("tezo-adam", tezo_adam),
        Method("tezo-cadam", tezo_cadam, in_paper=False, exports_adapter=True),
    )
}


BASELINES: dict[str, Method[FirstOrderOptimizer]] = {"adam": Method("adam", adam)}
"""First-order methods, which need gradients."""


def method(name: str) -> Method[Tuner]:
    """The method of that name, first-order ones too; an error with the nearest one where there is none."""
    known: dict[str, Method[Tuner]] = {**METHODS, **BASELINES}
    if name not in known:
        raise RequestError(f"method.name: there is no method {name!r}. " + nearest(name, known))
    return known[name]
