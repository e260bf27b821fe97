"""The named methods: each a perturbation and an update rule, put together.

Symbols: W (M x N) a weight, Z a direction of its shape, kappa = (f(W + rho Z) - f(W - rho Z)) / (2 rho) the
projected gradient, lr the learning rate, r the rank. 1-D parameters, where trained, always take dense
directions. Options that all methods share are in `Common`. Defaults: rho 1e-3 and the learning rates 1e-6
(plain and momentum steps) and 1e-5 (Adam) are the paper's (appendix, table of hyper-parameters; it uses 1e-7
for plain steps on OPT-13B).

Shared deviations from the published forms, each measured or argued in the docs:
- low-rank directions have unit variance (`scale="unit"`), `scale="raw"` gives the published scale;
- they are added in the forward pass, so that weights neither drift nor move through memory;
- a draw is a function of (seed, step, parameter), not of one global stream;
- there is no weight decay unless asked for.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from torch import nn

from tezo.errors import RequestError, nearest
from tezo.optimizer import ZerothOrderOptimizer
from tezo.perturbations import Annealing, Gaussian, Lazy, Scale, SimulatedMomentum, Subspace, Temporal
from tezo.rank import FixedRank, rank_rule
from tezo.updates import SGD, Adam, AdaMU, FactoredAdam, Momentum


class Common(TypedDict, total=False):
    """Options of every method; see `ZerothOrderOptimizer`."""

    rho: float
    weight_decay: float
    num_directions: int
    targets: Sequence[str]
    seed: int
    in_forward: bool


def mezo(model: nn.Module, *, lr: float = 1e-6, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO: plain zeroth-order steps along dense Gaussian noise.

        z ~ N(0, I_MN),   W <- W - lr kappa z.

    The baseline of the paper (Sec. 3, Eq. 2; Malladi et al. 2023). State: none.

    Deviations: 1-D parameters are restored from a copy; weight decay, when set, applies to matrices only.
    """
    return ZerothOrderOptimizer(model, Gaussian(), SGD(), lr=lr, **common)


