"""The gradients of a run lie close to one subspace (Figure 1b, App. A.1.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import ALL_LINEAR, Target
from tezo_studies.analysis.figure import Analysis, Given, Numbers
from tezo_studies.analysis.gradient_spectrum import short
from tezo_studies.analysis.gradients import GradientOptions, Sketch, Watcher, described, on_what, rounded, watched_run

DEPTHS = (15 / 31, 28 / 31)
"""Where in the list of layers the cosine maps lie: the paper's are of layers 15 and 28 of LLaMA-7B's 0 to 31."""
PREFIXES = 50
"""Number of values of t, at most, at which the first t gradients are looked at."""


@dataclass(frozen=True, kw_only=True)
class SubspaceOptions(GradientOptions):
    """Options of `gradient-subspace`."""

    layers: Sequence[str] = (ALL_LINEAR,)
    """Name patterns of the parameters to analyse. Cosines are drawn of two of them; of both, if two are chosen."""
    top: int = 100
    """Number of singular values to keep. The paper uses 100."""
    sketch: int = 65521
    """Size of a gradient's sketch if it has more entries; see `tezo_studies.analysis.gradients.Sketch`."""


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
    """How many directions a layer's gradients of all steps lie in, over layers and steps, and cosines between them.

    G has a column for each step, the gradient scaled to norm 1. Per layer: `singular_values`, the largest of G;
    `for_90_percent`, how many of them have 90 % of its energy; `growth`, the same for the first t columns, over t, at
    each t of `prefixes`; `mean_cosine` between two columns. `cosines` has G^T G for the layers at `DEPTHS`.

    Raises:
        RequestError: too few steps, or a pattern that no matrix matches.
    """
    watchers, losses, job = watched_run(options, given, lambda of: Directions(of, options.sketch), least_steps=3)
    mapped, prefixes = mapped_layers(list(watchers)), prefixes_of(options.steps)
    layers, cosines = {}, {}
    for name, watcher in watchers.items():
        gram_TT = watcher.gram()
        values = column_values(gram_TT)
        off = gram_TT[~torch.eye(len(gram_TT), dtype=torch.bool)]
        layers[name] = {
            "shape": list(job.model.get_parameter(name).shape),
            "singular_values": rounded(values[: options.top]),
            "for_90_percent": needed(values, 0.9),
            "growth": rounded(growth(gram_TT, prefixes), 3),
            "mean_cosine": float(off.mean()),
            "standard_error": watcher.sketch.standard_error,
        }
        if name in mapped:
            cosines[name] = [rounded(row, 3) for row in gram_TT]
    return described(options, losses, job) | {"prefixes": prefixes, "layers": layers, "cosines": cosines}


def mapped_layers(names: Sequence[str]) -> list[str]:
    """The layers at `DEPTHS` of the list; both of two."""
    places = {round(depth * (len(names) - 1)) for depth in DEPTHS}
    return [names[place] for place in sorted(places)]


def prefixes_of(steps: int) -> list[int]:
    """At most `PREFIXES` numbers of first steps, ascending, evenly spread, the last of them all steps."""
    count = min(PREFIXES, steps)
    return [round(steps * (i + 1) / count) for i in range(count)]


def growth(gram_TT: Tensor, prefixes: Sequence[int]) -> list[float]:
    """For each t of `prefixes` the number of directions with 90 % of the energy of the first t columns, over t."""
    return [needed(column_values(gram_TT[:t, :t]), 0.9) / t for t in prefixes]


def column_values(gram_TT: Tensor) -> Tensor:
    """Singular values of G, descending, from G^T G."""
    values: Tensor = torch.linalg.eigvalsh(gram_TT).clamp(min=0).sqrt().flip(0)
    return values


def needed(values: Tensor | Sequence[float], share: float) -> int:
    """Number of leading singular values with at least a fraction `share` of the sum of squares."""
    energy = torch.as_tensor(values).double().square().cumsum(0)
    return int((energy < share * energy[-1]).sum()) + 1


def draw_subspace(numbers: Numbers, figure: Any) -> None:
    """Draws heat maps: singular values over layers, their growth over layers and steps, and the cosines below."""
    figure.set_size_inches(8.0, 7.0)
    (spectra, growths), below = figure.subplots(2, 2)
    layers = list(numbers["layers"].values())
    values_LK = torch.tensor([layer["singular_values"] for layer in layers])
    image = _heat(spectra, (values_LK / values_LK[:, :1]).T, "normalised gradients of all steps, side by side")
    spectra.set(xlabel="linear layer", ylabel="singular value")
    figure.colorbar(image, ax=spectra, label="share of the largest of the layer")
    growth_LP = torch.tensor([layer["growth"] for layer in layers])
    image = _heat(growths, growth_LP.T, "directions with 90 % of the energy of the first t gradients")
    growths.set(xlabel="linear layer", ylabel="steps t")
    places = sorted({round(i * (len(numbers["prefixes"]) - 1) / 4) for i in range(5)})
    growths.set_yticks(places, [str(numbers["prefixes"][place]) for place in places])
    figure.colorbar(image, ax=growths, label="directions over t")
    for place in below[len(numbers["cosines"]) :]:
        place.set_visible(False)
    for place, (name, cosines) in zip(below, numbers["cosines"].items(), strict=False):
        image = place.imshow(cosines, vmin=-1, vmax=1, interpolation="nearest")
        place.set(xlabel="step", ylabel="step")
        place.set_title(short(name), fontsize=8)
        place.grid(visible=False)
    figure.colorbar(image, ax=list(below), label="cosine of the two steps' gradients")


def _heat(place: Any, shares: Tensor, title: str) -> Any:
    place.set_title(title, fontsize=8)
    place.grid(visible=False)
    return place.imshow(shares.numpy(), aspect="auto", vmin=0, vmax=1, interpolation="nearest")


def caption_subspace(numbers: Numbers) -> str:
    """The caption of the figure."""
    layers = numbers["layers"].values()
    needs = [layer["for_90_percent"] for layer in layers]
    means = [layer["mean_cosine"] for layer in layers]
    return (
        f"90 % of the energy of {numbers['steps']} normalised gradients lies in {min(needs)} to {max(needs)} "
        f"directions in {len(needs)} linear layers; two gradients have a mean cosine of {min(means):.2f} to "
        f"{max(means):.2f}, by layer. Below, cosines of {' and '.join(map(short, numbers['cosines']))}. "
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
