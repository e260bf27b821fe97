"""The rate of Theorem 2, on a function whose gradient and Lipschitz constant are known.

With D = W - A the objective of a step is

    f(W) = sum_ij (d_ij^2 + 1 - cos 2 d_ij) / 2 + noise <X_t, D>,   X_t Gaussian, drawn every step,

The first part is smooth and nonconvex: its gradient is d + sin 2d, and its second derivative 1 + 2 cos 2d lies in
[-1, 3], so lambda = 3. Its only stationary point is A, where it is 0. W_0 = 0 and A is Gaussian. The second part gives
the gradient of a step the variance sigma^2 = noise^2 M N.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.perturbations import DrawKey
from tezo.directions.spaces import CP
from tezo.errors import NonFiniteLossError, RequestError
from tezo.numerics.random import normal
from tezo.optim.methods import METHODS
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.studies.analysis.estimator_variance import SECOND_MOMENTS
from tezo.studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo.studies.analysis.matrices import linear, require_at_least, require_sizes

LIPSCHITZ = 3.0
"""Lipschitz constant lambda of the objective's gradient."""


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions:
    """Options of `convergence`."""

    sizes: Sequence[int] = (6,)
    """Number of rows and columns of W; one number."""
    rank: int = 3
    """Rank of the low-rank methods' directions."""
    horizons: Sequence[int] = (125, 250, 500, 1000)
    """Values of T in the theorem, ascending; one run each."""
    rates: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Learning rates tried at the first horizon T_0, in units of `UNITS`; the best is scaled by sqrt(T_0 / T) at T."""
    interval: int = 50
    """Steps between new factors of lozo and subzo."""
    noise: float = 1.0
    """Standard deviation of each entry of a step's gradient."""
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
    """Mean squared gradient norm of each method against T, next to the 1/sqrt(T) of Theorem 2.

    For each horizon T there is a run of T steps at the rate eta_0 sqrt(T_0 / T), as in the theorem. eta_0, recorded as
    `rate`, is the one of `rates` with the lowest loss at the first horizon T_0. `full` is
    (1/T) sum_t |grad f(W_t)|^2 over |grad f(W_0)|^2, `last` the same over the last tenth of the steps, and `loss` the
    mean f over the last tenth, over f(W_0). Methods with TeZO's factors also have `span` and `span_last`, with
    P grad f instead of grad f; P projects on the span of the u_s v_s^T. tezo, tezo-m and tezo-cadam never leave
    W_0 + that span, so only this part of their gradient can vanish. `slope` and `span_slope` are least-squares slopes
    of the logarithms.

    Raises:
        RequestError: an option is out of range, or every rate of a method diverges.
    """
    del given
    _check(options)
    (size,) = options.sizes
    delta = SECOND_MOMENTS["tezo"](size, size, options.rank) - 1
    return {
        "size": size,
        "rank": options.rank,
        "horizons": list(options.horizons),
        "span_share": min(1.0, options.rank / size**2),
        "lipschitz": LIPSCHITZ,
        "theorem_rate": 1 / (LIPSCHITZ * (delta + 1)),
        "methods": [_measure_method(name, options) for name in UNITS],
    }


def _check(options: ConvergenceOptions) -> None:
    if len(options.sizes) != 1:
        raise RequestError(f"sizes is {list(options.sizes)}; convergence takes one, such as [6].")
    require_sizes(options.sizes, [options.rank], "rank")
    require_at_least(1, interval=options.interval)
    if len(options.horizons) < 2 or list(options.horizons) != sorted(set(options.horizons)):
        raise RequestError(f"horizons is {list(options.horizons)}; give at least two numbers of steps, ascending.")
    require_at_least(1, horizons=options.horizons[0])
    if not options.rates or not all(rate > 0 for rate in options.rates):
        raise RequestError(f"rates is {list(options.rates)}; give at least one number, each above 0.")
    if not options.noise >= 0:
        raise RequestError(f"noise is {options.noise}; it must not be negative.")


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
def run(name: str, steps: int, lr: float, options: ConvergenceOptions) -> dict[str, float]:
    """The values of one run that `measure_convergence` records; only an infinite `loss` if the run diverges."""
    (size,) = options.sizes
    model = Bowl(size, options.seed)
    optimizer = build(name, model, lr, options)
    basis = span_basis(optimizer)
    seen = []
    try:
        for step in range(steps):
            loss, grad_MN = model.loss_and_gradient()
            in_span = basis.T @ grad_MN.flatten()
            seen.append((loss, grad_MN.square().sum(), in_span.square().sum()))
            noise = options.noise * normal((size, size), seed=options.seed, step=step, name="bowl", role="noise")
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


