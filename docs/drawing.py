"""What all drawn tables are made with: committed results, a machine in words, a grid in Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def head(settings: dict[str, Any]) -> str:
    """A setting, for the head of a column."""
    return f"{SHORT[settings['dtype']]} {settings['batch']} x {settings['length']}"


def machine(result: dict[str, Any]) -> str:
    """What it ran on."""
    versions = result["versions"]
    # results of several runs name what each ran on, earlier ones in another spelling
    named = dict.fromkeys(name.replace(" 1 threads", " 1 thread") for name in result["hardware"].split("; "))
    return f"{'; '.join(named)}, torch {versions['torch']}, transformers {versions['transformers']}"


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    lines.insert(1, "|---" * len(heads) + "|")
    return "\n".join(lines) + "\n"


def read(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
