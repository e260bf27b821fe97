"""Mean and variance of one-direction estimates, sampled and in closed form (Theorem 1).

For a linear loss <G, W> with G of shape M x N, the estimate along Z is kappa Z with kappa = <G, Z>, for any rho. Every
method here has E[kappa Z] = G over all its draws. E|kappa Z|^2 for |G| = 1:

    mezo    Z Gaussian                                    M N + 2
    tezo    U diag(tau) V^T / sqrt(r), all three Gaussian  M N + 2 + 2 M N / r + 6 (M + N) / r + 10 / r
    lozo    U V^T / sqrt(r), both Gaussian                 M N + 2 + 2 (M + N + 1) / r
    subzo   U S V^T sqrt(M N) / r, S Gaussian, U and V orthonormal   M N + 2 M N / r^2

The relative variance E|kappa Z - G|^2 / |G|^2 is this number minus 1. Theorem 1 divides the estimate by r. Unit scale
includes this division (Z has the factor r^(-1/2)), so tezo's row is the theorem's delta + 1. lozo's row is tezo's with
tau^2 = 1 (u absorbs the sign): the pairs s != s' give r (r - 1) (M N + 2), and each s gives (M + 2) (N + 2) instead of
three times that. subzo's row: given U and V, kappa Z has the mean square (M N)^2 / r^4 (r^2 + 2) |U^T G V|^2, and
E|U^T G V|^2 = r^2 / (M N).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo.directions.random import DrawKey
from tezo.directions.spaces import CP, Core, FixedFactors, LowRank
from tezo.methods import METHODS
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo_studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo_studies.analysis.matrices import linear, require_at_least, require_sizes, unit_gradient


@dataclass(frozen=True, kw_only=True)
class EstimatorOptions:
    """Options of `estimator`."""

    sizes: Sequence[int] = (16, 32, 64)
    """Numbers of rows and columns of the matrices."""
    ranks: Sequence[int] = (1, 4, 16)
    """Ranks of the low-rank methods' directions."""
    draws: int = 800
    """Draws of each method's direction, including its factors, at each size and rank."""
    fixed_draws: int = 20
    """Draws of the factors, for the mean estimate given the factors."""
    seed: int = 0
    """Seed of all draws."""


_MARKERS = "os^Dv<>p*"


def tezo_second_moment(m: int, n: int, r: int) -> float:
    """E|kappa Z|^2 / |G|^2 of tezo: Theorem 1's delta + 1."""
    return m * n + 2 + 2 * m * n / r + 6 * (m + n) / r + 10 / r


def lozo_second_moment(m: int, n: int, r: int) -> float:
    """E|kappa Z|^2 / |G|^2 of lozo."""
    return m * n + 2 + 2 * (m + n + 1) / r


def subzo_second_moment(m: int, n: int, r: int) -> float:
    """E|kappa Z|^2 / |G|^2 of subzo."""
    return m * n + 2 * m * n / r**2


def mezo_second_moment(m: int, n: int, r: int) -> float:
    """E|kappa Z|^2 / |G|^2 of mezo, at any rank."""
    del r
    return m * n + 2.0


def tezo_cosine(m: int, n: int, r: int) -> float:
    """cos(E[kappa Z | u, v], G) = E|c|^2 over the root of E|sum_s c_s u_s v_s^T|^2; about sqrt(r / (M N))."""
    return float((r / ((m + 2) * (n + 2) + r - 1)) ** 0.5)


def lozo_cosine(m: int, n: int, r: int) -> float:
    """cos(E[kappa Z | v], G) = E|G V|^2 over the root of E|G V V^T|^2; about sqrt(r / N)."""
    del m
    return float((r / (n + r + 1)) ** 0.5)


def subzo_cosine(m: int, n: int, r: int) -> float:
    """cos(E[kappa Z | u, v], G) = |U^T G V| / |G|; the root of its mean square."""
    return float(r / (m * n) ** 0.5)


Closed = Callable[[int, int, int], float]
SECOND_MOMENTS: dict[str, Closed] = {
    "mezo": mezo_second_moment,
    "lozo": lozo_second_moment,
    "subzo": subzo_second_moment,
    "tezo": tezo_second_moment,
}
"""Method -> closed form of E|kappa Z|^2 / |G|^2 at (M, N, r)."""
COSINES: dict[str, Closed] = {"lozo": lozo_cosine, "subzo": subzo_cosine, "tezo": tezo_cosine}
"""Method -> cosine between its mean estimate given the fixed factors and the gradient, to leading order, at (M, N, r).
"""


