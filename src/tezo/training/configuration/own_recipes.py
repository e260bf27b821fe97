"""Recipes that come with the library: one for each method, with the paper's settings."""

from importlib.resources import files
from pathlib import Path

from tezo.errors import RequestError, nearest


def recipe_folder() -> Path:
    """The folder of the recipes, NAME.yaml for each method."""
    return Path(str(files("tezo.training"))) / "recipes"


def recipe_names() -> list[str]:
    """Names of all recipes, such as "lozo"."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def find_recipe(given: Path) -> Path:
    """The file that the user gives, or the recipe of the library with that name (with or without .yaml).

    Raises:
        RequestError: there is neither.
    """
    if given.exists():
        return given
    name, names = given.as_posix().removesuffix(".yaml"), recipe_names()
    if name in names:
        return recipe_folder() / f"{name}.yaml"
    raise RequestError(
        f"there is no recipe {given}, neither a file nor one that comes with tezo. {nearest(name, names)}"
    )
