"""Pages of the site that are made when it is built: of the README, of each method, and of each public name.

`mkdocs.yml` names this file as a hook. Nothing is written into docs/.
"""

import ast
import inspect
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from render import ROOT, shown

from tezo.methods import BUILT_IN, Method
from tezo.methods import method as named
from tezo.training.settings import recipe_folder

ELSEWHERE = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md", "CONTRIBUTING.md": "contributing.md"}
"""Documents outside docs/ -> their page."""
OFF_SITE = re.compile(r"\[([^\]]*)\]\((?:\.\./examples/[^)]*|CITATION\.cff)\)")
"""Links to what the site has no page of; their text stays."""
API = {
    "runs": ("Runs", ("tezo.training",)),
    "methods": ("Methods", ("tezo.methods",)),
    "optimizers": ("Optimizers", ("tezo.optim.",)),
    "models": ("Models and adapters", ("tezo.models",)),
    "errors": ("Errors", ("tezo.system.errors",)),
    "more": ("More", ("tezo.",)),
}
"""Page -> (title, beginnings of the modules whose public names it has); a name is on the first page that takes it."""
EVERY: dict[str, Method[Any]] = {name: named(name) for name in BUILT_IN}


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages of methods and of the API in their places in the navigation."""
    made = {"methods/": ["methods/index.md", *({name: f"methods/{name}.md"} for name in EVERY)]}
    made["api/"] = [{title: f"api/{page}.md"} for page, (title, _) in API.items() if names_of_pages()[page]]
    config.nav = _with_made(config.nav, made)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that are made."""
    pages = {page: elsewhere(source) for source, page in ELSEWHERE.items()}
    pages |= {"methods/index.md": methods_page()} | {f"methods/{name}.md": method_page(name) for name in EVERY}
    pages |= {f"api/{page}.md": api_page(page) for page, names in names_of_pages().items() if names}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Leads links from docs/ to documents outside it to the pages of these, where they have one."""
    del page, config, files
    for source, made in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source}", f"]({made}")
    return OFF_SITE.sub(r"\1", markdown)


def _with_made(entry: Any, made: dict[str, list[Any]]) -> Any:
    """A part of the navigation in which names of made folders are their pages."""
    if isinstance(entry, list):
        return [_with_made(one, made) for one in entry]
    if isinstance(entry, dict):
        return {title: _with_made(one, made) for title, one in entry.items()}
    return made.get(entry, entry)


def elsewhere(source: str) -> str:
    """The text of a document outside docs/, with its links as they are from docs/."""
    text = (ROOT / source).read_text(encoding="utf-8")
    return re.sub(r"\]\((\.\./)?docs/", "](", text)


def methods_page() -> str:
    """A table of all methods."""
    lines = ["# Methods", "", "As `tezo methods NAME` prints them; the text is that of the code.", ""]
    lines += ["| method | | exact LoRA adapter |", "|---|---|---|"]
    for name, method in EVERY.items():
        note = "" if method.in_paper else " (not in the paper)"
        said = method.summary.partition(": ")[2]
        lines.append(f"| [`{name}`]({name}.md) | {said}{note} | {'yes' if method.exports_adapter else 'no'} |")
    return "\n".join(lines) + "\n"


def method_page(name: str) -> str:
    """A method: its mathematics, its options with their defaults, its recipe."""
    method, recipe = EVERY[name], recipe_folder() / f"{name}.yaml"
    lines = [f"# {name}", "", inspect.getdoc(method.build) or "", "", "## Options", "", "| option | default |"]
    lines += ["|---|---|", *(f"| `method.{key}` | {shown(value)} |" for key, value in method.defaults().items())]
    lines += ["", f"In Python: [`tezo.{method.build.__name__}`](../api/methods.md#tezo.{method.build.__name__})."]
    if recipe.is_file():
        lines += ["", f"## The recipe of `tezo train {name}`", ""]
        lines += ["```yaml", recipe.read_text(encoding="utf-8").rstrip(), "```"]
    return "\n".join(lines) + "\n"


def api_page(page: str) -> str:
    """The public names of a page, each by its docstring."""
    return "\n\n".join([f"# {API[page][0]}", *(f"::: tezo.{name}" for name in names_of_pages()[page])]) + "\n"


def names_of_pages() -> dict[str, list[str]]:
    """Page of the API -> the public names of `tezo` on it, in alphabetical order."""
    found: dict[str, list[str]] = {page: [] for page in API}
    for name, home in sorted(homes().items()):
        found[next(page for page, (_, starts) in API.items() if home.startswith(starts))].append(name)
    return found


def homes() -> dict[str, str]:
    """Public name of `tezo` -> the module that has it. Read, not imported: some names need an extra."""
    tree = ast.parse((ROOT / "src/tezo/__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname: str(node.module) for node in imports for alias in node.names if alias.asname}
