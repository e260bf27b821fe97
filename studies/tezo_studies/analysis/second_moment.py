"""TeZO-Adam's separable second moment: what it leaves out, and how little it depends on the gradient (App. A.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo.directions.random import DrawKey, normal
from tezo.directions.spaces import CP
from tezo.methods import METHODS
from tezo.system.errors import RequestError
from tezo_studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo_studies.analysis.matrices import linear, require_at_least, require_sizes, unit_gradient

_PATCH = 24


@dataclass(frozen=True, kw_only=True)
class SecondMomentOptions:
    """Options of `second-moment`."""

    sizes: Sequence[int] = (64, 256, 512)
    """Numbers of rows and columns of the matrices. The paper uses up to 4096."""
    rank: int = 64
    """Rank of Z. The paper uses 64."""
    steps: int = 300
    """Steps of the exponential average. The paper uses 1000."""
    beta2: float = 0.99
    """Decay rate of the exponential average. The paper uses 0.99."""
    draws: int = 20000
    """Draws of tau for the mean of kappa^2 tau_s^2; at least `steps`."""
    seed: int = 0
    """Seed of all draws."""


def measure_second_moment(options: SecondMomentOptions, given: Given) -> Numbers:
    """The separable term of Z^2 compared with Z^2, in one step and in Adam's exponential average.

    With Z = sum_s tau_s u_s v_s^T and kappa = 1, as in App. A.2, per size (M = N):

        F = Z^2,   S = sum_s tau_s^2 u_s^2 (v_s^2)^T,   V and V^ their averages with beta2.

    Each comparison has `norm` |V - V^| / |V| (Frobenius), `norm_of_root` the same for the square roots, `entries` the
    rms over entries of (V - V^) / V^, `entries_of_root` the same for the square roots, `correlation` (Pearson, over
    entries), `mean_ratio`, the mean of V^ over that of V, and `paper`, the |V - V^| / (M N) that App. A.2 plots. For
    tau_V see `uniformity`.

    Raises:
        RequestError: an option is out of range.
    """
    del given
    require_sizes(options.sizes, [options.rank], "rank")
    require_at_least(1, steps=options.steps)
    require_at_least(options.steps, draws=options.draws)
    if not 0 <= options.beta2 < 1:
        raise RequestError(f"beta2 is {options.beta2}; it must be at least 0 and below 1.")
    rows = []
    for size in options.sizes:
        u_MR, v_NR, tau_TR = _drawn(size, options)
        rows.append(
            {
                "size": size,
                "one_step": comparison(*squares(u_MR, v_NR, tau_TR[0])),
                "averaged": _averaged(u_MR, v_NR, tau_TR, options.beta2),
                "uniformity": uniformity(u_MR.double(), v_NR.double(), unit_gradient(size, options.seed), options),
                "patch": _patch(u_MR, v_NR, tau_TR[0]),
            }
        )
    return {"rank": options.rank, "beta2": options.beta2, "steps": options.steps, "sizes": rows}


def _drawn(size: int, options: SecondMomentOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The factors u (M, R) and v (N, R) of a run of TeZO-Adam, and tau of its steps (T, R)."""
    optimizer = METHODS["tezo-adam"].build(linear(size, torch.float32), rank=options.rank, scale="raw")
    (target,) = optimizer.targets
    points = [optimizer.perturbation.direction(target, DrawKey(options.seed, t), {}) for t in range(options.steps)]
    first = points[0]
    assert isinstance(first, CP)
    return first.u_MR, first.v_NR, torch.stack([p.coefficient for p in points if isinstance(p, CP)])


def squares(u_MR: Tensor, v_NR: Tensor, tau_R: Tensor) -> tuple[Tensor, Tensor]:
    """(Z^2, its separable term sum_s tau_s^2 u_s^2 (v_s^2)^T), both (M, N)."""
    return ((u_MR * tau_R) @ v_NR.T).square(), separable(u_MR, v_NR, tau_R.square())


def separable(u_MR: Tensor, v_NR: Tensor, tau_v_R: Tensor) -> Tensor:
    """sum_s tau_V,s u_s^2 (v_s^2)^T, (M, N); TeZO-Adam divides by its square root."""
    return (u_MR.square() * tau_v_R) @ v_NR.square().T


