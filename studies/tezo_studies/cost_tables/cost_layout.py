"""The texts of the cost tables: Markdown with the paper's numbers in brackets, and CSV."""

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from tezo_studies.cost_tables.cost_grid import FORECAST, Cells, CostTable, key_of_cell
from tezo_studies.cost_tables.cost_line import TEZO_RANK, CostLine
from tezo_studies.cost_tables.drawn_elements import PAPER_FORMS, elements_after, paper_elements
from tezo_studies.cost_tables.gpu_forecast import BANDWIDTH, FLOPS

STEPS = 15_000
"""T of the table of elements: the steps of the paper's runs of OPT and LLaMA."""

SETTING = (
    "In brackets: the paper's number, on an H100. Ours: float16, random weights, 16 rows with the lengths of RTE, all "
    f"parameters tuned; LOZO has rank 8, SubZO 64, as the paper's table, TeZO {TEZO_RANK}, as the paper names none; "
    "moments are float32."
)
MEMORY_FORECAST = (
    "Forecast: nothing was measured. It is the sum of the weights, of what the method keeps (moments, coefficients and "
    "factors, as its own classes allocate them), and of the peak of a pass over the batch padded to its longest row, "
    "whose operations ran on tensors without values. Methods with dense directions evaluate both signs in one pass. "
    "Not in it: the allocator's rounding and reserve, the CUDA context, buffers of a tile, temporaries of an update. "
    "Attention is counted with its scores, which fused kernels do not store."
)
TIME_FORECAST = (
    "Forecast: nothing was measured, and each number is a lower bound, not an expectation: "
    f"2 max(F / {FLOPS / 1e12:.0f} TFLOP/s, w / {BANDWIDTH / 1e12:.2f} TB/s) + 2 (k + x) / {BANDWIDTH / 1e12:.2f} TB/s "
    "(peaks of an H100 by its data sheet), with F the operations of a pass over the padded batch, w the bytes of the "
    "weights, k those of moments, coefficients and factors, x those of the weights that a step writes. Not in it: "
    "drawing noise, the products with low-rank factors, launches of kernels, which dominate in small models."
)
FIRST_ORDER = (
    "ft: our Adam keeps a float32 copy of the weights and two float32 moments; its gradients are float16 and, in the "
    "update, float32. LoRA has rank 8, the prefix 5 tokens; both are float32 by PEFT. A prefix makes the model keep "
    "keys and values of all layers during a pass."
)


Row = list[str]


def memory_texts(table: CostTable, cells: Cells, by: str) -> dict[str, str]:
    """table.md and table.csv of memory."""
    body = [[line.label, *(_shown(cells, line, model, 2**30, 2) for model in table.models)] for line in table.lines]
    return _memory(table, cells, by, [by, *table.models], body, [])


def ratio_texts(table: CostTable, cells: Cells, by: str) -> dict[str, str]:
    """As `memory_texts`, with the ratio to zero-shot beside each number."""
    heads = [by, *(head for model in table.models for head in (model, "over zero-shot"))]
    body = [[line.label, *_with_ratios(table, cells, line)] for line in table.lines]
    return _memory(table, cells, by, heads, body, [FIRST_ORDER])


def _memory(
    table: CostTable, cells: Cells, by: str, heads: Row, body: list[Row], more: Iterable[str]
) -> dict[str, str]:
    what = MEMORY_FORECAST if by == FORECAST else f"The maximum that the allocator reserved, on {by}."
    text = _document(f"Memory of fine-tuning, GiB: {by}", heads, body, [what, *more, SETTING])
    return {"table.md": text, "table.csv": _csv(table, cells, by, "bytes", 2**30)}


def time_texts(table: CostTable, cells: Cells, by: str) -> dict[str, str]:
    """table.md and table.csv of the time of a step."""
    body = [[line.label, *(_shown(cells, line, model, 1e-3, 1) for model in table.models)] for line in table.lines]
    what = TIME_FORECAST if by == FORECAST else f"Median of a step on {by}."
    title = f"Time of a step, ms: {'forecast, a lower bound' if by == FORECAST else by}"
    text = _document(title, [by, *table.models], body, [what, SETTING])
    return {"table.md": text, "table.csv": _csv(table, cells, by, "seconds", 1e-3)}


