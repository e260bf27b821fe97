"""Objectives: how each kind of model is asked for an answer, and the scores and loss of it. A file for each kind."""

from collections.abc import Callable, Sequence

from tezo.models.kinds import Kind
from tezo.models.loading import LoadedModel
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.classifier import ClassifierObjective
from tezo.tasks.objectives.encoder import EncoderObjective
from tezo.tasks.objectives.in_engine import CausalInEngine
from tezo.tasks.objectives.masked import MaskedObjective
from tezo.tasks.objectives.objective import Objective

_OBJECTIVES: dict[Kind, Callable[..., Objective]] = {
    "causal": CausalObjective,
    "masked": MaskedObjective,
    "encoder": EncoderObjective,
    "classifier": ClassifierObjective,
}


def objective_for(loaded: LoadedModel, options: Sequence[str], max_length: int | None = None) -> Objective:
    """Returns the objective of a model; `options` are those of labelled examples, empty for free text.

    `max_length`: maximum sequence length in tokens; None: the model's maximum.
    """
    length = min(max_length or loaded.max_length, loaded.max_length)
    head = (loaded.classes,) if loaded.classes else ()
    found = _OBJECTIVES[loaded.kind](loaded.tokenizer, loaded.device, length, options, *head, model=loaded.model)
    found.context = loaded.max_length
    if loaded.engine is not None and isinstance(found, CausalObjective):
        found.evaluator = CausalInEngine(loaded.engine)
    return found
