"""Every recipe that is shipped parses, names a method of its own, and builds its optimizer."""

import importlib.util
from collections import OrderedDict
from pathlib import Path

import pytest
from torch import nn

from tezo.optim.methods import METHODS, method
from tezo.studies.reproduce import TABLES
from tezo.training.config import dump_config, parse_config, read_config

ROOT = Path(__file__).parents[1]
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))


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


GENERATED = sorted((ROOT / "recipes/tables").rglob("*.yaml"))


def test_every_row_of_the_papers_tables_has_the_recipe_that_the_script_writes():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "recipes/generate.py")
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
