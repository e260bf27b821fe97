"""Memory and time (the paper's Figure 1c and appendix tables): our benchmarks next to the paper's numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tezo.system.errors import RequestError
from tezo.system.files import UntrustedError, read_json
from tezo_studies.analysis.figure import COLOURS, Analysis, Given, Numbers
from tezo_studies.cost_tables.paper_costs import ADAPTERS, GIGABYTES, MILLISECONDS, MODELS

MEMORY_UNITS = {"unit": "peak memory over a forward pass's", "paper_unit": "memory over zero-shot"}
TIME_UNITS = {"unit": "a step over two forward passes", "paper_unit": "an iteration over MeZO's"}
PASSES = {
    "F": "F: a forward pass",
    "N": "N: a pass, needed logits only",
    "F2": "F2: two forward passes",
    "N2": "N2: two, needed logits only",
    "J2": "J2: one, over the batch twice",
}
"""Label of plain forward passes in a benchmark -> what the axis says."""


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """Options of `memory` and `step-time`."""

    paper_model: str = "OPT 13B"
    """Model of the paper whose numbers are drawn next to ours."""


def measure_memory(options: CostOptions, given: Given) -> Numbers:
    """Peak memory relative to inference, from `tezo bench memory`, next to the paper's numbers."""
    place = paper_place(options)
    base = GIGABYTES["zero-shot"][place]
    assert base is not None
    papers = {name: value / base for name, row in GIGABYTES.items() if (value := row[place]) is not None}
    if options.paper_model in ("OPT 6.7B", "OPT 13B"):
        papers |= {name: row[options.paper_model == "OPT 13B"] / base for name, row in ADAPTERS.items()}
    ours = results(given.paths, "memory", lambda row: row["over_F"]["ratio"] if "over_F" in row else None)
    return {"ours": ours, "paper": papers, "paper_model": options.paper_model} | MEMORY_UNITS


def measure_time(options: CostOptions, given: Given) -> Numbers:
    """Time of a step relative to two plain forward passes, from `tezo bench step`, next to the paper's numbers."""
    place = paper_place(options)
    base = MILLISECONDS["mezo"][place]
    assert base is not None
    papers = {name: value / base for name, row in MILLISECONDS.items() if (value := row[place]) is not None}
    ours = results(given.paths, "step", lambda row: row["to_F2"])
    return {"ours": ours, "paper": papers, "paper_model": options.paper_model} | TIME_UNITS


def results(paths: Sequence[Path], kind: str, figure: Callable[[dict[str, Any]], float | None]) -> list[dict[str, Any]]:
    """{"setting": text, "figures": {label: value}} for each result of one kind in files of `tezo bench`.

    Args:
        paths: JSON files that `tezo bench` wrote.
        kind: "step" or "memory".
        figure: row of a result -> value, or None if the row has none.

    Raises:
        RequestError: a file is not such a result, or there is none of this kind.
    """
    selected = []
    for path in paths:
        try:
            read = read_json(path.resolve())
            for result in read if isinstance(read, list) else [read]:
                if result["kind"] == kind:
                    figures = {row["label"]: figure(row) for row in result["rows"]}
                    selected.append({"setting": in_words(result["settings"]), "figures": figures})
        except (UntrustedError, KeyError, TypeError, AttributeError):
            raise RequestError(f"{path} is not a result of this version of tezo bench; measure again.") from None
    if not selected:
        raise RequestError(f"{', '.join(map(str, paths))}: there is no result of tezo bench {kind}; run it first.")
    return selected


def in_words(settings: dict[str, Any]) -> str:
    """Text for the settings of a benchmark: model, dtype, batch size x length, targets."""
    batch = f"{settings['batch']} x {settings['length']}"
    return f"{settings['model']} {settings['dtype']} {batch}, {settings['targets']}"


def paper_place(options: CostOptions) -> int:
    """The column of `options.paper_model` in the paper's tables."""
    if options.paper_model not in MODELS:
        raise RequestError(f"paper_model is {options.paper_model!r}; it must be one of {', '.join(MODELS)}.")
    return MODELS.index(options.paper_model)


def draw_costs(numbers: Numbers, figure: Any) -> None:
    """Draws bars: our results on the left, one colour per setting; the paper's on the right."""
    settings = numbers["ours"][: len(COLOURS)]
    figure.set_size_inches(8.0, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    every = dict.fromkeys(name for row in settings for name in row["figures"])
    names = [name for name in every if any(row["figures"].get(name) is not None for row in settings)]
    height = 0.8 / len(settings)
    for i, (row, colour) in enumerate(zip(settings, COLOURS, strict=False)):
        bars = [(j + i * height, row["figures"].get(name)) for j, name in enumerate(names)]
        known = [(place, value) for place, value in bars if value is not None]
        left.barh(*zip(*known, strict=True), height, color=colour, label=row["setting"])
    left.set_yticks([j + 0.4 - height / 2 for j in range(len(names))], [PASSES.get(name, name) for name in names])
    left.axvline(1, color="black", linewidth=0.8)
    left.set(xlabel=numbers["unit"], title="ours")
    left.invert_yaxis()
    figure.legend(fontsize=6, loc="outside lower left", ncols=2)
    papers = numbers["paper"]
    right.barh(list(papers), list(papers.values()), color="0.45", height=0.6)
    right.axvline(1, color="black", linewidth=0.8)
    right.set(
        xlabel="over MeZO" if "step" in numbers["unit"] else "over zero-shot",
        title=f"the paper's, {numbers['paper_model']}",
    )
    right.invert_yaxis()


def caption_memory(numbers: Numbers) -> str:
    """The caption of the figure of memory."""
    return (
        f"Peak memory over that of a plain forward pass, for {len(numbers['ours'])} settings of tezo bench memory; "
        f"beside it the paper's own, over zero-shot, for {numbers['paper_model']} on an H100."
    )


def caption_time(numbers: Numbers) -> str:
    """The caption of the figure of time."""
    return (
        f"Time of a step over that of two plain forward passes, for {len(numbers['ours'])} settings of tezo bench "
        f"step; beside it the paper's own, over MeZO, for {numbers['paper_model']} on an H100."
    )


MEMORY = Analysis(
    name="memory",
    paper="Fig. 1c, App. A.4, A.5",
    needs="benchmarks",
    options=CostOptions,
    measure=measure_memory,
    draw=draw_costs,
    caption=caption_memory,
)
STEP_TIME = Analysis(
    name="step-time",
    paper="Fig. 3b, App. A.4",
    needs="benchmarks",
    options=CostOptions,
    measure=measure_time,
    draw=draw_costs,
    caption=caption_time,
)
