"""Ctrl-C at any moment of a step, and errors out of a layer, leave a model as before the step, or as after it."""

import copy
import os
import random
import signal
import threading
import time

import pytest
import torch
from cases import CASES, ONE_OF_EACH_KIND, choose, every_method_fast_for_kinds
from tiny import lm_loss, tiny_opt, tokens
from torch.overrides import TorchFunctionMode

from tezo.optim.first_order import FirstOrderOptimizer

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


@pytest.mark.thinned
@every_method_fast_for_kinds
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_error_out_of_a_layer_leaves_all_as_before(case, error):
    model = tiny_opt()
    twin, first = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, other, warms = (case.build(one, **ALL) for one in (model, twin, first))
    for one, tuned in ((optimizer, model), (other, twin), (warms, first)):
        one.step(lm_loss(tuned, tokens(seed=0)))
    warms.step(lm_loss(first, tokens(seed=1)))  # small tensors of a pass are kept for later ones
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


class AlarmError(Exception):
    """Raised by the handler of a signal that is none of those that end a process."""


def is_equal(optimizer, other):
    ours, theirs = optimizer.resumable_state(), other.resumable_state()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def built(name, model):
    return FirstOrderOptimizer(model, lr=1e-3) if name == "adam" else CASES[name].build(model, **ALL)


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("tezo-cadam", 30), *(pytest.param(n, 200, marks=pytest.mark.slow) for n in (*ONE_OF_EACH_KIND, "adam"))],
)
def test_another_signal_whose_handler_raises_leaves_all_as_before_or_after_the_step(name, rounds):
    def raises(number, frame):
        heard.append(number)
        raise AlarmError

    model = tiny_opt()
    twin = copy.deepcopy(model)
    optimizer, other = built(name, model), built(name, twin)
    draw, before, between, heard = random.Random(0), 0, 0, []
    for first in (0, 2):  # the first steps are slower than those that follow
        started = time.perf_counter()
        for one, tuned in ((optimizer, model), (other, twin)):
            for step in range(first, first + 2):
                one.step(lm_loss(tuned, tokens(seed=step)))
    longest, modes = (time.perf_counter() - started) / 4, function_modes()
    old = signal.signal(signal.SIGALRM, raises)
    try:
        for seed in range(rounds):
            heard.clear()
            steps, raised = optimizer.num_steps, False
            try:
                # twice: later steps may be slower than the first ones on a machine that others use
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 2 * longest))
                optimizer.step(lm_loss(model, tokens(seed=seed)))
                while not heard:
                    pass
            except AlarmError:
                raised = True
            before, between = before + (raised and optimizer.num_steps == steps), between + raised
            if optimizer.num_steps > steps:
                other.step(lm_loss(twin, tokens(seed=seed)))
            assert function_modes() == modes and optimizer.num_steps == other.num_steps
            if not is_equal(optimizer, other):
                assert steps == optimizer.num_steps, seed
                other.refresh()  # a step that renews the factors first folds what was trained with the old ones
                assert is_equal(optimizer, other), seed
            assert signal.getsignal(signal.SIGALRM) is raises
        assert 0 < before < between, "some of them came before the update, and some in it or after it"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_a_handler_that_raises_nothing_runs_once_and_an_error_loses_no_signal():
    model, heard = tiny_opt(), []
    optimizer = CASES["tezo"].build(model)
    old = signal.signal(signal.SIGALRM, lambda *_: heard.append(optimizer.num_steps))

    def closure():
        signal.raise_signal(signal.SIGALRM)
        assert len(heard) == closure.calls, "it waits for the end of the measurement"
        closure.calls += 1
        return lm_loss(model, tokens(seed=0))()

    def fails():
        signal.raise_signal(signal.SIGALRM)
        raise ValueError

    try:
        closure.calls = 0
        optimizer.step(closure)
        assert heard == [0, 0]
        with pytest.raises(ValueError):
            optimizer.step(fails)
        assert len(heard) == 3
    finally:
        signal.signal(signal.SIGALRM, old)


def test_in_the_update_a_second_interrupt_waits_too():
    optimizer = CASES["tezo"].build(model := tiny_opt())
    apply = optimizer.update.step

    def interrupted_update(*arguments):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        apply(*arguments)

    optimizer.update.step = interrupted_update
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(lm_loss(model, tokens(seed=0)))
    twin = tiny_opt()
    other = CASES["tezo"].build(twin)
    other.step(lm_loss(twin, tokens(seed=0)))
    assert optimizer.num_steps == 1 and is_equal(optimizer, other)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
