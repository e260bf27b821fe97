"""Every recipe that is shipped parses, names a method of its own, and builds its optimizer."""

from pathlib import Path

import pytest
from folders import label_rows, model_folder, tezo, tiny_model, write_rows
from torch import nn

from tezo.methods import METHODS, method
from tezo.system.errors import RequestError
from tezo.training.settings import dump_config, find_recipe, parse_config, read_config, recipe_folder, recipe_names

ROOT = Path(__file__).parents[1]
OWN = sorted(recipe_folder().glob("*.yaml"))
RECIPES = [*OWN, *sorted((ROOT / "examples/methods/recipes").glob("*.yaml"))]


def wide_model() -> nn.Module:
    """Wide enough for a rank of 64."""
    return nn.Sequential(nn.Linear(80, 80))


def test_there_is_one_recipe_for_each_method():
    assert {path.stem for path in RECIPES} == set(METHODS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_method_of_its_file_and_builds_it(path):
    config = read_config(path, [])
    assert config.method.name == path.stem
    model = tiny_model("llama", 64) if method(config.method.name).takes_answers else wide_model()
    optimizer = method(config.method.name).build(model, **config.method.options)
    assert optimizer.param_groups[0]["lr"] == config.method.options["lr"]
    assert optimizer.rho == {"gauss-newton": 0.1, "es": 1e-2}.get(path.stem, 1e-3)


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "examples/routing/recipe.yaml"], ids=lambda path: path.stem)
def test_a_resolved_recipe_reads_back_the_same(path):
    import yaml

    config = read_config(path, [])
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_a_recipe_is_found_by_its_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = recipe_folder()
    assert find_recipe(Path("lozo")) == find_recipe(Path("lozo.yaml")) == own / "lozo.yaml"
    assert {own / f"{name}.yaml" for name in recipe_names()} == set(OWN)
    Path("lozo.yaml").write_text("model: here\n")
    assert find_recipe(Path("lozo.yaml")) == Path("lozo.yaml")
    for name, hint in (("losso", "Did you mean 'lozo'?"), ("../recipes/lozo", "recipe")):
        with pytest.raises(RequestError, match="neither a file nor one that comes with tezo") as refused:
            find_recipe(Path(name))
        assert hint in str(refused.value)


def test_the_command_line_takes_a_recipe_by_name(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(24))
    given = ("--model", model_folder(tmp_path, "opt"), "--data", rows, "--steps", 2, "--output", tmp_path / "run")
    small = ("--set", "model.dtype=auto", "--set", "method.rank=2", "--json")
    done = tezo("train", "lozo", *given, *small)
    assert done.code == 0, done.err
    options = read_config(tmp_path / "run/config.yaml", []).method.options
    assert (options["scale"], options["lazy_update_interval"], options["lr"]) == ("raw", 100, 1e-7)
