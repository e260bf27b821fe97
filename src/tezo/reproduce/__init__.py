"""Tables of accuracies, cell by cell: what each run is, the runs, the table beside the published one."""

from tezo.errors import RequestError, nearest
from tezo.reproduce.cells import Cell as Cell
from tezo.reproduce.cells import Grid as Grid
from tezo.reproduce.cells import make_grid as make_grid
from tezo.reproduce.encoder import ENCODER
from tezo.reproduce.layout import write_tables as write_tables
from tezo.reproduce.papers import LLAMA, OPT, ROBERTA
from tezo.reproduce.runs import prepare_output as prepare_output
from tezo.reproduce.runs import run_grid as run_grid
from tezo.reproduce.study import STUDY, STUDY_LONG
from tezo.reproduce.table import Table as Table

TABLES = {table.name: table for table in (ROBERTA, OPT, LLAMA, ENCODER, STUDY, STUDY_LONG)}


def find_table(name: str) -> Table:
    """The table of that name; an error with the nearest one where there is none."""
    if name not in TABLES:
        raise RequestError(f"table: there is no table {name!r}. " + nearest(name, TABLES))
    return TABLES[name]
