"""Every recipe that is shipped parses, names a method of its own, and builds its optimizer."""

from pathlib import Path

import pytest
from torch import nn

from tezo.config import dump_config, parse_config, read_config
from tezo.methods import METHODS, method

ROOT = Path(__file__).parents[1]
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))


def test_there_is_one_recipe_for_each_method():
    assert {path.stem for path in RECIPES} == set(METHODS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_method_of_its_file_and_builds_it(path):
    config = read_config(path, [])
    assert config.method.name == path.stem
    wide = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    optimizer = method(config.method.name).build(wide, **config.method.options)
    assert optimizer.param_groups[0]["lr"] == config.method.options["lr"]
    assert optimizer.rho == 1e-3


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "examples/routing/recipe.yaml"], ids=lambda path: path.stem)
def test_a_resolved_recipe_reads_back_the_same(path):
    import yaml

    config = read_config(path, [])
    assert parse_config(yaml.safe_load(dump_config(config))) == config
