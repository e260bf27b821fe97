"""The site is built without a warning, has every document, method and public name, and loads nothing from elsewhere."""

import html
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import BLOCKS

import tezo
from tezo.methods import BUILT_IN
from tezo.methods import method as named
from tezo.training.settings import recipe_folder

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FOR_SITE = "the site is built by the extra docs: pip install -e '.[docs]'"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a warning, such as of a link that leads nowhere, ends its build."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason=FOR_SITE)
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def text_of(page):
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8")))


def test_every_document_is_a_page(site):
    pages = {path.stem for path in site.glob("*.html")}
    assert {path.stem for path in ROOT.glob("docs/*.md")} | {"index", "benchmarks", "contributing"} <= pages


def test_every_method_has_a_page_with_its_mathematics_and_options(site):
    for name, method in ((name, named(name)) for name in BUILT_IN):
        said = text_of(site / f"methods/{name}.html")
        equations = re.findall(r"^    (\S.*)$", inspect.getdoc(method.build), flags=re.M)
        assert all(equation.strip() in said for equation in equations), name
        assert all(f"method.{option}" in said for option in method.defaults()), name


def test_the_page_of_a_method_has_its_recipe(site):
    recipes = sorted(recipe_folder().glob("*.yaml"))
    assert len(recipes) > 10
    for recipe in recipes:
        said = text_of(site / f"methods/{recipe.stem}.html")
        assert all(line.strip() in said for line in recipe.read_text(encoding="utf-8").splitlines()), recipe.stem


def test_every_public_name_is_in_the_api_pages(site):
    pages = "".join(path.read_text(encoding="utf-8") for path in site.glob("api/*.html"))
    public = {name for name in tezo.__dir__() if getattr(getattr(tezo, name), "__module__", "").startswith("tezo.")}
    assert {name for name in public | {"METHODS"} if f'id="tezo.{name}"' not in pages} == set()


def test_the_python_blocks_are_those_that_are_executed(site):
    pages = [path for path in site.rglob("*.html") if path.parent.name != "api"]
    shown = sum(path.read_text(encoding="utf-8").count('class="language-python highlight"') for path in pages)
    assert shown == len(BLOCKS)


def test_no_page_loads_anything_from_elsewhere(site):
    loading = r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//"
    assert [path.name for path in site.rglob("*.html") if re.search(loading, path.read_text(encoding="utf-8"))] == []
