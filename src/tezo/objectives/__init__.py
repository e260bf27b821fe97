"""What is minimised, and how a model answers: one file for each kind of model."""

from collections.abc import Sequence

from tezo.models import LoadedModel
from tezo.objectives.base import BatchClosure as BatchClosure
from tezo.objectives.base import Encoded as Encoded
from tezo.objectives.base import Objective as Objective
from tezo.objectives.batch import Batch as Batch
from tezo.objectives.causal import CausalObjective as CausalObjective
from tezo.objectives.encoder import EncoderObjective as EncoderObjective
from tezo.objectives.masked import MaskedObjective as MaskedObjective
from tezo.tasks.formats import Kind

_OBJECTIVES: dict[Kind, type[Objective]] = {
    "causal": CausalObjective,
    "masked": MaskedObjective,
    "encoder": EncoderObjective,
}


def objective_for(loaded: LoadedModel, options: Sequence[str], max_length: int | None = None) -> Objective:
    """The objective of a model's kind, for labelled data with `options` or, with none, for free text."""
    length = min(max_length or loaded.max_length, loaded.max_length)
    return _OBJECTIVES[loaded.kind](loaded.tokenizer, loaded.device, length, options)
