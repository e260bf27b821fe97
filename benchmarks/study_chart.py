"""The study's figure: dev loss against forward passes, a panel for each column."""

import math
import statistics
from pathlib import Path
from typing import Any

from tezo_studies.analysis.figure import COLOURS, Analysis, drawn

LABELS = {"sst2": "SST-2", "sst5": "SST-5", "trec": "TREC", "snli": "SNLI", "rte": "RTE"}
PUBLISHED: dict[str, tuple[str, Any]] = {
    "mezo": ("#999999", "-"),
    "mezo-norm": ("#999999", ":"),
    "lozo": ("#777777", "--"),
    "subzo": ("#777777", "-."),
    "tezo": ("#444444", "-"),
    "tezo-adam": ("#444444", "--"),
}
"""Colour and stroke of the lines to compare with."""
OURS: dict[str, tuple[str, Any]] = {
    "tezo-cadam": (COLOURS[5], "-"),
    "tezo-act": (COLOURS[4], "-"),
    "cadam-act": (COLOURS[0], "-"),
    "lozo-act": (COLOURS[2], "-"),
    "lozo-adam-gauss": (COLOURS[3], "-"),
    "lozo-adam-act": (COLOURS[1], "-"),
    "lozo-adam-act-feedback": (COLOURS[1], "--"),
}
"""Other variants of these are in the tables alone."""
DECODER: dict[str, tuple[str, Any]] = {
    key + suffix: (colour, stroke)
    for key, colour in (
        ("tezo", COLOURS[5]), ("tezo-cadam", COLOURS[4]), ("cadam-act", COLOURS[0]), ("lozo-adam-act", COLOURS[1]),
    )
    for suffix, stroke in (("", "--"), ("-per-example", "-"))
} | {"lozo-adam-act-feedback-per-example": (COLOURS[2], "-")}  # fmt: skip
"""Dashed where directions are shared."""


def save_chart(curves: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figure as .png and .svg, by the table's name; their paths."""
    figure = drawn(CHART, curves)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{curves['table']}{kind}" for kind in (".png", ".svg")]
    figure.savefig(paths[0], dpi=150, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def draw(curves: dict[str, Any], figure: Any) -> None:
    """Small multiples with one legend below."""
    columns, lines = curves["columns"], {line["key"]: line for line in curves["lines"]}
    styles = DECODER if curves["table"] == "study-decoder" else PUBLISHED | OURS
    wide = min(4, len(columns))
    high = math.ceil(len(columns) / wide)
    figure.set_size_inches(
        max(5.0, (4.2 if styles is DECODER else 2.9) * wide), 2.6 * high + (0.9 if wide > 1 else 1.4)
    )
    panels = list(figure.subplots(high, wide, squeeze=False).flat)
    for panel, key in zip(panels, columns, strict=False):
        fill(panel, key, lines, styles)
    for panel in panels[len(columns) :]:
        panel.set_axis_off()
    for panel in panels[: len(columns)][-wide:]:
        panel.set_xlabel("forward passes")
    for panel in panels[: len(columns) : wide]:
        panel.set_ylabel("dev loss")
    named = {text: mark for panel in panels for mark, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=3 if styles is DECODER else 2 + wide, fontsize=8
    )


def title_of(column: str) -> str:
    """sst2-16 -> SST-2, 16 of each class; completions-batch-64 -> completions, batches of 64."""
    task, _, count = column.partition("-")
    if count.startswith("batch-"):
        return f"{task}, batches of {count.removeprefix('batch-')}"
    return f"{LABELS.get(task, task)}, {count} of each class"


def fill(panel: Any, column: str, lines: dict[str, Any], styles: dict[str, tuple[str, Any]]) -> None:
    """A column's curves, ours on top, and where fine-tuning ends."""
    panel.set_title(title_of(column), fontsize=9)
    for place, (key, (colour, stroke)) in enumerate(styles.items()):
        runs = [run for run in curve_of(lines.get(key), column) if run["passes"]]
        if not runs:
            continue
        seeds = list(zip(*(run["dev_loss"] for run in runs), strict=False))
        passes, means = runs[0]["passes"][: len(seeds)], [statistics.mean(losses) for losses in seeds]
        width = 1.1 if key in PUBLISHED and styles is not DECODER else 1.8
        panel.plot(passes, means, color=colour, linestyle=stroke, linewidth=width, label=lines[key]["label"],
                   zorder=3 + place)  # fmt: skip
        panel.fill_between(passes, [*map(min, seeds)], [*map(max, seeds)], color=colour, linewidth=0,
                           alpha=0.06 if width < 1.8 else 0.12)  # fmt: skip
    tuned = [run["dev_loss"][-1] for run in curve_of(lines.get("ft"), column) if run["dev_loss"]]
    if tuned:
        panel.axhline(statistics.mean(tuned), color="black", linestyle=(0, (1, 2)), linewidth=1.2, label="FT, final")


def curve_of(line: dict[str, Any] | None, column: str) -> list[dict[str, Any]]:
    """A line's runs of a column; none where it has none."""
    runs: list[dict[str, Any]] = line["columns"].get(column, {"runs": []})["runs"] if line is not None else []
    return runs


CHART = Analysis("study", "", "runs", dict, lambda _, __: {}, draw, lambda _: "")