def mezo_m(model: nn.Module, *, lr: float = 1e-6, beta: float = 0.9, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO-m: MeZO with momentum.

        m <- beta m + (1 - beta) kappa z,   W <- W - lr m.

    State: m, of the weights' shape, in float32. `beta`: the paper's beta_1 (Algorithm 1).

    Deviations: an exponential average from zero, the form that the paper gives for TeZO-m; MeZO's code
    offers momentum but never passes it on.
    """
    return ZerothOrderOptimizer(model, Gaussian(), Momentum(beta), lr=lr, **common)


def mezo_adam(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """MeZO-Adam: Adam on the dense estimate.

        m <- b1 m + (1 - b1) kappa z,   v <- b2 v + (1 - b2) kappa^2 z^2,
        W <- W - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).

    State: m and v, of the weights' shape, in float32. `betas`, `eps` and the form are torch's, which
    MeZO's code uses.
    """
    update = Adam(betas, eps, eps_in_sqrt=False, bias_correction=True)
    return ZerothOrderOptimizer(model, Gaussian(), update, lr=lr, **common)


def lozo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int = 8,
    lazy_update_interval: int = 100,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO: low-rank directions with one factor kept over an interval.

        Z = U_t V_k^T,   U_t (M x r) every step, V_k (N x r) every `lazy_update_interval` steps,
        W <- W - lr kappa Z.

    The paper's baseline (Chen et al. 2024). `rank` and the interval: the paper's table. Within an interval
    W + A V_k^T is computed in the forward pass; A (M x r) is folded into W at each refresh.

    Deviations: the update uses the U that was measured, at refreshes too (the public code draws another
    one there); unit scale divides by sqrt(r).
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


def lozo_m(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    beta: float = 0.9,
    rank: int = 8,
    lazy_update_interval: int = 100,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """LOZO-m: LOZO with momentum on the fresh factor.

        M <- beta M + (1 - beta) kappa U_t,   W <- W - lr M V_k^T,
        and at a refresh first M <- M V_old^T V_new / N   (N r^-1 under unit scale).

    State: M (M x r), in float32. Deviations: as `lozo`; M starts at zero, as in TeZO-m, where the public
    code starts at kappa U.
    """
    perturbation = Lazy(FixedRank(rank=rank), scale, lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, Momentum(beta), lr=lr, **common)


def subzo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int = 64,
    lazy_update_interval: int = 500,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """SubZO: a random core between two orthonormal factors kept over an interval.

        Z = U_k S_t V_k^T sqrt(M N) / r,   S_t (r x r) every step, U_k and V_k every interval,
        W <- W - lr kappa Z.

    The paper's baseline (Yu et al. 2024). `rank` and the interval: the paper's table. Within an interval
    W + U_k C V_k^T is computed in the forward pass; C (r x r) is folded into W at each refresh.

    Deviations: `scale="unit"` is what the public code does; "raw" leaves sqrt(M N) / r out, as in the
    formula of the TeZO paper.
    """
    perturbation = Subspace(FixedRank(rank=rank), scale, lazy_update_interval)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


def zo_adamu(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    eps: float = 1e-8,
    anneal_start: int = 1024,
    anneal_stop: int = 16000,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """ZO-AdaMU: momentum and adaptivity inside the perturbation.

        z1 ~ N(0, alpha),   z2 ~ N(m, 1 - alpha),   z = b1 z1 + (1 - b1) z2,
        v = b2 z1^2 + (1 - b2) z2^2,   W <- W - lr kappa z / sqrt(v + eps),   m <- z.

    The paper's baseline (Jiang et al. 2024); alpha, b1 and b2 are annealed from 1, see
    `tezo.perturbations.momentum.Annealing`. State: m, of the weights' shape, in float32. One direction a step.

    Deviations: made from its paper, since the public code cannot take a step; that code also multiplies m
    by the sign of kappa, which the paper does not. The annealing formula is our reading.
    """
    perturbation = SimulatedMomentum(Annealing(start=anneal_start, stop=anneal_stop))
    return ZerothOrderOptimizer(model, perturbation, AdaMU(eps), lr=lr, **common)


def tezo(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    rank: int | None = None,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO: directions that are low-rank over the model and over time.

        Z_t = sum_s tau_s u_s v_s^T,   u_s ~ N(0, I_M), v_s ~ N(0, I_N) once, tau ~ N(0, I_r) every step,
        W <- W - lr kappa Z_t.

    Algorithm 1 of the paper. W_t = W_0 + U diag(c_t) V^T throughout, so the base is only read and c (r
    numbers) is all that changes. `rank=None` chooses ranks by Eq. 6 and 7 (`rank_threshold`, `max_rank`:
    the paper's table); a number fixes them.

    Unbiasedness (Theorem 1) is over the draw of u and v, once a run: given them, the mean of the estimate
    is the projection of the gradient on the span of the u_s v_s^T.

    Deviations: unit scale divides Z by sqrt(r), which makes the estimate Theorem 1's unbiased one; the
    algorithm as printed has no such factor.
    """
    perturbation = Temporal(rank_rule(rank, rank_threshold, max_rank), scale)
    return ZerothOrderOptimizer(model, perturbation, SGD(), lr=lr, **common)


