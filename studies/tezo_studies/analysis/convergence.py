"""The rate and the bound of Theorem 2, on a function whose gradient and Lipschitz constant are known.

With D = W - A the objective of a step is

    f(W) = sum_ij (d_ij^2 + 1 - cos 2 d_ij) / 2 + noise <X_t, D>,   X_t Gaussian, drawn every step,

The first part is smooth and nonconvex: its gradient is d + sin 2d, and its second derivative 1 + 2 cos 2d lies in
[-1, 3], so lambda = 3. Its only stationary point is A, where it is 0. W_0 = 0 and A is Gaussian. The second part gives
the gradient of a step the variance sigma^2 = noise^2 M N. So all constants of the theorem's bound are known.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.random import DrawKey, normal
from tezo.directions.spaces import CP
from tezo.methods import METHODS
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo_studies.analysis.figure import Given, Numbers
from tezo_studies.analysis.matrices import linear, require_at_least, require_sizes
from tezo_studies.analysis.theorem2 import Constants

LIPSCHITZ = 3.0
"""Lipschitz constant lambda of the objective's gradient."""


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions:
    """Options of `convergence`."""

    sizes: Sequence[int] = (6,)
    """Number of rows and columns of W; one number."""
    rank: int = 3
    """Rank of the low-rank methods' directions."""
    horizons: Sequence[int] = (250, 1000, 4000)
    """Values of T in the theorem, ascending; one run each."""
    rates: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Learning rates tried at the first horizon T_0, in units of `UNITS`; the best is scaled by sqrt(T_0 / T) at T."""
    interval: int = 50
    """Steps between new factors of lozo and subzo."""
    noise: float = 1.0
    """Standard deviation of each entry of a step's gradient."""
    rho: float = 1e-5
    """Perturbation scale at unit scale; the theorem's rho times the root of the rank."""
    seeds: int = 3
    """Runs whose squared gradients are averaged and compared with the theorem's bound."""
    seed: int = 0
    """Seed of all draws."""


class Bowl(nn.Module):
    """The objective f(W); W is the weight of a linear layer."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.layer = linear(size)
        self.eye = torch.eye(size, dtype=torch.float64)
        self.goal_MN = normal((size, size), seed=seed, step=0, name="bowl", role="goal")

    def distance(self) -> Tensor:
        """D = W - A, (M, N), computed by a forward pass."""
        out_NM: Tensor = self.layer(self.eye)
        return out_NM.T - self.goal_MN

    def forward(self, noise_MN: Tensor) -> Tensor:
        """f(W) of a step with the noise matrix `noise_MN`, noise X_t in the formula above."""
        d_MN = self.distance()
        return (d_MN.square() + 1 - torch.cos(2 * d_MN) + 2 * noise_MN * d_MN).sum() / 2

    def loss_and_gradient(self) -> tuple[Tensor, Tensor]:
        """f(W) without noise, and its gradient (M, N)."""
        d_MN = self.distance()
        return (d_MN.square() + 1 - torch.cos(2 * d_MN)).sum() / 2, d_MN + torch.sin(2 * d_MN)


def plain_unit(size: int) -> float:
    """1 / (lambda M N), the theorem's bound on the rate, 1 / (lambda (delta + 1)), to leading order."""
    return 1 / (LIPSCHITZ * size * size)


def adam_unit(size: int) -> float:
    """1 / (lambda (M N)^(1/2)): `plain_unit` times the root mean square of kappa for a gradient of ones."""
    return 1 / (LIPSCHITZ * size)


UNITS = {
    "mezo": plain_unit,
    "lozo": plain_unit,
    "subzo": plain_unit,
    "tezo": plain_unit,
    "tezo-m": plain_unit,
    "tezo-adam": adam_unit,
    "tezo-cadam": adam_unit,
}
"""Method -> function from the size to the unit of its learning rates."""


