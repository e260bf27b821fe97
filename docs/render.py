"""Writes what the documents repeat from elsewhere: settings from the code, figures from committed results.

python docs/render.py           writes
python docs/render.py --check   exits with 1 where a document is not up to date
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import statistics
import sys
from pathlib import Path

from tezo import config
from tezo.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "benchmarks/results/demo.json"
STEP = ROOT / "benchmarks/results/step_cpu.json"


def main() -> int:
    """Renders every document; the number of those that changed."""
    wanted = {ROOT / "docs/settings.md": settings(), ROOT / "README.md": readme()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" not in sys.argv:
        for path in stale:
            path.write_text(wanted[path], encoding="utf-8")
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not up to date; run python docs/render.py")
    return min(1, len(stale))


def settings() -> str:
    """docs/settings.md: every key of a recipe, with default and meaning."""
    parts = [
        "# Settings",
        "",
        "Keys of a recipe, and of `--set KEY=VALUE`. Made from the code by `docs/render.py`.",
    ]
    sections = {"model": config.ModelConfig, "data": config.DataConfig, "train": config.TrainConfig}
    for name, section in sections.items():
        parts += ["", f"## {name}", "", "| key | default | meaning |", "|---|---|---|"]
        meanings = field_docs(section)
        for f in dataclasses.fields(section):
            default = "required" if f.default is dataclasses.MISSING else shown(f.default)
            parts.append(f"| `{name}.{f.name}` | {default} | {meanings[f.name]} |")
    parts += ["", "## method", "", "`method.name`, and the options of that method:", ""]
    shared = [key for key in METHODS["mezo"].defaults() if key != "lr"]
    common = ", ".join(f"`{key}` {shown(METHODS['mezo'].defaults()[key])}" for key in shared)
    parts += [f"All methods: {common}.", "", "| method | options and defaults |", "|---|---|"]
    for method in METHODS.values():
        own = {key: value for key, value in method.defaults().items() if key not in shared}
        parts.append(f"| `{method.name}` | " + ", ".join(f"`{k}` {shown(v)}" for k, v in own.items()) + " |")
    return "\n".join(parts) + "\n"


def field_docs(section: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    body = ast.parse(inspect.getsource(section)).body[0].body
    docs = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[field.target.id] = below.value.value.replace("|", "\\|")
    return docs


def shown(value: object) -> str:
    """A default, for a table."""
    if value is None:
        return "none"
    return "`" + str(list(value) if isinstance(value, tuple) else value) + "`"


def readme() -> str:
    """README.md with its table of the demo drawn anew."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = {"demo": demo_table, "step": step_table}
    pattern = r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda m: m[1] + tables[m[2]]() + m[3], text, flags=re.S)


def step_table() -> str:
    """Time of a step over two plain forward passes, setting by setting."""
    measured = json.loads(STEP.read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {}
    for number, result in enumerate(measured):
        for row in result["rows"]:
            cells = rows.setdefault(row["label"], [""] * len(measured))
            cells[number] = f"{row['to_F2']:.2f}"
    heads = [step_head(result["settings"]) for result in measured]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows.items()]
    first = measured[0]
    rounds = sorted({result["rounds"] for result in measured})
    lines += [
        "",
        f"Medians of {rounds[0]} to {rounds[-1]} interleaved rounds, random weights, rank {first['settings']['rank']}. "
        f"`benchmarks/cpu.sh`; {first['hardware']}, torch {first['versions']['torch']}, "
        f"transformers {first['versions']['transformers']}.",
    ]
    return "\n".join(lines) + "\n"


def step_head(settings: dict[str, object]) -> str:
    """A setting, for the head of a column."""
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[str(settings["dtype"])]
    return f"{settings['model']} {dtype} {settings['batch']}x{settings['length']} {settings['targets']}"


def demo_table() -> str:
    """Accuracy before and after, seed by seed."""
    results = json.loads(DEMO.read_text(encoding="utf-8"))
    runs = results["runs"]
    lines = ["| seed | zero-shot | tuned | steps | seconds stepping |", "|---|---|---|---|---|"]
    for r in runs:
        before, after = 100 * r["before"]["accuracy"], 100 * r["after"]["accuracy"]
        lines.append(f"| {r['seed']} | {before:.1f} % | {after:.1f} % | {r['steps']} | {r['seconds_stepping']:.0f} |")
    gain = statistics.median(100 * (r["after"]["accuracy"] - r["before"]["accuracy"]) for r in runs)
    versions = runs[0]["versions"]
    lines += [
        "",
        f"Median gain {gain:.1f} points. `{results['command']}`; {runs[0]['hardware']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
