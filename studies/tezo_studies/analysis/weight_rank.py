"""Ranks of weights and of their gradients, and the ranks that Eq. 7 selects (App. A.1.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo.directions.ranks import LayerwiseRank, significant_rank
from tezo.directions.targets import ALL_LINEAR
from tezo.system.errors import RequestError
from tezo_studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo_studies.analysis.gradients import GradientOptions, Watcher, described, on_what, singular_values, watched_run


@dataclass(frozen=True, kw_only=True)
class WeightRankOptions(GradientOptions):
    """Options of `weight-rank`."""

    layers: Sequence[str] = (ALL_LINEAR,)
    """Name patterns of the parameters to analyse."""
    steps: int = 10
    """Steps of first-order training; the ranks of their gradients are averaged."""
    thresholds: Sequence[float] = (0.2, 0.25, 0.3, 0.35)
    """Fractions of the largest singular value. The paper searches these."""
    max_rank: int = 256
    """Maximum rank of Eq. 7."""


class Ranks(Watcher):
    """Counts the singular values of each gradient that exceed each threshold."""

    def __init__(self, thresholds: Sequence[float]) -> None:
        self.thresholds = thresholds
        self.counts: list[list[int]] = []

    def see(self, gradient_MN: Tensor) -> None:
        values = singular_values(gradient_MN)
        self.counts.append([int((values > threshold * values[0]).sum()) for threshold in self.thresholds])


def measure_weight_rank(options: WeightRankOptions, given: Given) -> Numbers:
    """Ranks of weights and gradients at several thresholds, per layer, and the ranks that Eq. 7 selects."""
    if not options.thresholds or not all(0 < threshold < 1 for threshold in options.thresholds):
        raise RequestError(f"thresholds is {list(options.thresholds)}; give fractions between 0 and 1.")
    watchers, losses, job = watched_run(options, given, lambda _: Ranks(options.thresholds), least_steps=1)
    targets = {target.name: target for target in job.optimizer.targets if target.name in watchers}
    chosen = [
        LayerwiseRank(threshold=threshold, max_rank=options.max_rank).ranks(list(targets.values()))
        for threshold in options.thresholds
    ]
    layers = {
        name: {
            "shape": list(target.shape),
            "weight": [significant_rank(target.parameter.detach(), threshold) for threshold in options.thresholds],
            "gradient": torch.tensor(watchers[name].counts).double().mean(0).tolist(),
            "selected": [ranks[name] for ranks in chosen],
        }
        for name, target in targets.items()
    }
    correlations = [
        rank_correlation(*([layer[key][i] for layer in layers.values()] for key in ("weight", "gradient")))
        for i in range(len(chosen))
    ]
    ranks_of_layers = {"thresholds": list(options.thresholds), "rank_correlation": correlations, "layers": layers}
    return described(options, losses, job) | ranks_of_layers


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties; None if one of the sequences is constant."""
    ranks = [_ranks(torch.tensor(values).double()) for values in (one, other)]
    centred = [values - values.mean() for values in ranks]
    sizes = [float(values.norm()) for values in centred]
    return float(centred[0] @ centred[1]) / (sizes[0] * sizes[1]) if min(sizes) > 0 else None


def _ranks(values: Tensor) -> Tensor:
    below = (values.unsqueeze(0) < values.unsqueeze(1)).double().sum(1)
    same = (values.unsqueeze(0) == values.unsqueeze(1)).double().sum(1)
    return below + (same + 1) / 2


def draw_weight_rank(numbers: Numbers, figure: Any) -> None:
    """Draws the ranks of weight and gradient per layer at the second threshold (left), and Eq. 7's ranks (right)."""
    left, right = figure.subplots(1, 2)
    thresholds, layers = numbers["thresholds"], list(numbers["layers"].values())
    index = min(1, len(thresholds) - 1)
    for key, colour, marker in (("weight", COLOURS[0], "o"), ("gradient", COLOURS[1], "^")):
        left.plot([layer[key][index] for layer in layers], marker, color=colour, markersize=4, label=key)
    left.set(xlabel="linear layer", ylabel="rank", yscale="log", title=f"above {thresholds[index]:g} of the largest")
    left.legend()
    for i, (threshold, colour) in enumerate(zip(thresholds, COLOURS, strict=False)):
        selected = [layer["selected"][i] for layer in layers]
        right.plot(selected, color=colour, drawstyle="steps-mid", label=f"{threshold:g}")
    right.set(xlabel="linear layer", ylabel="rank", title="selected by Eq. 7 at each threshold")
    right.legend(title="threshold", fontsize=7)


def caption_weight_rank(numbers: Numbers) -> str:
    """The caption of the figure."""
    correlations = ", ".join("none" if c is None else f"{c:.2f}" for c in numbers["rank_correlation"])
    at = ", ".join(f"{threshold:g}" for threshold in numbers["thresholds"])
    return (
        f"Ranks of weights and gradients of {len(numbers['layers'])} linear layers; their rank correlation over the "
        f"layers is {correlations} at thresholds of {at}. {on_what(numbers)}."
    )


WEIGHT_RANK = Analysis(
    name="weight-rank",
    paper="App. A.1.3",
    needs="model",
    options=WeightRankOptions,
    measure=measure_weight_rank,
    draw=draw_weight_rank,
    caption=caption_weight_rank,
)