def measure_convergence(options: ConvergenceOptions, given: Given) -> Numbers:
    """Mean squared gradient norm against T: of each method beside 1/sqrt(T), and of tezo beside Theorem 2's bound.

    For each horizon T there is a run of T steps at the rate eta_0 sqrt(T_0 / T), as in the theorem. eta_0, recorded as
    `rate`, is the one of `rates` with the lowest loss at the first horizon T_0. `full` is
    (1/T) sum_t |grad f(W_t)|^2 over |grad f(W_0)|^2, `last` the same over the last tenth of the steps, and `loss` the
    mean f over the last tenth, over f(W_0). Methods with TeZO's factors also have `span` and `span_last`, with
    P grad f instead of grad f; P projects on the span of the u_s v_s^T. tezo, tezo-m and tezo-cadam never leave
    W_0 + that span, so only this part of their gradient can vanish. `slope` and `span_slope` are least-squares slopes
    of the logarithms.

    `bound` has the theorem's constants and, for each T, the bound at the theorem's own rate as the paper prints it
    (`printed`) and as its proof gives it (`bound`, see `tezo_studies.analysis.theorem2`). Beside it is the mean of
    (1/T) sum_t |grad f(W_t)|^2 over `seeds` runs, with a standard error (`_se`): with factors that are drawn afresh in
    every step (`fresh`), which the theorem is about, and with one draw for the run (`fixed`), which is Algorithm 1.

    Raises:
        RequestError: an option is out of range, or every rate of a method diverges.
    """
    del given
    _check(options)
    (size,) = options.sizes
    return {
        "size": size,
        "rank": options.rank,
        "horizons": list(options.horizons),
        "span_share": min(1.0, options.rank / size**2),
        "lipschitz": LIPSCHITZ,
        "bound": _measure_bound(options),
        "methods": [_measure_method(name, options) for name in UNITS],
    }


def _check(options: ConvergenceOptions) -> None:
    if len(options.sizes) != 1:
        raise RequestError(f"sizes is {list(options.sizes)}; convergence takes one, such as [6].")
    require_sizes(options.sizes, [options.rank], "rank")
    require_at_least(1, interval=options.interval)
    require_at_least(2, seeds=options.seeds)
    if len(options.horizons) < 2 or list(options.horizons) != sorted(set(options.horizons)):
        raise RequestError(f"horizons is {list(options.horizons)}; give at least two numbers of steps, ascending.")
    require_at_least(1, horizons=options.horizons[0])
    if not options.rates or not all(rate > 0 for rate in options.rates):
        raise RequestError(f"rates is {list(options.rates)}; give at least one number, each above 0.")
    if not 0 <= options.noise <= 1e100:
        raise RequestError(f"noise is {options.noise}; it must not be negative, nor above 1e100.")
    if not 0 < options.rho <= 1:
        raise RequestError(f"rho is {options.rho}; it must be above 0 and at most 1.")


FACTORS: dict[str, dict[str, Any]] = {"fresh": {"lazy_update_interval": 1}, "fixed": {}}
"""How tezo's factors are drawn -> the options of the method."""


@torch.no_grad()
def constants(options: ConvergenceOptions) -> Constants:
    """The constants of Theorem 2 for the objective and the perturbations of these options."""
    (size,) = options.sizes
    loss, _ = Bowl(size, options.seed).loss_and_gradient()
    return Constants(
        rows=size,
        columns=size,
        rank=options.rank,
        lipschitz=LIPSCHITZ,
        variance=options.noise**2 * size**2,
        gap=float(loss),
        rho=options.rho / math.sqrt(options.rank),
    )


@torch.no_grad()
def _measure_bound(options: ConvergenceOptions) -> Numbers:
    known, first = constants(options), float(Bowl(options.sizes[0], options.seed).loss_and_gradient()[1].square().sum())
    rows = []
    for steps in options.horizons:
        lr = known.rate(steps)
        row = {"steps": steps, "rate": lr, "bound": known.bound(steps, lr), "printed": known.printed_bound(steps, lr)}
        for key, factors in FACTORS.items():
            seeds = range(options.seed, options.seed + options.seeds)
            means = [first * run("tezo", steps, lr, options, seed=seed, **factors)["full"] for seed in seeds]
            row |= {key: statistics.mean(means), f"{key}_se": statistics.stdev(means) / options.seeds**0.5}
        rows.append(row)
    kept = ("lipschitz", "variance", "gap", "rho", "delta", "delta_rho", "printed_delta_rho")
    return {key: getattr(known, key) for key in kept} | {"first": first, "seeds": options.seeds, "rows": rows}


