"""The cost tables, with the rows and columns of the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tezo_studies.cost_tables.cost_grid import CostTable
from tezo_studies.cost_tables.cost_layout import element_texts, memory_texts, ratio_texts, time_texts
from tezo_studies.cost_tables.cost_line import TEZO_RANK, CostLine
from tezo_studies.cost_tables.drawn_elements import count_elements
from tezo_studies.cost_tables.gpu_forecast import least_seconds, step_cost
from tezo_studies.cost_tables.gpu_measurement import measured_bytes, measured_seconds
from tezo_studies.cost_tables.paper_costs import ADAPTERS, GIGABYTES, MILLISECONDS, MODELS

SHAPE_NAMES = tuple(model.lower().replace(" ", "-") for model in MODELS)

_ZERO_SHOT = CostLine("zero-shot")
_METHODS = (
    CostLine("MeZO", "mezo"),
    CostLine("SubZO", "subzo", 64),
    CostLine("LOZO", "lozo", 8),
    CostLine("TeZO", "tezo", TEZO_RANK),
    CostLine("MeZO-m", "mezo-m"),
    CostLine("LOZO-m", "lozo-m", 8),
    CostLine("TeZO-m", "tezo-m", TEZO_RANK),
    CostLine("MeZO-Adam", "mezo-adam"),
    CostLine("TeZO-Adam", "tezo-adam", TEZO_RANK),
)


def _beside(lines: Sequence[CostLine], numbers: Mapping[str, Sequence[float | None]]) -> tuple[CostLine, ...]:
    """The rows with the paper's numbers, which have the columns `MODELS`."""
    return tuple(
        replace(line, published=dict(zip(SHAPE_NAMES, numbers[line.key], strict=True))) if line.key in numbers else line
        for line in lines
    )


def _tuned(label: str, method: str, peft: str, place: str) -> CostLine:
    """A row of first-order fine-tuning, or over an adapter."""
    published = dict(zip(("opt-6.7b", "opt-13b"), ADAPTERS[place], strict=True))
    return CostLine(label, method, peft=peft, published=published)  # type: ignore[arg-type]


_WITH_MEMORY = {line.key: line for line in _beside((_ZERO_SHOT, *_METHODS), GIGABYTES)}

MEMORY_TABLE = CostTable(
    name="memory",
    models=SHAPE_NAMES,
    lines=tuple(_WITH_MEMORY.values()),
    measure=measured_bytes,
    forecast=lambda line, model: step_cost(line, model).memory,
    texts=memory_texts,
)
TIME_TABLE = CostTable(
    name="time",
    models=SHAPE_NAMES,
    lines=_beside(_METHODS, MILLISECONDS),
    measure=measured_seconds,
    forecast=least_seconds,
    texts=time_texts,
)
PEFT_MEMORY_TABLE = replace(
    MEMORY_TABLE,
    name="peft-memory",
    models=("opt-6.7b", "opt-13b"),
    lines=(
        _tuned("ft", "adam", "none", "ft"),
        _tuned("ft-LoRA", "adam", "lora", "ft, LoRA"),
        _tuned("ft-prefix", "adam", "prefix", "ft, prefix"),
        _WITH_MEMORY["mezo"],
        _tuned("MeZO-LoRA", "mezo", "lora", "mezo, LoRA"),
        _tuned("MeZO-prefix", "mezo", "prefix", "mezo, prefix"),
        *(_WITH_MEMORY[key] for key in ("mezo-adam", "tezo", "tezo-adam", "zero-shot")),
    ),
    texts=ratio_texts,
)
ELEMENTS_TABLE = CostTable(
    name="elements",
    models=("opt-125m",),
    lines=_METHODS,
    measure=count_elements,
    forecast=None,
    texts=element_texts,
)

COST_TABLES = {table.name: table for table in (MEMORY_TABLE, TIME_TABLE, PEFT_MEMORY_TABLE, ELEMENTS_TABLE)}
