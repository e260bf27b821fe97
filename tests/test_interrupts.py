"""Ctrl-C at any moment of a step, and errors out of a layer, leave a model as before the step, or as after it."""

import copy
import os
import random
import signal
import threading

import pytest
import torch
from cases import CASES, ONE_OF_EACH_KIND, choose, every_method_fast_for_kinds
from tiny import lm_loss, tiny_opt, tokens
from torch.overrides import TorchFunctionMode

ALL = {"targets": ["all"]}


def output(model):
    with torch.no_grad():
        return model(input_ids=tokens(seed=9)).logits


def function_modes():
    return torch._C._len_torch_function_stack()


class Raises(TorchFunctionMode):
    """Raises at the n-th call of a torch function, in whatever layer that is."""

    def __init__(self, error=None, call=0):
        super().__init__()
        self.error, self.last, self.calls = error, call, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        if self.calls == self.last:
            raise self.error
        return func(*args, **(kwargs or {}))


def within(mode, loss):
    def closure():
        with mode:
            return loss()

    return closure


@every_method_fast_for_kinds
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_error_out_of_a_layer_leaves_all_as_before(case, error):
    model = tiny_opt()
    twin = copy.deepcopy(model)
    optimizer, other = case.build(model, **ALL), case.build(twin, **ALL)
    for one, tuned in ((optimizer, model), (other, twin)):
        one.step(lm_loss(tuned, tokens(seed=0)))
    counter = Raises()
    other.step(within(counter, lm_loss(twin, tokens(seed=1))))
    before, modes, calls = output(model), function_modes(), counter.calls
    state = {key: value.clone() for key, value in optimizer.resumable_state().items()}
    generator = torch.get_rng_state()
    model.train()
    for call in range(1, calls + 1, max(1, calls // 24)):  # at W + rho Z, and at W - rho Z
        with pytest.raises(error):
            optimizer.step(within(Raises(error, call), lm_loss(model, tokens(seed=1))))
        assert function_modes() == modes and optimizer.num_steps == 1
        assert all(part.training for part in model.modules())
        after = optimizer.resumable_state()
        assert state.keys() == after.keys() and all(torch.equal(after[key], state[key]) for key in state)
        assert torch.equal(torch.get_rng_state(), generator)
        model.eval()
        assert torch.equal(output(model), before)
        model.train()
    model.eval()
    optimizer.step(lm_loss(model, tokens(seed=1)))
    assert torch.equal(output(model), output(twin))
    optimizer.close()
    assert torch.isfinite(output(model)).all() and not any("forward" in vars(part) for part in model.modules())


def interrupted(after):
    """Sends this process SIGINT after a time."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


STEPS = 12


@choose(*ONE_OF_EACH_KIND)
def test_interrupts_at_random_moments_do_not_change_the_steps(case):
    model = tiny_opt()
    twin = copy.deepcopy(model)
    optimizer, other = case.build(model, **ALL), case.build(twin, **ALL)
    for step in range(STEPS):
        other.step(lm_loss(twin, tokens(seed=step)))

    def step():
        optimizer.step(lm_loss(model, tokens(seed=optimizer.num_steps)))

    draw, modes, raised = random.Random(0), function_modes(), 0
    while optimizer.num_steps < STEPS:
        timer = interrupted(draw.uniform(0, 0.05))
        try:
            while timer.is_alive() and optimizer.num_steps < STEPS:
                step()
            timer.join()
        except KeyboardInterrupt:
            raised += 1
        assert function_modes() == modes
        if optimizer.num_steps < STEPS:
            step()
    assert raised > 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours, theirs = optimizer.resumable_state(), other.resumable_state()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert torch.equal(output(model), output(twin))


def test_a_second_interrupt_does_not_wait():
    model = tiny_opt()
    optimizer = CASES["tezo"].build(model)
    before = output(model)

    def closure():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one was to end the step")

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert torch.equal(output(model), before) and optimizer.num_steps == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
