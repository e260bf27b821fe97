"""Examples, prompts, label words: what a model is asked and what it should answer. Knows no model."""

from tezo.tasks.base import Example as Example
from tezo.tasks.base import Row as Row
from tezo.tasks.catalogue import TASKS as TASKS
from tezo.tasks.catalogue import task as task
from tezo.tasks.demonstrations import Demonstrated as Demonstrated
from tezo.tasks.formats import Fields as Fields
from tezo.tasks.formats import Format as Format
from tezo.tasks.formats import LabelFormat as LabelFormat
from tezo.tasks.formats import choose_format as choose_format
from tezo.tasks.metrics import Measure as Measure
from tezo.tasks.rows import read_rows as read_rows
from tezo.tasks.sampling import hold_out as hold_out
from tezo.tasks.sampling import parts as parts
from tezo.tasks.sampling import per_class as per_class
from tezo.tasks.task import Task as Task
from tezo.tasks.task import TaskFormat as TaskFormat
