"""The figure of peak memory: inference, tezo, LoRA and full fine-tuning, from what `when.py` has measured.

    python benchmarks/memory_chart.py [--out docs/figures]

Writes memory-ways.png and memory-ways.svg. Needs the extra `figures`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tezo_studies.analysis.figure import COLOURS, Analysis, drawn

from tezo.forecast.memory import FULL, INFERENCE, LORA, LORA_CHECKPOINTED

HERE = Path(__file__).parent
DTYPE = "bfloat16"
WAYS = {
    INFERENCE: ("inference", "#999999"),
    "tezo-cadam": ("tezo-cadam", COLOURS[0]),
    "head-feedback": ("head-feedback, the default", COLOURS[1]),
    LORA_CHECKPOINTED: ("LoRA, checkpointed", COLOURS[3]),
    LORA: ("LoRA", COLOURS[4]),
    FULL: ("full, Adam", "#444444"),
}
"""Way in when.json -> (name in the figure, colour)."""


def main() -> None:
    """Writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/figures")
    given = parser.parse_args()
    cells = json.loads((HERE / "results/when.json").read_text(encoding="utf-8"))["cells"]
    figure = drawn(Analysis("memory", "", "runs", dict, lambda _, __: {}, draw, lambda _: ""), cells)
    figure.savefig(given.out / "memory-ways.png", dpi=150, metadata={"Software": None})
    figure.savefig(given.out / "memory-ways.svg", metadata={"Date": None})


def peak(cells: dict[str, Any], shape: str, way: str) -> float | None:
    """Measured bytes over those of the process without a model; None: not measured."""
    cell = cells.get(f"costs/{shape}/{DTYPE}/none/{way}/memory", {})
    return cell.get("bytes")


def draw(cells: dict[str, Any], figure: Any) -> None:
    """A panel for each shape, a bar for each way, as multiples of inference."""
    shapes = [shape for shape in ("opt-125m", "opt-350m", "opt-1.3b") if peak(cells, shape, INFERENCE)]
    figure.set_size_inches(2.6 * len(shapes) + 1.4, 2.4)
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    names = [name for name, _ in WAYS.values()]
    for panel, shape in zip(panels, shapes, strict=True):
        least = peak(cells, shape, INFERENCE)
        panel.set_title(shape.replace("opt", "OPT").replace("m", "M").replace("b", "B"), fontsize=9)
        for place, (way, (_, colour)) in enumerate(WAYS.items()):
            measured = peak(cells, shape, way)
            if measured is None or least is None:
                panel.text(0.05, place, "does not fit", va="center", fontsize=7, color="#777777")
                continue
            panel.barh(place, measured / least, color=colour, height=0.7)
            panel.text(measured / least, place, f" {measured / 2**30:.2f} GiB", va="center", fontsize=7)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.invert_yaxis()
        panel.set_xlabel("times inference", fontsize=8)
        panel.margins(x=0.35)
        panel.tick_params(axis="x", labelsize=7)


if __name__ == "__main__":
    main()
