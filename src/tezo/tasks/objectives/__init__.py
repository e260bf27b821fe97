"""What is minimised, and how a model answers: one file for each kind of model."""

from collections.abc import Sequence

from tezo.models.kinds import Kind
from tezo.models.loading import LoadedModel
from tezo.tasks.objectives.batch import Batch as Batch
from tezo.tasks.objectives.causal import CausalObjective as CausalObjective
from tezo.tasks.objectives.encoder import EncoderObjective as EncoderObjective
from tezo.tasks.objectives.masked import MaskedObjective as MaskedObjective
from tezo.tasks.objectives.objective import BatchClosure as BatchClosure
from tezo.tasks.objectives.objective import Encoded as Encoded
from tezo.tasks.objectives.objective import Objective as Objective

_OBJECTIVES: dict[Kind, type[Objective]] = {
    "causal": CausalObjective,
    "masked": MaskedObjective,
    "encoder": EncoderObjective,
}


def objective_for(loaded: LoadedModel, options: Sequence[str], max_length: int | None = None) -> Objective:
    """The objective of a model's kind, for labelled data with `options` or, with none, for free text."""
    length = min(max_length or loaded.max_length, loaded.max_length)
    return _OBJECTIVES[loaded.kind](loaded.tokenizer, loaded.device, length, options)
