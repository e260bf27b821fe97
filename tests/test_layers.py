"""The packages of tezo: imports run down one list, and `import tezo` is quick."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tezo

SOURCE = Path(tezo.__file__).parent

# A package may import itself and those before it.
ORDER = [
    "system",
    "directions",
    "forward",
    "optim",
    "newton",
    "methods",
    "models",
    "tasks",
    "engines",
    "runs",
    "training",
    "trainer",
    "forecast",
    "report",
    "cli",
    "__main__",
]

FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> list[tuple[int, str]]:
    """(line, package) of every import of this library, in functions and under TYPE_CHECKING too."""
    return [(line, parts[1] if len(parts) > 1 else "tezo itself") for line, parts in imports(path)]


def imports(path: Path) -> list[tuple[int, list[str]]]:
    """(line, parts of the name) of every import of this library."""
    found = []
    package = ("tezo", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for parts in (name.split(".") for name in names):
            if parts[0] == "tezo":
                found.append((node.lineno, parts))
    return found


def upward_imports() -> list[str]:
    found = []
    for path in FILES:
        package = package_of(path)
        for line, other in imported_packages(path):
            if other not in ORDER or ORDER.index(other) > ORDER.index(package):
                found.append(f"{path.relative_to(SOURCE)}:{line}: {package} must not import {other}")
    return found


def test_every_package_has_a_place_in_the_order():
    assert sorted({package_of(path) for path in FILES} - set(ORDER)) == []


def test_a_package_imports_only_itself_and_the_packages_before_it():
    assert upward_imports() == []


def test_the_reader_of_imports_sees_all_their_forms(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "forward").mkdir()
    file = tmp_path / "forward" / "blocks.py"
    file.write_text(
        "import tezo.runs as r\nfrom tezo import directions, models\nfrom tezo.optim.updates import SGD\n"
        "import tezo\nfrom . import in_place\nfrom ..training import x\nfrom .base import y\nimport torch\n"
        "if TYPE_CHECKING:\n    from tezo.optim import z\ndef f():\n    from tezo.tasks import task\n"
    )
    assert sorted(imported_packages(file)) == [
        (1, "runs"), (2, "directions"), (2, "models"), (3, "optim"), (4, "tezo itself"), (5, "forward"),
        (6, "training"), (7, "forward"), (10, "optim"), (12, "tasks"),
    ]  # fmt: skip


OTHERS_PRIVATE = {
    "_exit": "os ends a process at once by this name alone",
    "_C": "torch's switch for function overrides has no public name",
    "_hf_hook": "where accelerate keeps a module's hook",
    "_attn_implementation": "which attention transformers has chosen",
    "_non_persistent_buffers_set": "which buffers of a module torch does not store",
}


def private_uses(path: Path) -> list[str]:
    """Uses of a private name of another object or module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            own = isinstance(value, ast.Name) and value.id in ("self", "cls", "super")
            if not own and node.attr not in OTHERS_PRIVATE:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom):
            found += [f"{path.name}:{node.lineno}: {a.name}" for a in node.names if a.name.startswith("_")]
    return found


def test_no_code_reaches_a_private_name_of_another_object():
    assert [use for path in FILES for use in private_uses(path)] == []


def test_importing_the_package_imports_no_heavy_library():
    heavy = ("torch", "transformers", "datasets", "numpy", "peft")
    code = f"import sys, tezo; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_package_gives_every_public_name_when_it_is_first_asked_for():
    left = [] if find_spec("trl") else ["TezoSFTTrainer"]  # of an extra
    code = (
        "import tezo; print(all(hasattr(tezo, name) for name in sorted(set(dir(tezo)) - set(" + str(left) + ")))"
        " and tezo.tezo_adam.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tezo_adam"
    with pytest.raises(AttributeError, match="has no attribute 'tezzo'"):
        tezo.tezzo  # noqa: B018


# A method that takes answers needs a decoder's blocks, and refuses these layers.
FIRST = """
import sys, torch, tezo
from tezo.methods import BASELINES, METHODS
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
for method in (each for each in (*METHODS.values(), *BASELINES.values()) if not each.takes_answers):
    optimizer = method.build(model, **({"rank": 2} if "rank" in method.defaults() else {}))
    losses = lambda: model(torch.ones(2, 4)).square().mean(1)
    of_rows = method.defaults().get("directions") == "per-example"
    if not method.takes_rows:
        optimizer.step(losses if of_rows else lambda: losses().mean())
    optimizer.close()
assert "torchao" not in sys.modules
tezo.train
"""


@pytest.mark.slow
def test_no_optimizer_imports_torchao_and_what_transformers_imports_of_it_says_nothing():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
