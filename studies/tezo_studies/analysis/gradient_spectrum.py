"""Each gradient is nearly of low rank (Figure 1a, App. A.1.1)."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo_studies.analysis.figure import Analysis, Given, Numbers
from tezo_studies.analysis.gradients import (
    GradientOptions,
    Watcher,
    described,
    on_what,
    rounded,
    singular_values,
    watched_run,
)

LINE = 0.02
"""Fraction of the largest singular value at which the paper draws its line."""


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions(GradientOptions):
    """Options of `gradient-spectrum`."""

    top: int = 100
    """Number of singular values to keep. The paper uses 100."""


class Spectrum(Watcher):
    """Keeps the largest singular values of every gradient, and counts those above `LINE`."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.values: list[Tensor] = []
        self.above: list[int] = []

    def see(self, gradient_MN: Tensor) -> None:
        values = singular_values(gradient_MN)
        self.values.append(values[: self.top])
        self.above.append(int((values > LINE * values[0]).sum()))


def measure_spectrum(options: SpectrumOptions, given: Given) -> Numbers:
    """The largest singular values of the gradients of some layers, step by step."""
    watchers, losses, job = watched_run(options, given, lambda _: Spectrum(options.top))
    layers = {}
    for name, watcher in watchers.items():
        layers[name] = {
            "shape": list(job.model.get_parameter(name).shape),
            "singular_values": [rounded(row) for row in watcher.values],
            "above_line": watcher.above,
        }
    return described(options, losses, job) | {"line": LINE, "layers": layers}


def draw_spectrum(numbers: Numbers, figure: Any) -> None:
    """Draws one heat map per layer: singular values relative to the step's largest (log10), against steps."""
    layers = numbers["layers"]
    columns = min(2, len(layers))
    figure.set_size_inches(7.0, 2.6 * -(-len(layers) // columns) + 0.4)
    axes = figure.subplots(-(-len(layers) // columns), columns, squeeze=False)
    for place in axes.flat[len(layers) :]:
        place.set_visible(False)
    for place, (name, layer) in zip(axes.flat, layers.items(), strict=False):
        values_TK = torch.tensor(layer["singular_values"])
        shares = (values_TK / values_TK[:, :1].clamp(min=1e-30)).clamp(min=1e-4).log10()
        image = place.imshow(shares.T.numpy(), aspect="auto", vmin=-4, vmax=0, interpolation="nearest")
        place.plot(range(len(values_TK)), [count - 0.5 for count in layer["above_line"]], color="white", linewidth=1.2)
        place.set(xlabel="step", ylabel="singular value", title=f"{short(name)}  {'x'.join(map(str, layer['shape']))}")
        place.title.set_fontsize(8)
        place.set_ylim(values_TK.shape[1] - 0.5, -0.5)
        place.grid(visible=False)
    figure.colorbar(image, ax=list(axes.flat), label="log10 of the share of the largest")


def short(name: str) -> str:
    """A parameter's name without ".weight"."""
    return name.removesuffix(".weight")


def caption_spectrum(numbers: Numbers) -> str:
    """The caption of the figure."""
    counts = [
        f"{statistics.median(layer['above_line']):.0f} of {min(layer['shape'])}" for layer in numbers["layers"].values()
    ]
    return (
        f"Singular values of gradients, over the largest of the step; {', '.join(counts)} are above the white line at "
        f"{100 * numbers['line']:.0f} % of it in the median step. {on_what(numbers)}."
    )


SPECTRUM = Analysis(
    name="gradient-spectrum",
    paper="Fig. 1a, App. A.1.1",
    needs="model",
    options=SpectrumOptions,
    measure=measure_spectrum,
    draw=draw_spectrum,
    caption=caption_spectrum,
)