def comparison(full_MN: Tensor, kept_MN: Tensor) -> dict[str, float]:
    """Compares `kept_MN` with `full_MN`, both (M, N) and nonnegative; see `measure_second_moment` for the keys."""
    full, kept = full_MN.double().flatten(), kept_MN.double().flatten()
    floor = kept.clamp_min(torch.finfo(torch.float64).tiny)
    relative, of_root = (full - kept) / floor, (full.sqrt() - kept.sqrt()) / floor.sqrt()
    errors = {
        "norm": (full - kept).norm() / full.norm(),
        "norm_of_root": (full.sqrt() - kept.sqrt()).norm() / full.sum().sqrt(),
        "entries": relative.square().mean().sqrt(),
        "entries_of_root": of_root.square().mean().sqrt(),
        "correlation": correlation(full, kept),
        "mean_ratio": kept.mean() / full.mean(),
        "paper": (full - kept).norm() / full.numel(),
    }
    return {name: float(value) for name, value in errors.items()}


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation over entries; 1 if one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = a.norm() * b.norm()
    return (a * b).sum() / scale if scale > 0 else torch.ones(())


def _averaged(u_MR: Tensor, v_NR: Tensor, tau_TR: Tensor, beta2: float) -> list[dict[str, float]]:
    """The comparison of the averages after the steps of `recorded_steps`."""
    recorded, comparisons = set(recorded_steps(len(tau_TR))), []
    full_MN = u_MR.new_zeros(len(u_MR), len(v_NR))
    tau_v_R = torch.zeros_like(tau_TR[0])
    for step, tau_R in enumerate(tau_TR, start=1):
        z_MN = (u_MR * tau_R) @ v_NR.T
        full_MN.mul_(beta2).addcmul_(z_MN, z_MN, value=1 - beta2)
        tau_v_R.mul_(beta2).addcmul_(tau_R, tau_R, value=1 - beta2)
        if step in recorded:
            comparisons.append({"step": step} | comparison(full_MN, separable(u_MR, v_NR, tau_v_R)))
    return comparisons


def recorded_steps(steps: int) -> list[int]:
    """About twelve steps per decade from 1 to `steps`, including 100 and the last."""
    spread = {round(10 ** (k / 12)) for k in range(12 * len(str(steps)) + 1)} | {100, steps}
    return sorted(step for step in spread if step <= steps)


def uniformity(u_MR: Tensor, v_NR: Tensor, grad_MN: Tensor, options: SecondMomentOptions) -> dict[str, Any]:
    """How much TeZO-Adam's tau_V varies over s, for a linear loss with gradient G.

    kappa = sum_q c_q tau_q with c_s = <G, u_s v_s^T>, so E[kappa^2 tau_s^2] = |c|^2 + 2 c_s^2. The coefficient of
    variation of these r numbers is `closed` for the given factors, and about 2 sqrt(2) / (r + 2), `leading`, for a
    Gaussian G. `drawn` is the coefficient of variation of the mean over draws of tau, `averaged` that of tau_V after
    `steps` steps with beta2. `relative` is E[kappa^2 tau_s^2] over its mean, sorted. `entries` is the coefficient of
    variation of the entries of V^, and `of_factors` the same if tau_V were constant: V^ varies with the draw of u and
    v, but not with the gradient. `correlation` is the correlation between the two matrices.
    """
    c_R = torch.einsum("mn,ms,ns->s", grad_MN, u_MR, v_NR)
    closed_R = c_R.square().sum() + 2 * c_R.square()
    tau_DR = normal((options.draws, len(c_R)), seed=options.seed, step=0, name="uniformity", role="tau")
    drawn_R = ((tau_DR @ c_R).square()[:, None] * tau_DR.square()).mean(dim=0)
    averaged_R = torch.zeros_like(c_R)
    for tau_R in tau_DR[: options.steps]:
        averaged_R = options.beta2 * averaged_R + (1 - options.beta2) * (tau_R @ c_R).square() * tau_R.square()
    kept, plain = separable(u_MR, v_NR, closed_R), separable(u_MR, v_NR, torch.ones_like(c_R))
    return {
        "closed": variation(closed_R),
        "leading": 2 * 2**0.5 / (len(c_R) + 2),
        "drawn": variation(drawn_R),
        "averaged": variation(averaged_R),
        "relative": (closed_R / closed_R.mean()).sort().values.tolist(),
        "entries": variation(kept),
        "of_factors": variation(plain),
        "correlation": float(correlation(kept, plain)),
    }


