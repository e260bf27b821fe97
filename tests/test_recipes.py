"""Every recipe that is shipped parses, names a method of its own, and builds its optimizer."""

import importlib.util
from collections import OrderedDict
from pathlib import Path

import pytest
from folders import label_rows, model_folder, tezo, write_rows
from torch import nn

from tezo.errors import RequestError
from tezo.optim.methods import METHODS, method
from tezo.studies.reproduce import TABLES
from tezo.training.configuration.config import dump_config, parse_config, read_config
from tezo.training.configuration.own_recipes import find_recipe, recipe_folder, recipe_names

ROOT = Path(__file__).parents[1]
RECIPES = sorted(recipe_folder().glob("*.yaml"))


def wide_model() -> nn.Module:
    """Wide enough for a rank of 64, and with the module that the recipes of RoBERTa name."""
    return nn.Sequential(OrderedDict(wide=nn.Linear(80, 80), token_type_embeddings=nn.Embedding(80, 80)))


def test_there_is_one_recipe_for_each_method():
    assert {path.stem for path in RECIPES} == set(METHODS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_method_of_its_file_and_builds_it(path):
    config = read_config(path, [])
    assert config.method.name == path.stem
    optimizer = method(config.method.name).build(wide_model(), **config.method.options)
    assert optimizer.param_groups[0]["lr"] == config.method.options["lr"]
    assert optimizer.rho == 1e-3


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "examples/routing/recipe.yaml"], ids=lambda path: path.stem)
def test_a_resolved_recipe_reads_back_the_same(path):
    import yaml

    config = read_config(path, [])
    assert parse_config(yaml.safe_load(dump_config(config))) == config


GENERATED = sorted((recipe_folder() / "tables").rglob("*.yaml"))


def test_every_row_of_the_papers_tables_has_the_recipe_that_the_script_writes():
    spec = importlib.util.spec_from_file_location("table_recipes", ROOT / "docs/table_recipes.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert {path: path.read_text(encoding="utf-8") for path in GENERATED} == generate.recipes()
    rows = {(name, line.key) for name, table in TABLES.items() for line in table.lines if line.how == "train"}
    assert {(path.parent.name, path.stem) for path in GENERATED} == rows


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_row_of_a_table_parses_and_builds(path):
    config = read_config(path, [])
    optimizer = method(config.method.name).build(wide_model(), **config.method.options)
    assert optimizer.param_groups[0]["lr"] == config.method.options["lr"]


def test_a_recipe_is_found_by_its_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = recipe_folder()
    assert find_recipe(Path("lozo")) == find_recipe(Path("lozo.yaml")) == own / "lozo.yaml"
    assert find_recipe(Path("tables/opt-13b/tezo")) == own / "tables/opt-13b/tezo.yaml"
    assert {own / f"{name}.yaml" for name in recipe_names()} == {*RECIPES, *GENERATED}
    Path("lozo.yaml").write_text("model: here\n")
    assert find_recipe(Path("lozo.yaml")) == Path("lozo.yaml")
    for name, hint in (
        ("losso", "Did you mean 'lozo'?"),
        ("../recipes/lozo", "recipe"),
        ("tables/opt-13b/x", "tables"),
    ):
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
