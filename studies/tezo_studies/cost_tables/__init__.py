"""The cost tables of the paper's appendix: memory, time, memory of PEFT, and sampled elements.

On a GPU they are measured; elsewhere memory and time are forecasts from shapes, and say so.
"""

from tezo_studies.cost_tables.appendix_tables import COST_TABLES as COST_TABLES
from tezo_studies.cost_tables.cost_grid import CostTable as CostTable
from tezo_studies.cost_tables.cost_grid import chosen as chosen
from tezo_studies.cost_tables.cost_grid import fill as fill
