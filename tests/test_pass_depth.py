"""A forward pass is at most five functions away from the estimator that asks for it."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from folders import completion_rows, tiny_model, words_tokenizer
from test_objectives_copies import CASES, objective_case
from test_per_example import objective_examples

import tezo
from tezo.optim.estimators.estimate import Estimator
from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.rewards import Reward, RewardRows

SOURCE = str(Path(tezo.__file__).parent)
MOST = 5
METHODS = {
    "two signs": ("tezo", {}),
    "a loss at W": ("fzoo", {"num_directions": 2}),
    "a direction a row": ("tezo", {"directions": "per-example"}),
    "outputs": ("gauss-newton", {"num_directions": 2, "rank": 2, "basis": "gaussian", "rho": 1e-3}),
}


def frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def below(kind: type) -> list[type]:
    return [own for kind in kind.__subclasses__() for own in (kind, *below(kind))]


def depths(model) -> list[int]:
    """Number of frames of the library from one in an estimator's file, which counts, to the model, for each pass."""
    found = []
    estimators = {inspect.getfile(kind) for kind in below(Estimator)}

    def measure(module, args) -> None:
        files = [frame.f_code.co_filename for frame in frames() if frame.f_code.co_filename.startswith(SOURCE)]
        within = [i for i, file in enumerate(files, 1) if file in estimators]
        found.extend(within[:1])

    model.register_forward_pre_hook(measure)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "shape"), [case for case in CASES if case[0] in ("opt", "roberta", "bert")])
def test_a_pass_is_at_most_five_frames_from_its_estimator(family, shape, method):
    model, objective, _ = objective_case(family, shape)
    batches = objective.batches(objective_examples(family, shape, objective))
    name, options = METHODS[method]
    optimizer = tezo.METHODS[name].build(model, lr=1e-3, **options)
    seen = depths(model)
    optimizer.step(objective.closure(model, batches, held_out=objective.closure(model, batches)))
    assert seen and max(seen) <= MOST, seen


def test_writing_completions_is_at_most_five_frames_from_its_estimator():
    tokenizer = words_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    objective = CausalObjective(tokenizer, torch.device("cpu"), 100, ())
    encoded = [objective.encode(Example(row["prompt"], "", (), None, "")) for row in completion_rows(2)]
    reward = Reward(lambda sample: float(len(sample["completion"])), "length", "", 3, 1.0, 0)
    optimizer = tezo.METHODS["es"].build(model, lr=1e-3, num_directions=2, rank=2, basis="gaussian", rho=1e-2)
    seen = depths(model)
    optimizer.step(RewardRows(reward, model, objective, encoded, 0))
    assert seen and max(seen) <= MOST, seen
