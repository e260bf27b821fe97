"""The wheel, in an environment that has the core dependencies, and those extras that a test asks for."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from folders import label_rows, needs_smollm2, write_rows

from tezo.models.loading import load_model
from tezo.training.settings import recipe_names

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "accelerate", "bitsandbytes", "gguf", "jinja2", "lm_eval", "matplotlib", "mpl_toolkits", "peft", "psutil",
    "torchao", "trl", "xllamacpp",
}  # fmt: skip
"""What the extras bring, and what others need of them."""

OURS = {"tezo", "tezo_methods", "tezo_studies", "__editable__"}
SITE = Path(sysconfig.get_path("purelib"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def ran(*command: object, timeout: float = 500, **more) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"  # a build writes beside its sources
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", home)
    ran(sys.executable, "-m", "pip", *build, source)
    (found,) = home.glob("*.whl")
    return found


def package_of(path: Path) -> str:
    """The package that a file or folder beside the packages belongs to, by its name."""
    return path.name.partition(".")[0].partition("-")[0].lower()


@pytest.fixture(scope="module")
def environment(wheel):
    """A new environment with the wheel, and links to what is installed here but for the extras."""
    home = wheel.parent / "environment"
    venv.create(home, symlinks=True)
    ran(sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--no-deps", "--no-index", wheel)
    core = wheel.parent / "core"
    core.mkdir()
    for path in SITE.iterdir():
        if (
            package_of(path) not in EXTRAS | {"tezo", "tezo_methods", "tezo_studies", "__editable__"}
            and path.suffix != ".pth"
        ):
            (core / path.name).symlink_to(path)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "core.pth").write_text(f"{core}\n")
    return home / "bin"


def own_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}


def test_the_wheel_has_every_file_of_the_package(wheel):
    listed = ran("git", "-C", ROOT, "ls-files", "src/tezo").splitlines()
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("tezo/")} == {
            name.removeprefix("src/") for name in listed
        }


def test_without_extras_it_has_its_version_and_its_recipes(environment, tmp_path):
    said = ran(environment / "tezo", "--version", cwd=tmp_path, env=own_environment())
    assert said.startswith("tezo ")
    missing = f"import importlib.util as u; print([n for n in {sorted(EXTRAS)} if u.find_spec(n)])"
    assert ran(environment / "python", "-c", missing, env=own_environment()).strip() == "[]"
    code = "import tezo, tezo.training.settings as o; print(tezo.__file__); print(len(o.recipe_names()))"
    where, count = ran(environment / "python", "-c", code, cwd=tmp_path, env=own_environment()).splitlines()
    assert Path(where).is_relative_to(environment.parent) and int(count) == len(recipe_names())


def test_without_extras_it_trains_the_embedded_encoder_on_a_csv(environment, tmp_path):
    write_rows(tmp_path / "rows.csv", label_rows(32))
    small = ("--steps", 2, "--lr", "1e-4", "--set", "train.batch_size=4", "--set", "data.max_length=32")
    model = ("--model", "embedded:all-minilm-l6-v2", "--data", "rows.csv", "--output", "run")
    ran(environment / "tezo", "train", *model, *small, cwd=tmp_path, env=own_environment())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 2 and summary["versions"]["peft"] == "not installed"
    assert (tmp_path / "run/adapter/README.md").is_file()
    answers = ("predict", "run", "--input", "rows.csv", "--output", "answers.jsonl")
    ran(environment / "tezo", *answers, cwd=tmp_path, env=own_environment())
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 32


@pytest.fixture
def with_gguf(environment):
    """The environment with what the extra `gguf` brings."""
    more = [path for path in SITE.iterdir() if package_of(path) in ("gguf", "accelerate")]
    links = [environment.parent.parent / "core" / path.name for path in more]
    for link, path in zip(links, more, strict=True):
        link.symlink_to(path)
    yield environment
    for link in links:
        link.unlink()


def readme_blocks(language: str) -> list[str]:
    """The blocks of the README in this language; "": those without one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [block for found, block in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.S) if found == language]


@needs_smollm2
@pytest.mark.model
@pytest.mark.timeout(1500)
def test_the_readmes_example_prints_what_it_says_and_its_adapter_is_the_run_in_peft(with_gguf, tmp_path):
    from peft import PeftModel

    shutil.copytree(ROOT / "examples/issues", tmp_path / "examples/issues")
    more = """
import torch
batch = run.tokenizer("Add a dark theme", return_tensors="pt")
with torch.no_grad():
    torch.save(run.model(**batch).logits, "tuned.pt")
"""
    (tmp_path / "readme.py").write_text(readme_blocks("python")[0] + more)
    printed = ran(with_gguf / "python", "readme.py", cwd=tmp_path, env=own_environment(), timeout=1400).splitlines()
    said = readme_blocks("")[1].splitlines()
    assert printed[2:] == said[2:], "the answers"
    for own, other in zip(printed[:2], said[:2], strict=True):  # other threads and versions round otherwise
        assert own.split()[0] == other.split()[0]
        assert abs(int(own.split()[1]) - int(other.split()[1])) <= 5
    base = load_model("embedded:smollm2-135m")
    batch = base.tokenizer("Add a dark theme", return_tensors="pt")
    with torch.no_grad():
        plain, tuned = base.model(**batch).logits, torch.load(tmp_path / "tuned.pt")
        loaded = PeftModel.from_pretrained(base.model, tmp_path / "adapter")(**batch).logits
    assert (tuned - plain).abs().max() > 1e-2
    assert (tuned - loaded).abs().max() < 1e-3


@needs_smollm2
@pytest.mark.model
def test_the_readmes_command_for_own_rows_works(with_gguf, tmp_path):
    write_rows(tmp_path / "rows.csv", label_rows(24))
    line = next(line for line in readme_blocks("")[2].splitlines() if "--data rows.csv" in line).partition("#")[0]
    words = line.replace("MODEL", "embedded:smollm2-135m").split()
    ran(with_gguf / words[0], *words[1:], "--steps", 1, "--set", "data.max_length=32", cwd=tmp_path,
        env=own_environment())  # fmt: skip
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 1
