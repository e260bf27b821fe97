"""Imports run down one list of rooms, and `import tezo` is quick."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tezo

SOURCE = Path(tezo.__file__).parent

# A room is a module or a folder of `tezo`. It may import itself and the rooms before it.
ORDER = [
    "errors",
    "quiet",
    "standard_json",
    "untrusted",
    "digest",
    "ranks",
    "scratch",
    "random",
    "params",
    "rank",
    "bases",
    "tasks",
    "placement",
    "quantization",
    "models",
    "objectives",
    "notices",
    "rounding",
    "kernels",
    "directions",
    "perturbations",
    "apply",
    "spsa",
    "readout",
    "writers",
    "evaluation_mode",
    "updates",
    "limits",
    "saved_state",
    "optimizer",
    "feedback",
    "first_order",
    "methods",
    "recipe",
    "schedule",
    "coerce",
    "config",
    "feedback_schedule",
    "splits",
    "adapters",
    "durable",
    "factor_files",
    "export",
    "forecast",
    "step_size",
    "job",
    "noise",
    "evaluate",
    "probe",
    "machine",
    "steplog",
    "checkpoint",
    "fingerprint",
    "metricslog",
    "interruption",
    "result",
    "runs",
    "sharing",
    "summary",
    "callbacks",
    "train",
    "replay",
    "report",
    "analysis",
    "bench",
    "reproduce",
    "cli",
    "__main__",
]

FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of this package, in functions and under TYPE_CHECKING too."""
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
                found.append((node.lineno, parts[1] if len(parts) > 1 else "tezo itself"))
    return found


def test_every_room_has_a_place_in_the_order():
    missing = sorted({room_of(path) for path in FILES} - set(ORDER))
    assert not missing, f"{missing}: say in tests/test_layers.py, in ORDER, which rooms may import these"


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_a_room_imports_only_itself_and_the_rooms_before_it(path):
    room = room_of(path)
    place = ORDER.index(room) if room in ORDER else -1
    for line, other in imported_rooms(path):
        assert other in ORDER, f"{path.name}:{line} imports {other}, which has no place in ORDER"
        assert ORDER.index(other) <= place, f"{path.name}:{line}: {room} must not import {other}, which is above it"


def test_the_reader_of_imports_sees_all_their_forms(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "apply").mkdir()
    file = tmp_path / "apply" / "base.py"
    file.write_text(
        "import tezo.rank as r\nfrom tezo import rounding, spsa\nfrom tezo.updates.sgd import SGD\nimport tezo\n"
        "from . import in_place\nfrom ..train import x\nfrom .base import y\nimport torch\n"
        "if TYPE_CHECKING:\n    from tezo.optimizer import z\ndef f():\n    from tezo.methods import mezo\n"
    )
    assert sorted(imported_rooms(file)) == [
        (1, "rank"), (2, "rounding"), (2, "spsa"), (3, "updates"), (4, "tezo itself"), (5, "apply"), (6, "train"),
        (7, "apply"), (10, "optimizer"), (12, "methods"),
    ]  # fmt: skip


def test_importing_the_package_imports_no_heavy_library():
    heavy = ("torch", "transformers", "datasets", "numpy", "peft")
    code = f"import sys, tezo; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_face_gives_every_public_name_when_it_is_first_asked_for():
    code = "import tezo; print(all(hasattr(tezo, name) for name in dir(tezo)) and tezo.tezo_adam.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tezo_adam"
    with pytest.raises(AttributeError, match="has no attribute 'tezzo'"):
        tezo.tezzo  # noqa: B018
