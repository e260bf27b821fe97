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

import sys
from importlib.metadata import entry_points
from typing import Any

from tezo.methods.es import es as es
from tezo.methods.first_order import adam as adam
from tezo.methods.fzoo import fzoo as fzoo
from tezo.methods.gauss_newton import gauss_newton as gauss_newton
from tezo.methods.head_feedback import head_feedback as head_feedback
from tezo.methods.lozo import lozo as lozo
from tezo.methods.lozo import lozo_m as lozo_m
from tezo.methods.mezo import mezo as mezo
from tezo.methods.mezo import mezo_adam as mezo_adam
from tezo.methods.mezo import mezo_m as mezo_m
from tezo.methods.policy_gradient import policy_gradient as policy_gradient
from tezo.methods.probe import probe as probe
from tezo.methods.subspace import subzo as subzo
from tezo.methods.subspace import zo_adamu as zo_adamu
from tezo.methods.tezo import tezo as tezo
from tezo.methods.tezo import tezo_adam as tezo_adam
from tezo.methods.tezo import tezo_cadam as tezo_cadam
from tezo.methods.tezo import tezo_m as tezo_m
from tezo.optim.base_optimizer import BaseOptimizer as BaseOptimizer
from tezo.optim.first_order import FirstOrderOptimizer as FirstOrderOptimizer
from tezo.optim.method import AUTO as AUTO
from tezo.optim.method import FORWARD_PASSES as FORWARD_PASSES
from tezo.optim.method import Count as Count
from tezo.optim.method import Method as Method
from tezo.optim.method import Rate as Rate
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError, nearest
from tezo.system.files import one_line

ES = "es"
"""Compares the scores of a population."""
GAUSS_NEWTON = "gauss-newton"
"""Keeps the outputs of each row."""
POLICY_GRADIENT = "policy-gradient"
"""Learns from the tokens of scored answers."""
HEAD_FEEDBACK = "head-feedback"
"""The default method of Trainers and of user loops, and of runs where `GAUSS_NEWTON` does not suit."""

METHODS: dict[str, Method[ZerothOrderOptimizer]] = {
    method.name: method
    for method in (
        Method(
            HEAD_FEEDBACK, head_feedback, in_paper=False, exports_adapter=True, guarded=True,
            chosen=("lr", "rho", "directions"), needs="forward passes, and the gradient of the output head",
        ),
        Method(
            GAUSS_NEWTON, gauss_newton, in_paper=False, exports_adapter=True, takes_rows=True, takes_outputs=True,
            guarded=True, batch_size=128, steps=6, of_texts=(32, 3), chosen=("rank",),
            needs="forward passes, and of free text layers of the last blocks and rows of the output head",
            rate="the part of each step that is taken, 1 by default",
        ),
        Method(
            "probe", probe, in_paper=False, exports_adapter=True, takes_rows=True, takes_outputs=True,
            takes_labels=True, guarded=True, batch_size=128, steps=1,
            rate="the part of the step that is taken, 1 by default",
        ),
        Method(
            ES, es, in_paper=False, exports_adapter=True, takes_rows=True, guarded=True, chosen=("rho",), steps=30,
            schedule="linear", rate="a multiple of the distance of its members, 3 by default",
        ),
        Method(
            POLICY_GRADIENT, policy_gradient, in_paper=False, exports_adapter=True, takes_rows=True, takes_answers=True,
            guarded=True, batch_size=64, steps=7, schedule="linear",
            needs="forward passes, and the layers of the last blocks",
            rate="the part of what a step has learnt that is taken, 1 by default",
        ),
        Method("mezo", mezo),
        Method("mezo-m", mezo_m),
        Method("mezo-adam", mezo_adam),
        Method("fzoo", fzoo, in_paper=False),
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
}
"""Methods that need derivatives of the whole model."""

BUILT_IN = (*METHODS, *BASELINES)
"""Names of the methods of this package, which tables and pages list."""
EXTENSIONS = "tezo.methods"
"""Entry-point group of methods of other distributions: each names a `Method`, which gets a row above."""
MOVED = ("mezo-norm", "mezo-sign", "mezo-conservative", "sparse-mezo", "grzo", "forward-gradient")
"""Methods that were here once, and are in `examples/methods`, a distribution of their own."""


def add_method(added: Method[Any]) -> None:
    """Gives a method a name, by which runs, commands and Trainers know it from then on.

    Args:
        added: the method; one that needs more than forward passes is a baseline.

    Raises:
        RequestError: there is another method of this name.
    """
    known: dict[str, Method[BaseOptimizer]] = {**METHODS, **BASELINES}
    if added.name in known and known[added.name] != added:
        raise RequestError(f"method {added.name!r}: there is one of this name already; give it another name.")
    rows: dict[str, Any] = METHODS if added.needs == FORWARD_PASSES else BASELINES
    rows[added.name] = added


def method(name: str) -> Method[BaseOptimizer]:
    """The zeroth-order or first-order method with this name; the error for an unknown name suggests the nearest one."""
    known: dict[str, Method[BaseOptimizer]] = {**METHODS, **BASELINES}
    if name not in known:
        if name in MOVED:
            raise RequestError(
                f"method.name is {name}, which has moved to examples/methods: `pip install ./examples/methods` in a "
                "checkout of tezo adds it."
            )
        raise RequestError(f"method.name: there is no method {name!r}. " + nearest(name, known))
    return known[name]


def options_by(name: str) -> dict[str, Any]:
    """Option -> annotated type, for all options that may be set beside a method's name.

    Beside "auto" they are those of any zeroth-order method: which one it will be is not known. An option takes what one
    of them takes, and the method that is chosen may refuse a value.
    """
    if name != AUTO:
        return method(name).options()
    found: dict[str, Any] = {}
    for each in METHODS.values():
        found |= {key: found.get(key, kind) | kind for key, kind in each.options().items()}
    return found


def defaults_by(name: str) -> dict[str, Any]:
    """Option -> default, for all options of the method with this name; beside "auto" none is known."""
    return {} if name == AUTO else method(name).defaults()


for extension in entry_points(group=EXTENSIONS):
    try:
        add_method(extension.load())
    except (ImportError, AttributeError) as error:  # the other methods work all the same
        print(f"notice: the method {extension.name} cannot be loaded ({one_line(error)}).", file=sys.stderr)