def measure_estimator(options: EstimatorOptions, given: Given) -> Numbers:
    """Mean and variance of each method's one-direction estimate, sampled and in closed form (Theorem 1 for tezo).

    Rows of `over_all_draws`: `mean` is <E[kappa Z], G> / |G|^2, which is 1 without bias, and `variance` is
    E|kappa Z - G|^2 / |G|^2, both with a standard error (`_se`); `distance` is |mean of kappa Z - G| / |G|, and
    `distance_closed` the root of the variance over the number of draws. Rows of `given_factors`: the `cosine` between
    E[kappa Z | fixed factors] and G, rms over draws of the factors, and its closed form.

    Raises:
        RequestError: an option is out of range.
    """
    del given
    require_sizes(options.sizes, options.ranks, "ranks")
    require_at_least(2, draws=options.draws, fixed_draws=options.fixed_draws)
    cases = [(name, size, rank) for size in options.sizes for name, rank in _ranked(options.ranks)]
    return {
        "over_all_draws": [_over_all_draws(*case, options) for case in cases],
        "given_factors": [_given_factors(*case, options) for case in cases if case[0] in COSINES],
    }


def _ranked(ranks: Sequence[int]) -> Iterator[tuple[str, int]]:
    """All pairs (method, rank); rank 0 for a method without rank."""
    for name in SECOND_MOMENTS:
        yield from ((name, rank) for rank in (ranks if "rank" in METHODS[name].options() else [0]))


def optimizer_for(name: str, size: int, rank: int) -> ZerothOrderOptimizer:
    """The optimizer of a method on one zero matrix in float64, at unit scale; rank 0: no rank is set."""
    return METHODS[name].build(linear(size), **({"rank": rank, "scale": "unit"} if rank else {}))


def estimates(optimizer: ZerothOrderOptimizer, grad_MN: Tensor, seeds: range) -> Iterator[Tensor]:
    """For each seed the estimate kappa Z of the first step, (M, N); every seed draws its own factors."""
    (target,) = optimizer.targets
    for seed in seeds:
        z_MN = torch.zeros_like(grad_MN)
        optimizer.perturbation.direction(target, DrawKey(seed, 0), {}).add_to_(z_MN, 1.0)
        yield z_MN * (grad_MN * z_MN).sum()


def _over_all_draws(name: str, size: int, rank: int, options: EstimatorOptions) -> Numbers:
    grad_MN = unit_gradient(size, options.seed)
    total_MN = torch.zeros_like(grad_MN)
    along, errors = [], []
    seeds = range(options.seed * options.draws, (options.seed + 1) * options.draws)
    for estimate_MN in estimates(optimizer_for(name, size, rank), grad_MN, seeds):
        total_MN += estimate_MN
        along.append((estimate_MN * grad_MN).sum())
        errors.append((estimate_MN - grad_MN).square().sum())
    variance = SECOND_MOMENTS[name](size, size, rank) - 1
    return {
        "method": name,
        "size": size,
        "rank": rank or None,
        **_mean_of("mean", along, 1.0),
        **_mean_of("variance", errors, variance),
        "distance": float((total_MN / options.draws - grad_MN).norm()),
        "distance_closed": (variance / options.draws) ** 0.5,
    }


def _mean_of(key: str, samples: Sequence[Tensor], closed: float) -> dict[str, float]:
    """Mean of samples, its standard error, and the closed form."""
    values = torch.stack(list(samples))
    error = float(values.std()) / len(values) ** 0.5
    return {key: float(values.mean()), f"{key}_se": error, f"{key}_closed": closed}


def _given_factors(name: str, size: int, rank: int, options: EstimatorOptions) -> Numbers:
    grad_MN = unit_gradient(size, options.seed)
    optimizer = optimizer_for(name, size, rank)
    (target,) = optimizer.targets
    cosines = []
    for seed in range(options.seed * options.fixed_draws, (options.seed + 1) * options.fixed_draws):
        direction = optimizer.perturbation.direction(target, DrawKey(seed, 0), {})
        assert isinstance(direction, FixedFactors)
        mean_MN = mean_given_factors(direction, grad_MN)
        cosines.append(float((mean_MN * grad_MN).sum() / mean_MN.norm()))
    values = torch.tensor(cosines, dtype=torch.float64)
    return {
        "method": name,
        "size": size,
        "rank": rank,
        "cosine": float(values.square().mean().sqrt()),
        "cosine_spread": float(values.std()),
        "cosine_closed": COSINES[name](size, size, rank),
    }


def mean_given_factors(direction: FixedFactors, grad_MN: Tensor) -> Tensor:
    """E[<G, Z> Z] over the coefficient of `direction`, given its fixed factors; (M, N).

    tezo: sum_s <G, u_s v_s^T> u_s v_s^T.   lozo: G V V^T.   subzo: U U^T G V V^T.   The factors include the scale.
    """
    (mean,) = (mean for kind, mean in _MEANS.items() if isinstance(direction, kind))
    return mean(direction, grad_MN)


