"""docs/architecture.md names files and functions that are there, and draws the packages as they import each other."""

import ast
import re
from pathlib import Path

import pytest
from test_layers import ORDER, imported_packages, package_of

import tezo

SOURCE = Path(tezo.__file__).parent
TEXT = (Path(__file__).parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
PICTURE = re.search(r"```mermaid\n(.*?)```", TEXT, flags=re.S)[1]
# A list item or a table row names its files itself.
PARTS = [part for part in re.split(r"\n\n|\n(?=\d\. |\| )", TEXT.replace(PICTURE, "")) if "`" in part]


def paths_of(part):
    return [SOURCE.parents[1] / path for path in re.findall(r"`(src/tezo/[\w/.]*)`", part)]


def names_of(part):
    """Functions, as `name()`, and classes and tables, as `Name` and `NAMES`."""
    found = re.findall(r"`(\w+)\(\)`|`([A-Z]\w*)`|`(_[A-Z]+)`", part)
    return {name for names in found for name in names if name}


def defined_in(path):
    """Names of the functions, methods, classes and assignments of a file, or of the files of a folder."""
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[:40])
def test_every_file_is_there_and_has_what_is_said_of_it(part):
    paths = paths_of(part)
    assert [path for path in paths if not path.exists()] == []
    if paths:
        assert names_of(part) - set().union(*map(defined_in, paths)) == set()


def test_the_picture_has_every_package_and_arrows_that_are_imports():
    arrows = re.findall(r"^ *(\w+)(?:\[.*?\])? --> (\w+)", PICTURE, flags=re.M)
    assert {name for arrow in arrows for name in arrow} == set(ORDER) - {"__main__"}
    for name, other in arrows:
        files = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py" and package_of(path) == name]
        assert other in {found for path in files for _, found in imported_packages(path)}, f"{name} --> {other}"
        assert ORDER.index(name) > ORDER.index(other)
