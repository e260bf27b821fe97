"""The gradients of a run lie close to one subspace (Figure 1b, App. A.1.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import Target
from tezo.studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo.studies.analysis.gradient_spectrum import short
from tezo.studies.analysis.gradients import GradientOptions, Sketch, Watcher, described, on_what, rounded, watched_run


@dataclass(frozen=True, kw_only=True)
class SubspaceOptions(GradientOptions):
    """Options of `gradient-subspace`."""

    sketch: int = 65521
    """Size of a gradient's sketch if it has more entries; see `tezo.studies.analysis.gradients.Sketch`."""


class Directions(Watcher):
    """Keeps a sketch of every gradient, scaled to norm 1."""

    def __init__(self, target: Target, size: int) -> None:
        self.sketch = Sketch(target.shape.numel(), size)
        self.rows: list[Tensor] = []

    def see(self, gradient_MN: Tensor) -> None:
        flat = gradient_MN.reshape(-1).float()
        self.rows.append(self.sketch.of(flat / flat.norm().clamp(min=1e-30)))

    def gram(self) -> Tensor:
        """Cosines between the gradients of all pairs of steps, G^T G, (T, T) in float64."""
        rows_TK = torch.stack(self.rows).double()
        return rows_TK @ rows_TK.T


def measure_subspace(options: SubspaceOptions, given: Given) -> Numbers:
    """Cosines between a layer's gradients at all pairs of steps, and singular values of the stacked gradients."""
    watchers, losses, job = watched_run(options, given, lambda of: Directions(of, options.sketch), least_steps=3)
    layers = {}
    for name, watcher in watchers.items():
        gram_TT = watcher.gram()
        values = torch.linalg.eigvalsh(gram_TT).clamp(min=0).sqrt().flip(0)
        off = gram_TT[~torch.eye(len(gram_TT), dtype=torch.bool)]
        layers[name] = {
            "shape": list(job.model.get_parameter(name).shape),
            "singular_values": rounded(values),
            "for_90_percent": needed(values, 0.9),
            "mean_cosine": float(off.mean()),
            "cosines": [rounded(row, 3) for row in gram_TT],
            "standard_error": watcher.sketch.standard_error,
        }
    return described(options, losses, job) | {"layers": layers}


def needed(values: Tensor | Sequence[float], share: float) -> int:
    """Number of leading singular values with at least a fraction `share` of the sum of squares."""
    energy = torch.as_tensor(values).double().square().cumsum(0)
    return int((energy < share * energy[-1]).sum()) + 1


def draw_subspace(numbers: Numbers, figure: Any) -> None:
    """Draws the singular values of all layers (left) and the cosines of the first layer (right)."""
    left, right = figure.subplots(1, 2)
    for (name, layer), colour in zip(numbers["layers"].items(), COLOURS * len(numbers["layers"]), strict=False):
        values = layer["singular_values"]
        left.plot(range(1, len(values) + 1), values, color=colour, label=short(name))
    left.axhline(1, color="grey", linestyle=":", linewidth=1)
    left.annotate("orthogonal gradients", (1, 1), xytext=(0, 3), textcoords="offset points", fontsize=6, color="grey")
    left.set(xlabel="singular value", ylabel="size", title="normalised gradients of all steps, stacked")
    left.legend(fontsize=6)
    name, layer = next(iter(numbers["layers"].items()))
    image = right.imshow(layer["cosines"], vmin=-1, vmax=1, interpolation="nearest")
    right.set(xlabel="step", ylabel="step", title=f"cosines, {short(name)}")
    right.grid(visible=False)
    figure.colorbar(image, ax=right, shrink=0.8)
    for place in (left, right):
        place.title.set_fontsize(8)


def caption_subspace(numbers: Numbers) -> str:
    """The caption of the figure."""
    layers = numbers["layers"].values()
    needs = [layer["for_90_percent"] for layer in layers]
    means = [layer["mean_cosine"] for layer in layers]
    return (
        f"90 % of the energy of {numbers['steps']} normalised gradients lies in {min(needs)} to {max(needs)} "
        f"directions, by layer; two of them have a mean cosine of {min(means):.2f} to {max(means):.2f}. "
        f"{on_what(numbers)}."
    )


SUBSPACE = Analysis(
    name="gradient-subspace",
    paper="Fig. 1b, App. A.1.2",
    needs="model",
    options=SubspaceOptions,
    measure=measure_subspace,
    draw=draw_subspace,
    caption=caption_subspace,
)
