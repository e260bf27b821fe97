"""Captured passes: at the same addresses in each step, and nothing in them that a CUDA graph refuses."""

import pytest
import torch
from tezo_studies.bench.captured_pass import EAGER, CapturedLosses, Refused
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.workload import Work

from tezo.forward.beside_weight import InForward
from tezo.methods import METHODS
from tezo.system.errors import RequestError

CPU, STEPS = torch.device("cpu"), 8


class Recording:
    """A capture on a CPU: what a pass read is kept, and a repetition computes with what now is at these addresses."""

    def __init__(self, model, parameters):
        self.captures, self.repeats, self.model, self.parameters = 0, 0, model, parameters

    def __call__(self, run):
        self.captures += 1
        points = {name: parameter._prepared for name, parameter in self.parameters.items()}
        result = run().clone()

        def repeat():
            self.repeats += 1
            for name, parameter in self.parameters.items():  # of the step of the capture, whatever was set since
                parameter._prepared = points[name]
            return result.copy_(run())

        return repeat


def started(label, model="tiny-llama"):
    work = Work(Settings(model=model, batch=2, length="8", rank=4))
    twin = work.twin()
    return METHODS[label].build(twin, lr=1e-3, rank=4, seed=1), work._losses(twin)


@pytest.mark.parametrize("label", ["tezo", "tezo-cadam", "subzo"])
def test_a_repeated_pass_reads_the_points_of_the_step_at_hand(label):
    optimizer, closure = started(label)
    expected = [optimizer.step(closure) for _ in range(STEPS)]
    optimizer.close()
    optimizer, closure = started(label)
    assert all(isinstance(parameter, InForward) for parameter in optimizer.parameters.values())
    capture = Recording(optimizer.model, optimizer.parameters)
    captured = CapturedLosses(closure, capture)
    assert [optimizer.step(captured) for _ in range(STEPS)] == expected and len(set(expected)) == STEPS
    assert (capture.captures, capture.repeats) == (1, STEPS - EAGER)


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
def test_nothing_in_a_pass_is_refused_by_a_capture(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers waits elsewhere
    optimizer, closure = started("tezo", model)
    for _ in range(EAGER):
        optimizer.step(closure)
    optimizer.refresh(closure)
    optimizer.estimator._set_perturbations(optimizer.draw().directions, [(0, 1e-3), (0, -1e-3)])
    with torch.no_grad(), Refused(CPU):
        closure.losses(2)


def test_what_waits_for_the_device_or_comes_from_elsewhere_is_refused():
    for wrong in (lambda: float(torch.ones(1)), lambda: torch.ones(3).nonzero(), lambda: bool(torch.ones(3).all())):
        with Refused(CPU), pytest.raises(RequestError, match="cannot be captured"):
            wrong()
    with Refused(torch.device("meta")), pytest.raises(RequestError, match="_to_copy cannot be captured"):
        torch.ones(3).to("meta")
