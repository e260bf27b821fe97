"""The paper's accuracy tables, cell by cell: what each run is, the runs, the table beside the published one."""

from tezo.reproduce.cells import Cell as Cell
from tezo.reproduce.cells import Grid as Grid
from tezo.reproduce.cells import make_grid as make_grid
from tezo.reproduce.papers import TABLES as TABLES
from tezo.reproduce.papers import paper_table as paper_table
from tezo.reproduce.results import write_tables as write_tables
from tezo.reproduce.runs import prepare_output as prepare_output
from tezo.reproduce.runs import run_grid as run_grid
