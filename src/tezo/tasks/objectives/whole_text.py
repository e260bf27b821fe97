"""The common part of objectives that read one text of each example, cut at its end."""

from tezo.tasks import Example
from tezo.tasks.objectives.objective import Encoded, Objective


class WholeTextObjective(Objective):
    """An objective whose options are not part of the example's tokens."""

    side_cut = "the end of the text"

    def _encode(self, example: Example) -> Encoded:
        ids = list(self.tokenizer(example.prompt)["input_ids"])
        over = len(ids) - self.max_length
        if over > 0:
            del ids[-1 - over : -1]  # keep the last special token
            self.cuts.add(over, example.where)
        return Encoded((tuple(ids),), (0,), example)
