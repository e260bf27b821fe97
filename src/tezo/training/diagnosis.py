"""What a model can be tuned with, and how well its projected gradients can be measured."""

from tezo.directions.targets import select_targets
from tezo.models.loading import LoadedModel
from tezo.optim.estimate_error import DIRECTIONS, EstimateError, measure_estimate_error
from tezo.optim.methods import tezo
from tezo.tasks import Row, TaskFormat, task
from tezo.tasks.data_config import DataConfig
from tezo.tasks.setup import make_objective

REVIEWS = {
    "a quiet film that stays with you": 1,
    "the plot falls apart in the second half": 0,
    "sharp, funny and over too soon": 1,
    "two hours that feel like four": 0,
    "the cast is a delight from start to finish": 1,
    "every joke arrives late and limps away": 0,
    "a small story told with great care": 1,
    "loud, hollow and badly cut": 0,
}
"""Rows of the task sst2, for models that are looked at without any."""


def model_estimate_error(data: DataConfig, loaded: LoadedModel) -> list[EstimateError]:
    """`measure_estimate_error` on `REVIEWS`, along directions of rank 32, or less where a matrix is smaller."""
    entry = task("sst2")
    form = TaskFormat(entry, entry.wording(loaded.kind))
    objective = make_objective(data, loaded, form)
    rows = [Row({"sentence": text, "label": label}, text) for text, label in REVIEWS.items()]
    encoded = [objective.encode(form.example(row)) for row in rows]
    side = min(min(target.matrix_shape) for target in select_targets(loaded.model))
    optimizer = tezo(loaded.model, rank=min(32, side), num_directions=DIRECTIONS)
    try:
        return measure_estimate_error(optimizer, objective.closure(loaded.model, objective.batches(encoded)))
    finally:
        optimizer.close()