def element_texts(table: CostTable, cells: Cells, by: str) -> dict[str, str]:
    """table.md and table.csv of sampled elements."""
    heads = ["", "model", "factors", "every", "a step", f"{STEPS} steps", "the paper's form", "drawn again"]
    rows = [(line, model, cells[key_of_cell(line, model)]) for model in table.models for line in table.lines]
    body = [_elements(line, model, counts) for line, model, counts in rows]
    vectors = {model: counts["vectors"] for _, model, counts in rows}
    notes = [
        f"Random numbers of matrices, {by} by the generator in real steps. factors: drawn at the first step and every "
        f"so many steps; a step: drawn at each step; {STEPS} steps: from these two, and so is the paper's form. drawn "
        "again: what a step draws once more instead of storing it, here with both signs in one forward pass.",
        "The paper's forms, for a weight (m, n): "
        + ", ".join(f"{name} {text}" for name, (text, _) in PAPER_FORMS.items())
        + ". LOZO and SubZO keep factors over an interval, which these forms leave out.",
        "1-D parameters draw one number an entry at each step of every method: "
        + ", ".join(f"{model} {count:,}" for model, count in vectors.items()) + ".",
    ]  # fmt: skip
    return {"table.md": _document(f"Sampled elements: {by}", heads, body, notes), "table.csv": _element_csv(rows)}


def _elements(line: CostLine, model: str, counts: dict[str, Any]) -> Row:
    every = counts["interval"] or "run"
    numbers = [elements_after(counts, STEPS), paper_elements(line, counts, STEPS), counts["again"]]
    shown = [f"{counts['factors']:,}", f"{every}" if counts["factors"] else "-", f"{counts['step']:,}"]
    return [line.label, model, *shown, *(f"{number:,}" for number in numbers)]


def _element_csv(rows: Iterable[tuple[CostLine, str, dict[str, Any]]]) -> str:
    keys = ("factors", "interval", "step", "again", "vectors")
    lines = [
        (line.label, model, *(counts[key] for key in keys), elements_after(counts, STEPS),
         paper_elements(line, counts, STEPS))
        for line, model, counts in rows
    ]  # fmt: skip
    return _as_csv(("method", "model", *keys, f"steps_{STEPS}", f"paper_{STEPS}"), lines)


def _shown(cells: Cells, line: CostLine, model: str, unit: float, digits: int) -> str:
    """A cell in a unit, and the paper's number."""
    own = cells[key_of_cell(line, model)]
    text = "does not fit" if own is None else f"{own / unit:.{digits}f}"
    if model not in line.published:
        return text
    theirs = line.published[model]
    return f"{text} ({'does not fit' if theirs is None else format(theirs, 'g')})"


def _with_ratios(table: CostTable, cells: Cells, line: CostLine) -> Iterator[str]:
    zero = next((other for other in table.lines if other.method is None), None)
    for model in table.models:
        yield _shown(cells, line, model, 2**30, 2)
        base, own = (None if which is None else cells[key_of_cell(which, model)] for which in (zero, line))
        theirs = line.published.get(model)
        published = zero.published.get(model) if zero is not None else None
        text = "-" if base is None or own is None else f"{own / base:.2f}"
        yield text if theirs is None or published is None else f"{text} ({theirs / published:.2f})"


def _document(title: str, heads: Row, body: Iterable[Row], notes: Iterable[str]) -> str:
    table = [heads, ["---"] * len(heads), *body]
    lines = [f"# {title}", "", *("| " + " | ".join(row) + " |" for row in table)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _csv(table: CostTable, cells: Cells, by: str, unit: str, paper_unit: float) -> str:
    lines = []
    for model in table.models:
        for line in table.lines:
            theirs = line.published.get(model)
            own = cells[key_of_cell(line, model)]
            lines.append((line.label, model, by, own, None if theirs is None else theirs * paper_unit))
    return _as_csv(("method", "model", "by", unit, f"published_{unit}"), lines)


def _as_csv(head: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return buffer.getvalue()