def build(name: str, model: Bowl, lr: float, options: ConvergenceOptions) -> ZerothOrderOptimizer:
    """The optimizer of method `name`, with the options that it supports."""
    method = METHODS[name]
    wanted: Mapping[str, Any] = {"rank": options.rank, "lazy_update_interval": options.interval}
    defaults = method.defaults()  # no default interval: the factors are fixed
    known = [key for key in wanted if key in defaults and (key == "rank" or defaults[key] is not None)]
    own = {key: wanted[key] for key in known}
    return method.build(model, lr=lr, seed=options.seed, **own)


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


def draw_convergence(numbers: Numbers, figure: Any) -> None:
    """Draws the whole gradient against T (left), and its part in the span of TeZO's factors (right)."""
    figure.set_size_inches(9.0, 4.2)
    whole, part = figure.subplots(1, 2, sharey=True)
    horizons = numbers["horizons"]
    for i, row in enumerate(numbers["methods"]):
        look = {"color": COLOURS[i % len(COLOURS)], "marker": "os^Dv<>"[i % 7], "markersize": 4, "linewidth": 1.2}
        whole.plot(horizons, row["full"], label=f"{row['method']} ({_short(row['slope'])})", **look)
        if "span" in row:
            part.plot(horizons, row["span"], label=f"{row['method']} ({_short(row['span_slope'])})", **look)
    for axes, key in ((whole, "full"), (part, "span")):
        top = max(row[key][0] for row in numbers["methods"] if key in row)
        guide = [top * (horizons[0] / t) ** 0.5 for t in horizons]
        axes.plot(horizons, guide, "--", color="grey", linewidth=1, label="$1/\\sqrt{T}$ (-0.50)")
        axes.set(xscale="log", yscale="log", xlabel="steps T")
        axes.set_xticks(horizons, [str(t) for t in horizons])
        axes.minorticks_off()
        axes.legend(fontsize=7, title="method (slope)", title_fontsize=7)
    whole.set_ylabel("mean |grad f($W_t$)|$^2$, over that at $W_0$")
    whole.set_title("whole gradient")
    part.set_title(f"in the span of the factors ({numbers['rank']} of {numbers['size'] ** 2} dimensions)")


def _short(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # no minus before a zero


def caption_convergence(numbers: Numbers) -> str:
    """The caption of the figure."""
    size, rows = numbers["size"], {row["method"]: row for row in numbers["methods"]}
    steps = ", ".join(map(str, numbers["horizons"]))
    return (
        f"Mean squared gradient norm of a smooth nonconvex f of a {size} x {size} matrix (sum of "
        f"(d^2 + 1 - cos 2d) / 2, lambda = {numbers['lipschitz']:g}, noisy gradients), rank {numbers['rank']}, a run "
        f"of T = {steps} steps each at a rate that falls as 1/sqrt(T). With fixed factors tezo can be stationary in "
        f"their span alone, {numbers['span_share']:.1%} of the space: over the last tenth of the longest run its "
        f"squared gradient is {rows['tezo']['last'][-1]:.2f} of the first in full and "
        f"{rows['tezo']['span_last'][-1]:.2g} within the span."
    )


CONVERGENCE = Analysis(
    name="convergence",
    paper="Theorem 2",
    needs="nothing",
    options=ConvergenceOptions,
    measure=measure_convergence,
    draw=draw_convergence,
    caption=caption_convergence,
)
