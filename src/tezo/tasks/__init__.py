"""Rows, prompts and label words, the paper's sixteen tasks, and the objectives that score a model on them."""

from tezo.tasks.catalogue import TASKS as TASKS
from tezo.tasks.catalogue import task as task
from tezo.tasks.examples import Example as Example
from tezo.tasks.examples import Measure as Measure
from tezo.tasks.examples import Row as Row
from tezo.tasks.formats import LabelFormat as LabelFormat
from tezo.tasks.formats import choose_format as choose_format
from tezo.tasks.row_sources import read_rows as read_rows
from tezo.tasks.rows import Format as Format
from tezo.tasks.splits import hold_out as hold_out
from tezo.tasks.splits import hold_out_of_groups as hold_out_of_groups
from tezo.tasks.splits import parts as parts
from tezo.tasks.splits import per_class as per_class
from tezo.tasks.wordings import Demonstrated as Demonstrated
from tezo.tasks.wordings import Task as Task