def _measure_method(name: str, options: ConvergenceOptions) -> Numbers:
    first = options.horizons[0]
    unit = UNITS[name](options.sizes[0])
    tried = [(run(name, first, rate * unit, options), rate) for rate in options.rates]
    best, rate = min(tried, key=lambda pair: pair[0]["loss"])
    if not math.isfinite(best["loss"]):
        raise RequestError(f"rates is {list(options.rates)}; {name} diverges at all of them; give smaller ones.")
    runs = [best] + [run(name, t, rate * unit * math.sqrt(first / t), options) for t in options.horizons[1:]]
    for horizon, values in zip(options.horizons, runs, strict=True):
        if not math.isfinite(values["loss"]):
            raise RequestError(
                f"rates is {list(options.rates)}; {name} diverges within {horizon} steps; give smaller ones."
            )
    curves = {key: [values[key] for values in runs] for key in best}
    numbers = {"method": name, "rate": rate * unit, "rate_in_units": rate, **curves}
    numbers["slope"] = slope(options.horizons, curves["full"])
    if "span" in curves:
        numbers["span_slope"] = slope(options.horizons, curves["span"])
    return numbers


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y against log x."""
    a, b = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    a = a - a.mean()
    return float((a * b).sum() / a.square().sum())


@torch.no_grad()
def run(name: str, steps: int, lr: float, options: ConvergenceOptions, **own: Any) -> dict[str, float]:
    """The values of one run that `measure_convergence` records; only an infinite `loss` if the run diverges.

    Args:
        name: method.
        steps: T.
        lr: learning rate.
        options: objective, rank, and the rest.
        own: options of the method, over those that `options` gives; `seed` is also that of the noise.
    """
    (size,) = options.sizes
    model = Bowl(size, options.seed)
    optimizer = build(name, model, lr, options, **own)
    basis = span_basis(optimizer)
    seen = []
    try:
        for step in range(steps):
            loss, grad_MN = model.loss_and_gradient()
            in_span = basis.T @ grad_MN.flatten()
            seen.append((loss, grad_MN.square().sum(), in_span.square().sum()))
            noise = options.noise * normal((size, size), seed=optimizer.seed, step=step, name="bowl", role="noise")
            optimizer.step(lambda noise=noise: model(noise))  # type: ignore[misc]
    except NonFiniteLossError:
        return {"loss": math.inf}
    finally:
        optimizer.close()
    return _means(torch.tensor(seen, dtype=torch.float64), has_span=basis.numel() > 0)


def _means(seen_T3: Tensor, *, has_span: bool) -> dict[str, float]:
    relative_T3 = seen_T3 / seen_T3[0]
    tail_T3 = relative_T3[-max(1, len(relative_T3) // 10) :]
    (_, full, span), (loss, last, span_last) = relative_T3.mean(dim=0).tolist(), tail_T3.mean(dim=0).tolist()
    means = {"loss": loss, "full": full, "last": last}
    return means | ({"span": span, "span_last": span_last} if has_span else {})


def build(name: str, model: Bowl, lr: float, options: ConvergenceOptions, **own: Any) -> ZerothOrderOptimizer:
    """The optimizer of method `name`, with the options that it supports, and `own` over them."""
    method = METHODS[name]
    wanted = {"rank": options.rank, "scale": "unit", "lazy_update_interval": options.interval}
    defaults = method.defaults()  # no default interval: the factors are fixed
    known = {
        key: wanted[key]
        for key in wanted
        if key in defaults and (key in ("rank", "scale") or defaults[key] is not None)
    }
    return method.build(model, **({"lr": lr, "seed": options.seed, "rho": options.rho} | known | own))


def span_basis(optimizer: ZerothOrderOptimizer) -> Tensor:
    """Orthonormal basis (M N, at most r) of the span of TeZO's u_s v_s^T; (M N, 0) for other factors."""
    (target,) = optimizer.targets
    direction = optimizer.perturbation.direction(target, DrawKey(optimizer.seed, 0), {})
    cells = target.shape.numel()
    if not isinstance(direction, CP):
        return torch.zeros(cells, 0, dtype=torch.float64)
    terms = torch.einsum("ms,ns->mns", direction.u_MR, direction.v_NR).reshape(cells, -1)
    basis: Tensor = torch.linalg.qr(terms)[0]
    return basis
