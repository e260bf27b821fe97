"""Writes what the documents repeat from elsewhere: settings from the code, figures from committed results.

python docs/render.py           writes
python docs/render.py --check   exits with 1 where a document is not up to date
"""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from pathlib import Path

from tables import TABLES

from tezo.methods import AUTO, BUILT_IN, METHODS
from tezo.training import settings as recipe

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "cost", "experiments", "reliability", "large-models", "many-devices", "figures", "how-to-choose", "theory", "when",
    "rewards", "llama-cpp", "any-file", "vllm",
)  # fmt: skip
DRAWN = [ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in DOCUMENTS)]


def main() -> int:
    """Renders every document; the number of those that changed."""
    wanted = {ROOT / "docs/settings.md": settings()} | {path: with_tables(path) for path in DRAWN}
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
    sections = {"model": recipe.ModelConfig, "data": recipe.DataConfig, "train": recipe.TrainConfig}
    for name, section in sections.items():
        parts += ["", f"## {name}", "", "| key | default | meaning |", "|---|---|---|"]
        meanings = field_docs(section)
        for f in dataclasses.fields(section):
            default = "required" if f.default is dataclasses.MISSING else shown(f.default)
            parts.append(f"| `{name}.{f.name}` | {default} | {meanings[f.name]} |")
    parts += ["", "## method", "", "`method.name`, and the options of that method:", ""]
    shared = [key for key in METHODS["mezo"].defaults() if key != "lr"]
    common = ", ".join(f"`{key}` {shown(METHODS['mezo'].defaults()[key])}" for key in shared)
    parts += [
        f"All methods, unless the table says otherwise: {common}. `lr` may be `{AUTO}`, measured before the first "
        "step, where a method has `directions`.",
        "",
        "| method | options and defaults |",
        "|---|---|",
    ]
    for method in (METHODS[name] for name in BUILT_IN if name in METHODS):
        usual = METHODS["mezo"].defaults()
        own = {key: value for key, value in method.defaults().items() if key not in shared or value != usual[key]}
        told = ", ".join(f"`{k}` {shown(v)}" for k, v in own.items())
        lacking = [f"`{key}`" for key in shared if key not in method.defaults()]
        parts.append(f"| `{method.name}` | {told}{'; without ' + ', '.join(lacking) if lacking else ''} |")
    return "\n".join(parts) + "\n"


def field_docs(section: type) -> dict[str, str]:
    """The string below each field of a dataclass, in one line: a row of a table has no more."""
    body = ast.parse(inspect.getsource(section)).body[0].body
    docs = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[field.target.id] = " ".join(below.value.value.replace("|", "\\|").split())
    return docs


def shown(value: object) -> str:
    """A default, for a table."""
    if value is None:
        return "none"
    return "`" + str(list(value) if isinstance(value, tuple) else value) + "`"


def with_tables(path: Path) -> str:
    """A document with its tables drawn anew: what stands between `<!-- table: NAME -->` and `<!-- end -->`."""
    pattern = r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda m: m[1] + TABLES[m[2]]() + m[3], path.read_text(encoding="utf-8"), flags=re.S)


if __name__ == "__main__":
    sys.exit(main())
