"""Examples, prompts, label words: what a model is asked and what it should answer. Knows no model."""

from tezo.tasks.base import Example as Example
from tezo.tasks.base import Row as Row
from tezo.tasks.formats import Fields as Fields
from tezo.tasks.formats import Format as Format
from tezo.tasks.formats import LabelFormat as LabelFormat
from tezo.tasks.formats import choose_format as choose_format
from tezo.tasks.rows import read_rows as read_rows
from tezo.tasks.sampling import hold_out as hold_out
from tezo.tasks.sampling import per_class as per_class
