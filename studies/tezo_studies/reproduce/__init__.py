"""Tables of accuracies: the runs of each cell, their results, and the table next to the published numbers."""

from collections.abc import Sequence

from tezo.system.errors import RequestError, nearest
from tezo_studies.reproduce.encoder_table import ENCODER
from tezo_studies.reproduce.grid import Cell as Cell
from tezo_studies.reproduce.grid import Grid as Grid
from tezo_studies.reproduce.grid import make_grid as make_grid
from tezo_studies.reproduce.grid_runs import prepare_output as prepare_output
from tezo_studies.reproduce.grid_runs import run_grid as run_grid
from tezo_studies.reproduce.layout import write_tables as write_tables
from tezo_studies.reproduce.paper_tables import LLAMA, OPT, ROBERTA
from tezo_studies.reproduce.study_tables import STUDY, STUDY_DECODER, STUDY_LONG
from tezo_studies.reproduce.table import Table as Table

TABLES = {table.name: table for table in (ROBERTA, OPT, LLAMA, ENCODER, STUDY, STUDY_LONG, STUDY_DECODER)}


def find_table(name: str, others: Sequence[str] = ()) -> Table:
    """The table `name`; `RequestError` with the nearest name, or one of `others`, if there is none."""
    if name not in TABLES:
        raise RequestError(f"table: there is no table {name!r}. " + nearest(name, [*TABLES, *others]))
    return TABLES[name]
