"""The tables of a GPU in docs/cost.md and docs/experiments.md, from what `benchmarks/gpu.py` has measured so far.

`gpu_before.json` was measured before a step had targets, `gpu.json` since.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import drawing
from drawing import grid, machine, read
from tezo_studies.bench.targets import TARGETS
from tezo_studies.cost_tables import COST_TABLES

QLORA = {"lora": "QLoRA", "lora-checkpointed": "QLoRA, checkpointed"}
LORA = {"lora": "LoRA", "lora-checkpointed": "LoRA, checkpointed"}
"""Labels that have another name in a table; over nf4 LoRA is QLoRA."""
SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "Time over that of F2": lambda case: f"{case['to_F2']:.2f}",
    "Milliseconds": lambda case: f"{1000 * case['seconds']['median']:,.1f}",
    "Tokens a second": lambda case: f"{case['tokens_per_second']:,.0f}",
    "Peak memory, GiB allocated": lambda case: f"{case['peak'] / 2**30:.1f}",
}


NOT_MEASURED = (
    "**Not measured**: `python benchmarks/gpu.py` measures it, in ten minutes a call on one card of the H100 class.\n"
)
OF_STEPS = ("targets", "none", "nf4", "graphs")
"""Parts whose cases are in the tables of steps."""
COMPARED = ("llama-7b", "opt-1.3b")
"""Models that steps are compared on with their targets."""


def gpu() -> str:
    """Four tables, one a quantity: a row for each case, a column for each base; then why cases have no numbers."""
    found = _measured("gpu") or _measured("gpu_before")
    if not found:
        return NOT_MEASURED
    cases = {key: case for key, case in _cases(found).items() if key[2] in OF_STEPS}
    columns = list(dict.fromkeys(_column(*key[:3]) for key in cases))
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for (shape, dtype, kind, label), case in cases.items():
        table.setdefault(_row(kind, label), {})[_column(shape, dtype, kind)] = case
    parts = [grid([f"**{what}**", *columns], _rows(table, columns, shown)) for what, shown in SHOWN.items()]
    reasons = [f"- {column}, {row}: not measured ({case['reason']})" for row, of in table.items()
               for column, case in of.items() if "reason" in case]  # fmt: skip
    return "\n".join([*parts, *([*reasons, ""] if reasons else []), _circumstances(found)])


def targets() -> str:
    """How long a step takes beside the case of its target, and its peak memory: the limit, before, and now."""
    before, now = (_measured(name) for name in ("gpu_before", "gpu"))
    heads = [head for shape in COMPARED for head in (f"{shape}: at most", "before", "now")]
    times = [
        [f"{target.label} / {target.beside}", *(text for shape in COMPARED for text in (
            f"{target.limit(shape):.2f}", _ratio(before, shape, target.label, target.beside),
            _ratio(now, shape, target.label, target.beside)))]
        for target in TARGETS
    ]  # fmt: skip
    peaks = [
        [target.label, *(text for shape in COMPARED for text in (
            _peak(before, shape, target.label), _peak(now, shape, target.label)))]
        for target in TARGETS
    ]  # fmt: skip
    memory = [head for shape in COMPARED for head in (f"{shape}: before", "now")]
    tables = [grid(["**Time over**", *heads], times), grid(["**Peak memory, GiB allocated**", *memory], peaks)]
    told = [f"Before: ratios of medians. {_circumstances(before)}"] if before else []
    told.append(f"Now: medians of the ratios of rounds. {_circumstances(now)}" if now else f"Now: {NOT_MEASURED}")
    return "\n".join([*tables, *told])


def launches() -> str:
    """Operations that a step dispatches, counted on a CPU; and kernels, where they were counted on a GPU."""
    counted, gpu = read("launches"), _measured("gpu")
    shapes = list(counted["operations"])
    kernels = {shape: _kernels(gpu, shape) for shape in shapes}
    shown = [shape for shape in shapes if kernels[shape]]
    labels = list(counted["operations"][shapes[0]])
    rows = [
        [label, *(f"{counted['operations'][shape][label]:,}" for shape in shapes),
         *(f"{kernels[shape][label]:,}" if label in kernels[shape] else "-" for shape in shown)]
        for label in labels
    ]  # fmt: skip
    heads = ["", *(f"{shape}, operations" for shape in shapes), *(f"{shape}, kernels" for shape in shown)]
    return grid(heads, rows) + (
        f"\nOperations: functions of ATen that compute, in a step of a narrow model with the layers of the named one, "
        f"float32, {counted['rows']} rows of {counted['length']} tokens, rank {counted['rank']}. "
        f"`{counted['command']}`; torch {counted['versions']['torch']}, transformers "
        f"{counted['versions']['transformers']}.\n"
    )


def paper(table: str, number: Callable[[dict[str, Any]], str]) -> str:
    """Cells of a table of the paper that were measured, the paper's number in brackets; `number` is a cell's text."""
    found = _measured("gpu")
    cells = {key[::3]: case for key, case in _cases(found).items() if key[2] == "paper"}
    shapes = [shape for shape in COST_TABLES[table].models if any(cell[0] == shape for cell in cells)]
    if not shapes:
        return NOT_MEASURED
    rows = [
        [line.label, *(_beside_published(cells.get((shape, line.key)), line.published[shape], number)
                       for shape in shapes)]
        for line in COST_TABLES[table].lines
    ]  # fmt: skip
    return grid(["", *shapes], rows) + "\n" + _circumstances(found)


def rounds() -> str:
    """A round of gauss-newton: seconds, those of its look, passes, peak memory."""
    found = _measured("gpu")
    cases = {key[0]: case for key, case in _cases(found).items() if key[2] == "round"}
    rows = [
        [shape, f"{case['rows']}", f"{case['round_seconds']:.1f}", f"{case['look_seconds']:.1f}",
         f"{case['look_passes']:.0f}", f"{case['passes']:.0f}", f"{case['peak'] / 2**30:.1f}"]
        for shape, case in cases.items() if "reason" not in case
    ]  # fmt: skip
    heads = ["", "rows", "seconds", "of which the look", "its passes", "passes of the step", "peak memory, GiB"]
    return grid(heads, rows) + "\n" + _circumstances(found) if rows else NOT_MEASURED


def _measured(name: str) -> dict[str, Any]:
    """A committed result; empty where there is none."""
    found: dict[str, Any] = read(name) if (drawing.RESULTS / f"{name}.json").is_file() else {}
    return found


def _cases(found: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """(shape, dtype, part, label) -> the case."""
    return {tuple(name.split("/", 3)): case for name, case in found.get("cases", {}).items()}


def _of(found: dict[str, Any], shape: str, label: str, parts: Iterable[str] = ("targets", "none")) -> dict[str, Any]:
    """The case of a base that is not quantised; empty where it has no numbers."""
    for key, case in _cases(found).items():
        if (key[0], key[3]) == (shape, label) and key[2] in parts and "reason" not in case:
            return case
    return {}


def _ratio(found: dict[str, Any], shape: str, label: str, beside: str) -> str:
    case, other = _of(found, shape, label), _of(found, shape, beside)
    if beside in case.get("beside", {}):
        return f"{case['beside'][beside]['to']:.2f}"
    known = case and other and "beside" not in case
    return f"{case['seconds']['median'] / other['seconds']['median']:.2f}" if known else "-"


def _peak(found: dict[str, Any], shape: str, label: str) -> str:
    case = _of(found, shape, label)
    return f"{case['peak'] / 2**30:.2f}" if case else "-"


def _kernels(found: dict[str, Any], shape: str) -> dict[str, int]:
    cases = {key: case for key, case in _cases(found).items() if key[0] == shape and key[2] in ("targets", "none")}
    return {key[3]: case["kernels"] for key, case in cases.items() if "kernels" in case}


def _beside_published(
    case: dict[str, Any] | None, theirs: float | None, number: Callable[[dict[str, Any]], str]
) -> str:
    published = "does not fit" if theirs is None else format(theirs, "g")
    if case is None:
        return f"- ({published})"
    if "reason" in case:
        return f"{'does not fit' if 'out of memory' in case['reason'] else 'no number'} ({published})"
    return f"{number(case)} ({published})"


def _rows(
    table: dict[str, dict[str, Any]], columns: list[str], shown: Callable[[dict[str, Any]], str]
) -> list[list[str]]:
    return [
        [row, *("-" if (case := of.get(column)) is None or "reason" in case else shown(case) for column in columns)]
        for row, of in table.items()
    ]


def _column(shape: str, dtype: str, kind: str) -> str:
    return f"{shape} nf4" if kind == "nf4" else f"{shape} {drawing.SHORT[dtype]}"


def _row(kind: str, label: str) -> str:
    return (QLORA if kind == "nf4" else LORA).get(label, label)


def _circumstances(found: dict[str, Any]) -> str:
    return (
        f"Medians of rounds, in each of which F2 runs too; batch {found['batch']}, lengths {found['length']}, random "
        f"weights, rank {found['rank']}. `{found['command']}`; {machine(found)}, CUDA {found['torch_cuda']} (driver "
        f"{found['driver_cuda']}), {found['memory'] / 2**30:.0f} GiB.\n"
    )


GPU_TABLES: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "gpu-targets": targets,
    "gpu-launches": launches,
    "gpu-rounds": rounds,
    "paper-memory": partial(paper, "memory", lambda case: f"{case['reserved'] / 2**30:.2f}"),
    "paper-time": partial(paper, "time", lambda case: f"{1000 * case['seconds']['median']:.1f}"),
}
