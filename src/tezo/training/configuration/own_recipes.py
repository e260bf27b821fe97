"""Recipes that come with the library: one for each method with the paper's settings, and the rows of its tables."""

from importlib.resources import files
from pathlib import Path

from tezo.errors import RequestError, nearest


def recipe_folder() -> Path:
    """The folder of the recipes: NAME.yaml for each method, tables/TABLE/ROW.yaml for the tables."""
    return Path(str(files("tezo.training"))) / "recipes"


def recipe_names() -> list[str]:
    """Names of all recipes, such as "lozo" and "tables/opt-13b/lozo"."""
    folder = recipe_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find_recipe(given: Path) -> Path:
    """The file that the user gives, or the recipe of the library with that name (with or without .yaml).

    Raises:
        RequestError: there is neither.
    """
    if given.exists():
        return given
    name = given.as_posix().removesuffix(".yaml")
    names = recipe_names()
    if name in names:
        return recipe_folder() / f"{name}.yaml"
    methods = [known for known in names if "/" not in known]
    hint = nearest(name, names if "/" in name else methods)
    raise RequestError(f"there is no recipe {given}, neither a file nor one that comes with tezo. {hint}")
