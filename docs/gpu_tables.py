"""The table of a GPU in docs/cost.md, drawn from what `benchmarks/gpu.py` has measured so far."""

from collections.abc import Callable
from typing import Any

import drawing
from drawing import grid, machine, read

QLORA = {"lora": "QLoRA", "lora-checkpointed": "QLoRA, checkpointed"}
LORA = {"lora": "LoRA", "lora-checkpointed": "LoRA, checkpointed"}
"""Labels that have another name in a table; over nf4 LoRA is QLoRA."""
SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "Time over that of F2": lambda case: f"{case['to_F2']:.2f}",
    "Milliseconds": lambda case: f"{1000 * case['seconds']['median']:,.1f}",
    "Tokens a second": lambda case: f"{case['tokens_per_second']:,.0f}",
    "Peak memory, GiB allocated": lambda case: f"{case['peak'] / 2**30:.1f}",
}


def gpu() -> str:
    """Four tables, one a quantity: a row for each case, a column for each base; then why cases have no numbers."""
    if not (drawing.RESULTS / "gpu.json").is_file():
        return (
            "**Not measured**: nothing here has run on a GPU. `python benchmarks/gpu.py` measures it in ten minutes on "
            "one card of the H100 class.\n"
        )
    found = read("gpu")
    cases = {tuple(name.split("/", 3)): case for name, case in found["cases"].items()}
    columns = list(dict.fromkeys(_column(*key[:3]) for key in cases))
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for (shape, dtype, kind, label), case in cases.items():
        table.setdefault(_row(kind, label), {})[_column(shape, dtype, kind)] = case
    parts = [grid([f"**{what}**", *columns], _rows(table, columns, shown)) for what, shown in SHOWN.items()]
    reasons = [f"- {column}, {row}: not measured ({case['reason']})" for row, of in table.items()
               for column, case in of.items() if "reason" in case]  # fmt: skip
    return "\n".join([*parts, *([*reasons, ""] if reasons else []), _circumstances(found)])


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


GPU_TABLES: dict[str, Callable[[], str]] = {"gpu": gpu}