def _mean_of_cp(direction: Any, grad_MN: Tensor) -> Tensor:
    u_MR, v_NR = direction.u_MR, direction.v_NR
    c_R = ((grad_MN @ v_NR) * u_MR).sum(dim=0)
    return torch.mm(u_MR * c_R, v_NR.T)


def _mean_of_low_rank(direction: Any, grad_MN: Tensor) -> Tensor:
    return torch.mm(grad_MN @ direction.v_NR, direction.v_NR.T)


def _mean_of_core(direction: Any, grad_MN: Tensor) -> Tensor:
    u_MR, v_NR = direction.u_MR, direction.v_NR
    return torch.mm(u_MR @ (u_MR.T @ grad_MN @ v_NR), v_NR.T)


_MEANS: dict[type[FixedFactors], Callable[[Any, Tensor], Tensor]] = {
    CP: _mean_of_cp,
    LowRank: _mean_of_low_rank,
    Core: _mean_of_core,
}


def draw_estimator(numbers: Numbers, figure: Any) -> None:
    """Draws variance / (M N) against the rank, with closed forms as lines (left), and cosines given factors (right)."""
    figure.set_size_inches(9.0, 4.2)
    variances, cosines = figure.subplots(1, 2)
    rows = numbers["over_all_draws"]
    ranks = sorted({row["rank"] for row in rows if row["rank"]})
    sizes = sorted({row["size"] for row in rows})
    for i, name in enumerate(SECOND_MOMENTS):
        for j, size in enumerate(sizes):
            look = {"fmt": _MARKERS[j % len(_MARKERS)], "color": COLOURS[i], "markersize": 4, "elinewidth": 0.8}
            own = [row for row in rows if row["method"] == name and row["size"] == size]
            x = [row["rank"] or ranks[-1] * 2 for row in own]
            apart = 1.04 ** (len(sizes) * (i - 1.5) + j - (len(sizes) - 1) / 2)  # keeps points from hiding each other
            y, bars, closed = (
                [scale * row[key] / size**2 for row in own]
                for scale, key in ((1, "variance"), (2, "variance_se"), (1, "variance_closed"))
            )
            variances.plot(x, closed, color=COLOURS[i], linewidth=0.8)
            variances.errorbar([value * apart for value in x], y, bars, **look)
            own = [row for row in numbers["given_factors"] if row["method"] == name and row["size"] == size]
            x, y, bars = ([row[key] for row in own] for key in ("cosine_closed", "cosine", "cosine_spread"))
            cosines.errorbar(x, y, bars, **look)
        variances.plot([], [], color=COLOURS[i], label=name)
    for j, size in enumerate(sizes):
        variances.plot([], [], _MARKERS[j % len(_MARKERS)], color="grey", markersize=4, label=f"{size} x {size}")
    variances.set(
        xscale="log", xlabel="rank", ylabel="E|$\\kappa Z$ - G|$^2$ / (M N |G|$^2$), G is M x N", ylim=(0, None)
    )
    variances.set_xticks([*ranks, ranks[-1] * 2], [*map(str, ranks), "dense"])
    variances.minorticks_off()
    cosines.axline((1, 1), slope=1, color="grey", linewidth=0.8, label="equal")
    cosines.set(xscale="log", yscale="log", xlabel="closed form", ylabel="cosine to G, rms and spread over factors")
    variances.set_title("variance of one estimate")
    cosines.set_title("mean given the fixed factors (colours as left)")
    variances.legend(fontsize=7, ncols=2)
    cosines.legend(fontsize=7)


def caption_estimator(numbers: Numbers) -> str:
    """The caption of the figure."""
    rows = numbers["over_all_draws"]
    sizes = ", ".join(map(str, sorted({row["size"] for row in rows})))
    ranks = ", ".join(map(str, sorted({row["rank"] for row in rows if row["rank"]})))
    worst = max(abs(row["variance"] - row["variance_closed"]) / row["variance_se"] for row in rows)
    last = [row for row in numbers["given_factors"] if row["method"] == "tezo"][-1]
    return (
        f"kappa Z for a linear loss with a Gaussian gradient, M = N = {sizes}, rank {ranks}, unit scale: points are "
        f"draws with two standard errors, lines closed forms, at most {worst:.1f} standard errors apart. Given its "
        f"factors, tezo's mean has the cosine {last['cosine']:.4f} to the gradient at {last['size']} x {last['size']}, "
        f"rank {last['rank']} (closed form {last['cosine_closed']:.4f})."
    )


ESTIMATOR = Analysis(
    name="estimator",
    paper="Theorem 1",
    needs="nothing",
    options=EstimatorOptions,
    measure=measure_estimator,
    draw=draw_estimator,
    caption=caption_estimator,
)