def tezo_m(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    beta: float = 0.9,
    rank: int | None = None,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO-m: TeZO with momentum on the temporal factor.

        tau_M <- beta tau_M + (1 - beta) kappa tau,   W <- W - lr sum_s tau_M,s u_s v_s^T.

    Algorithm 1 of the paper; exactly momentum on W, since u and v do not change. State: tau_M (r numbers).
    Ranks and deviations: as `tezo`.
    """
    perturbation = Temporal(rank_rule(rank, rank_threshold, max_rank), scale)
    return ZerothOrderOptimizer(model, perturbation, Momentum(beta), lr=lr, **common)


def tezo_adam(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int | None = None,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO-Adam: Adam with both moments kept as temporal factors.

        tau_M <- b1 tau_M + (1 - b1) kappa tau,   tau_V <- b2 tau_V + (1 - b2) kappa^2 tau^2,
        W <- W - lr M / sqrt(V + eps),   M = sum_s tau_M,s u_s v_s^T,   V = sum_s tau_V,s u_s^2 (v_s^2)^T.

    Algorithm 1 and Eq. 8 of the paper, which also gives `betas` and `eps`; no bias correction, eps inside
    the root. State: 2 r numbers. The division makes the step dense: one pass over the weights.

    Deviations: ranks and scale as `tezo`; weights below float32 are rounded stochastically.
    """
    update = FactoredAdam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation = Temporal(rank_rule(rank, rank_threshold, max_rank), scale)
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, **common)


def tezo_cadam(
    model: nn.Module,
    *,
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int | None = 32,
    rank_threshold: float = 0.25,
    max_rank: int = 64,
    scale: Scale = "unit",
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """TeZO-cAdam: Adam on the temporal coefficients themselves. Ours, not the paper's.

        tau_M <- b1 tau_M + (1 - b1) kappa tau,   tau_V <- b2 tau_V + (1 - b2) kappa^2 tau^2,
        c <- c - lr tau_M / sqrt(tau_V + eps),   W_t = W_0 + U diag(c_t) V^T.

    Like `tezo_adam` but for the division, which is done on r numbers instead of on the matrix: nothing
    dense is ever written, and the result is an exact LoRA adapter. State: 3 r numbers.

    `lr` and `rank` did best of those tried on a 22M-parameter encoder; `betas` and `eps` are TeZO-Adam's.
    For models of billions of parameters start from the paper's Adam rates, 1e-5 to 1e-4.
    """
    update = Adam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation = Temporal(rank_rule(rank, rank_threshold, max_rank), scale)
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, **common)


@dataclass(frozen=True)
class Method:
    """A named method.

    Attributes:
        name: on the command line and in recipes.
        build: the function that makes its optimizer.
        in_paper: whether the paper has it.
        exports_adapter: whether a run on linear layers is an exact LoRA adapter.
    """

    name: str
    build: Callable[..., ZerothOrderOptimizer]
    in_paper: bool = True
    exports_adapter: bool = False

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return inspect.getdoc(self.build).partition("\n")[0]  # type: ignore[union-attr]

    def options(self) -> dict[str, Any]:
        """Option -> annotated type, of those that a recipe may set."""
        own = {
            name: parameter.annotation
            for name, parameter in inspect.signature(self.build).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        return own | {name: kind for name, kind in Common.__annotations__.items() if name != "seed"}

    def defaults(self) -> dict[str, Any]:
        """Option -> default, in the order of `options`."""
        shared = inspect.signature(ZerothOrderOptimizer.__init__).parameters
        own = inspect.signature(self.build).parameters
        return {name: (own if name in own else shared)[name].default for name in self.options()}


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("mezo", mezo),
        Method("mezo-m", mezo_m),
        Method("mezo-adam", mezo_adam),
        Method("lozo", lozo),
        Method("lozo-m", lozo_m),
        Method("subzo", subzo),
        Method("zo-adamu", zo_adamu),
        Method("tezo", tezo, exports_adapter=True),
        Method("tezo-m", tezo_m, exports_adapter=True),
        Method("tezo-adam", tezo_adam),
        Method("tezo-cadam", tezo_cadam, in_paper=False, exports_adapter=True),
    )
}


def method(name: str) -> Method:
    """The method of that name; an error with the nearest one where there is none."""
    if name not in METHODS:
        raise RequestError(f"method.name: there is no method {name!r}. " + nearest(name, METHODS))
    return METHODS[name]
