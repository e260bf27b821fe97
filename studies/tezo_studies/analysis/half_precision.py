"""Half precision with in-place perturbations and updates: drift and lost updates, and this library's remedy.

In-place code reaches W + rho z, W - rho z and W again by three additions. Each is rounded, so the weights drift. An
update lr kappa z is far below the spacing of a weight, so rounding to nearest loses most of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo.directions.random import generator, normal
from tezo.forward import rounding
from tezo.methods.mezo import mezo
from tezo.models.loading import DTYPES
from tezo.system.errors import RequestError
from tezo_studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo_studies.analysis.gradients import rounded
from tezo_studies.analysis.matrices import linear, require_at_least


@dataclass(frozen=True, kw_only=True)
class HalfOptions:
    """Options of `half-precision`."""

    size: int = 256
    """Number of rows and columns of the matrix."""
    steps: int = 200
    """Number of steps."""
    dtypes: Sequence[str] = ("bfloat16", "float16")
    """Data types of the weight."""
    spread: float = 0.02
    """Standard deviation of the weight's entries, as in many initialisations."""
    rho: float = 1e-3
    """Perturbation scale. The paper uses 1e-3."""
    step: float = 1e-6
    """Size of an entry's update, lr kappa; the default is the paper's learning rate with kappa = 1."""
    seed: int = 0
    """Seed of all draws."""


def measure_half(options: HalfOptions, given: Given) -> Numbers:
    """Drift of weights that are restored in place, and the fraction of small updates that arrives, in half precision.

    `drift_in_place`, `drift_ours`: root mean square of W_t - W_0 over that of W_0, step by step, at learning rate 0.
    `arrived_nearest`, `arrived_stochastic`: <W_t - W_0, sum of updates> over |sum of updates|^2; 1 if all arrives.
    """
    del given
    require_at_least(1, size=options.size, steps=options.steps)
    unknown = [name for name in options.dtypes if name not in DTYPES]
    if unknown or not options.dtypes:
        raise RequestError(f"dtypes is {list(options.dtypes)}; give some of {', '.join(DTYPES)}.")
    return {"of": {name: _measure_dtype(options, DTYPES[name]) for name in options.dtypes}}


def _measure_dtype(options: HalfOptions, dtype: torch.dtype) -> dict[str, Any]:
    shape = (options.size, options.size)
    start = (normal(shape, seed=options.seed, step=0, name="weight", role="w") * options.spread).to(dtype)
    return {
        "drift_in_place": rounded(drift_in_place(start, options)),
        "drift_ours": rounded(drift_ours(start, options)),
        "arrived_nearest": rounded(arrived(start, options, stochastic=False)),
        "arrived_stochastic": rounded(arrived(start, options, stochastic=True)),
    }


def drift_in_place(start: Tensor, options: HalfOptions) -> list[float]:
    """Drift of W += rho z, W -= 2 rho z, W += rho z in the weight's dtype, as in published code."""
    weight = start.clone()
    drift = []
    for step in range(options.steps):
        z = _noise(start, options, step)
        for scale in (1, -2, 1):
            weight += (scale * options.rho * z).to(weight.dtype)
        drift.append(_share(weight, start))
    return drift


def drift_ours(start: Tensor, options: HalfOptions) -> list[float]:
    """Drift of the same weight with this library's `mezo` at learning rate 0."""
    model = linear(len(start), start.dtype)
    model.weight.data.copy_(start)
    optimizer = mezo(model, lr=0.0, rho=options.rho, seed=options.seed)
    x = torch.ones(1, len(start), dtype=start.dtype)
    drift = []
    for _ in range(options.steps):
        optimizer.step(lambda: model(x).float().sum())
        drift.append(_share(model.weight.data, start))
    optimizer.close()
    return drift


def arrived(start: Tensor, options: HalfOptions, *, stochastic: bool) -> list[float]:
    """Fraction of the updates so far that is in the weight; updates have one sign, so rounding does not average out."""
    weight = start.clone()
    sign = _noise(start, options, 0).sign()
    draw = generator(weight.device, seed=options.seed, step=0, name="weight", role="rounding")
    fractions = []
    for step in range(1, options.steps + 1):
        if stochastic:
            rounding.add_(weight, sign, options.step, draw)
        else:
            weight += (options.step * sign).to(weight.dtype)
        moved = (weight.double() - start.double()) * sign.double()
        fractions.append(float(moved.mean()) / (options.step * step))
    return fractions


def _noise(start: Tensor, options: HalfOptions, step: int) -> Tensor:
    drawn: Tensor = normal(tuple(start.shape), seed=options.seed, step=step, name="weight", role="z").float()
    return drawn


def _share(weight: Tensor, start: Tensor) -> float:
    return float((weight.double() - start.double()).norm() / start.double().norm())


def draw_half(numbers: Numbers, figure: Any) -> None:
    """Draws the drift (left) and the updates that arrive (right); one colour per dtype, solid lines: this library."""
    left, right = figure.subplots(1, 2)
    for (name, of), colour in zip(numbers["of"].items(), COLOURS, strict=False):
        steps = range(1, len(of["drift_ours"]) + 1)
        left.plot(steps, [100 * x for x in of["drift_in_place"]], "--", color=colour, label=f"{name}, in place")
        left.plot(steps, [100 * x for x in of["drift_ours"]], color=colour, label=f"{name}, ours")
        right.plot(steps, [100 * x for x in of["arrived_nearest"]], "--", color=colour, label=f"{name}, to nearest")
        right.plot(steps, [100 * x for x in of["arrived_stochastic"]], color=colour, label=f"{name}, stochastic")
    left.set(xlabel="step", ylabel="% of the weight's size", title="drift at learning rate 0")
    right.set(xlabel="step", ylabel="% of the updates", title="updates that arrive", ylim=(-5, 115))
    for place in (left, right):
        place.legend(fontsize=7)


def caption_half(numbers: Numbers) -> str:
    """The caption of the figure."""
    last = {name: {key: values[-1] for key, values in of.items()} for name, of in numbers["of"].items()}
    drift = ", ".join(f"{100 * of['drift_in_place']:.2f} % in {name}" for name, of in last.items())
    lost = ", ".join(f"{100 * of['arrived_nearest']:.0f} % in {name}" for name, of in last.items())
    ours = max(of["drift_ours"] for of in last.values())
    steps = len(next(iter(numbers["of"].values()))["drift_ours"])
    return (
        f"After {steps} steps at learning rate 0, a weight restored in place has drifted by {drift} of its size, and "
        f"ours by {100 * ours:g} %. Of updates far below its spacing, {lost} arrive when rounded to the nearest, and "
        "all of them on average when rounded stochastically."
    )


HALF_PRECISION = Analysis(
    name="half-precision",
    paper="not in the paper",
    needs="nothing",
    options=HalfOptions,
    measure=measure_half,
    draw=draw_half,
    caption=caption_half,
)