def variation(values: Tensor) -> float:
    """Standard deviation over the mean."""
    return float(values.std(correction=0) / values.mean())


def _patch(u_MR: Tensor, v_NR: Tensor, tau_R: Tensor) -> dict[str, list[list[float]]]:
    """The upper left corner of Z^2, of its separable term, and of their difference."""
    full, kept = squares(u_MR[:_PATCH].double(), v_NR[:_PATCH].double(), tau_R.double())
    parts = {"full": full, "separable": kept, "cross": full - kept}
    return {name: [[round(x, 3) for x in row] for row in part.tolist()] for name, part in parts.items()}


def draw_second_moment(numbers: Numbers, figure: Any) -> None:
    """Draws a corner of the terms of one step (top); errors, the paper's error, correlation and tau_V (bottom)."""
    figure.set_size_inches(10.5, 6.0)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.0, 1.1))
    _draw_patch(numbers, top)
    errors, papers, correlations, taus = panels = bottom.subplots(1, 4)
    for index, row in enumerate(numbers["sizes"]):
        # the curves of different sizes nearly coincide, so the first lines are wider
        look = {"color": COLOURS[index % len(COLOURS)], "linewidth": max(1.0, 4.0 - 1.3 * index)}
        steps = [point["step"] for point in row["averaged"]]
        curves = {key: [point[key] for point in row["averaged"]] for key in row["averaged"][0]}
        label = f"{row['size']} x {row['size']}"
        errors.plot(steps, curves["entries"], label=label, **look)
        errors.plot(steps, curves["entries_of_root"], "--", **look)
        papers.plot(steps, curves["paper"], label=label, **look)
        correlations.plot(steps, curves["correlation"], label=label, **look)
        relative = row["uniformity"]["relative"]
        taus.plot(range(1, len(relative) + 1), relative, ".", markersize=3, color=look["color"], label=label)
    errors.plot([], [], "--", color="grey", label="of the root")
    taus.axhline(1, color="grey", linewidth=0.8)
    errors.set(xscale="log", yscale="log", ylabel="rms relative error of an entry", title="separable V against V")
    papers.set(xscale="log", yscale="log", ylabel="|V - separable V| / (M N), V is M x N", title="as App. A.2 plots it")
    correlations.set(xscale="log", ylim=(0, 1.02), ylabel="correlation over entries", title="separable V with V")
    taus.set(ylim=(0, 2), ylabel="E[$\\kappa^2\\tau_s^2$] over its mean", title="$\\tau_V$ is nearly one number")
    for axes in panels:
        axes.set_xlabel("s, in order" if axes is taus else "step")
        axes.legend(fontsize=7)


def _draw_patch(numbers: Numbers, figure: Any) -> None:
    row = numbers["sizes"][-1]
    patch = row["patch"]
    bound = 4 * numbers["rank"]
    panels = figure.subplots(1, 3)
    titles = {"full": "$Z^2$", "separable": "separable term", "cross": "cross terms, left out"}
    image = None
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        image = axes.imshow(patch[name], vmin=-bound, vmax=bound)
        axes.set(title=title, xlabel="column", ylabel="row")
        axes.grid(False)
    figure.colorbar(image, ax=list(panels), label=f"value, one step, {row['size']} x {row['size']}", extend="both")


def caption_second_moment(numbers: Numbers) -> str:
    """The caption of the figure."""
    sizes = ", ".join(str(row["size"]) for row in numbers["sizes"])
    last = numbers["sizes"][-1]
    end = last["averaged"][-1]
    return (
        f"Z^2 and its separable term for Gaussian factors and tau, kappa = 1, M = N = {sizes}, rank {numbers['rank']}, "
        f"averaged with beta2 = {numbers['beta2']} over {numbers['steps']} steps. At {last['size']} an entry of the "
        f"separable term is off by {last['one_step']['entries']:.2f} of itself (rms) in one step and by "
        f"{end['entries']:.1%} in the average, and E[kappa^2 tau_s^2] varies over s by "
        f"{last['uniformity']['closed']:.1%}."
    )


SECOND_MOMENT = Analysis(
    name="second-moment",
    paper="App. A.2",
    needs="nothing",
    options=SecondMomentOptions,
    measure=measure_second_moment,
    draw=draw_second_moment,
    caption=caption_second_moment,
)
