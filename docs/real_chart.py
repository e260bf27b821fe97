"""The figure of dev loss against forward passes on a real model, from what `real_tasks.py` has measured.

    python docs/real_chart.py [--task issues] [--out docs/figures]

Writes real-TASK.png and real-TASK.svg. Needs the extra `figures`.
"""

import argparse
from pathlib import Path
from typing import Any

from drawing import read
from engine_tables import LORA, at_best_rate
from tezo_studies.analysis.figure import COLOURS, Analysis, drawn

LINES = {
    "gauss-newton": ("gauss-newton, the default for labels", COLOURS[1], "-"),
    "head-feedback": ("head-feedback", COLOURS[0], "-"),
    "tezo": ("TeZO", "#444444", "-"),
    "tezo-adam": ("TeZO-Adam", "#444444", "--"),
    "lozo": ("LOZO", "#777777", "-."),
    "mezo": ("MeZO", "#999999", "-"),
    "fzoo": ("FZOO, best of its rates", "#999999", ":"),
    "grzo": ("GRZO", "#777777", (0, (1, 1))),
}
"""Beginning of a run's name -> (name in the figure, colour, stroke)."""
OURS = ("gauss-newton", "head-feedback")


def main() -> None:
    """Writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="issues")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures")
    given = parser.parse_args()
    own = {
        name.partition("/")[2]: run
        for name, run in read("real_tasks")["runs"].items()
        if name.startswith(f"{given.task}/") and "curve" in run
    }
    figure = drawn(Analysis("real", "", "runs", dict, lambda _, __: {}, draw, lambda _: ""), own)
    figure.savefig(given.out / f"real-{given.task}.png", dpi=150, metadata={"Software": None})
    figure.savefig(given.out / f"real-{given.task}.svg", metadata={"Date": None})


def lowest_so_far(curve: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """(passes, loss of the state that the run would keep then)."""
    kept: list[float] = []
    for _, loss in curve:
        kept.append(min([loss, *kept[-1:]]))
    return [passes for passes, _ in curve], kept


def draw(runs: dict[str, Any], figure: Any) -> None:
    """A line for each seed of a method, at its best rate, and LoRA's, with the level of its end."""
    figure.set_size_inches(7.6, 3.4)
    panel = figure.subplots()
    for name, (label, colour, stroke) in LINES.items():
        for index, run in enumerate(at_best_rate(runs, name)[1]):
            passes, losses = lowest_so_far(run["curve"])
            style = {"color": colour, "linestyle": stroke, "linewidth": 2 if name == "gauss-newton" else 1.3}
            if name in OURS:
                style |= {"marker": "o", "markersize": 2.5}
            panel.plot(passes, losses, label=label if not index else None, **style)
    for run in at_best_rate(runs, LORA)[1]:
        passes, losses = lowest_so_far(run["curve"])
        panel.plot(passes, losses, color=COLOURS[2], linestyle="--", linewidth=1.3, label=f"{LORA}, best of its rates")
        panel.axhline(losses[-1], color=COLOURS[2], linestyle=":", linewidth=0.8)
    panel.set_xlabel("forward passes of 64 rows, including refreshes and searches")
    panel.set_ylabel("dev loss, lowest so far")
    figure.legend(fontsize=7, loc="outside right center")


if __name__ == "__main__":
    main()
