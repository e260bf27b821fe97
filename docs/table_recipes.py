"""Writes the recipes in `src/tezo/training/recipes/tables/`, one for every row of the tables of `tezo reproduce`.

    python docs/table_recipes.py

Each is the first cell of its row, with the learning rate that the paper recommends (of our own tables: the middle
one); other columns are other values of data.task and data.per_class, or of train.batch_size. `tezo reproduce` runs them
all.
"""

from pathlib import Path
from typing import Any

import yaml

from tezo.studies.reproduce import TABLES, make_grid
from tezo.studies.reproduce.grid import Cell
from tezo.studies.reproduce.table import CompletionsColumn

FOLDER = Path(__file__).resolve().parents[1] / "src/tezo/training/recipes/tables"


def recipes() -> dict[Path, str]:
    """Path -> text, of every recipe."""
    found = {}
    for name, table in TABLES.items():
        own = any(isinstance(column, CompletionsColumn) for column in table.columns)
        cells = make_grid(table, model=None, small=False, data_dir="DATA" if own else None).search()
        for cell in cells:
            wanted = cell.column == table.columns[0] and cell.seed == table.seeds[0]
            if wanted and cell.rate is not None and cell.rate == cell.line.recommended:
                others = ", ".join(column.key for column in table.columns[1:])
                head = f"# {cell.line.label} of {table.title}.\n# Other columns: {others}.\n"
                found[FOLDER / name / f"{cell.line.key}.yaml"] = head + text_of(cell)
    return found


def text_of(cell: Cell) -> str:
    """A cell's configuration as YAML, without what is not set; of a method's options, None may not be the default."""
    tree: dict[str, Any] = {
        name: {key: value for key, value in values.items() if value is not None or name == "method"}
        for name, values in cell.tree.items()
    }
    return yaml.safe_dump(tree, sort_keys=False)


def main() -> None:
    """Writes them."""
    for path, text in recipes().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
