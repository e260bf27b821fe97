"""The sequential test of a run's losses: its false alarms on sound runs, and how soon it sees a planted rise."""

import math
import random
from statistics import NormalDist

import pytest

from tezo.training.stopping import FALSE_ALARM_RATE, SHORTEST_WINDOW, Guard, student_quantile

STEPS = 400


def alarm(losses, steps=STEPS):
    """The number of losses at the first alarm; None: there was none."""
    guard = Guard(steps)
    return next((count for count, loss in enumerate(losses, 1) if guard.add(loss)), None)


def most_alarms(runs: int, rate: float, sigmas: float = 4.0) -> float:
    """A count of alarms that a rate exceeds with a probability of about 3e-5."""
    return runs * rate + sigmas * math.sqrt(runs * rate * (1 - rate))


@pytest.mark.parametrize("shape", ["constant", "falling", "falls and stays"])
def test_a_sound_run_raises_a_false_alarm_at_most_as_often_as_stated(shape):
    means = {"constant": lambda _: 3.0, "falling": lambda t: 3 - t / 100, "falls and stays": lambda t: 3 * 0.9**t + 2}
    draw, runs = random.Random(1), 1000
    alarms = sum(alarm([means[shape](t) + draw.gauss(0, 0.1) for t in range(STEPS)]) is not None for _ in range(runs))
    assert alarms <= most_alarms(runs, FALSE_ALARM_RATE)


def test_skewed_losses_raise_few_false_alarms():
    # The loss of a single row is as skewed as an exponential variable: that is the worst batch.
    draw, runs = random.Random(2), 1000
    alarms = sum(alarm([draw.expovariate(1) for _ in range(STEPS)]) is not None for _ in range(runs))
    assert alarms <= most_alarms(runs, 2 * FALSE_ALARM_RATE)


def test_the_scale_and_the_level_of_the_losses_do_not_matter():
    draw = random.Random(3)
    losses = [draw.gauss(0, 1) + (2 if t >= 200 else 0) for t in range(STEPS)]
    assert alarm(losses) == alarm([1e3 + 64 * loss for loss in losses]) == alarm([2**-20 * loss for loss in losses])


@pytest.mark.parametrize(("rise", "within"), [(5.0, 8), (2.0, 40), (1.0, 130)])
def test_a_planted_rise_is_seen_within_so_many_steps_in_19_runs_of_20(rise, within):
    draw, begins = random.Random(4), 200
    found = [alarm([draw.gauss(0, 1) + (rise if t >= begins else 0) for t in range(STEPS)]) for _ in range(100)]
    soon = [at for at in found if at is not None and begins < at <= begins + within]
    assert len(soon) >= 95, sorted(at or STEPS for at in found)


def test_a_slow_divergence_is_seen():
    draw = random.Random(5)
    found = alarm([3 + 0.02 * max(0, t - 100) + draw.gauss(0, 0.2) for t in range(STEPS)])
    assert found is not None and found < 200


def test_after_a_return_the_lowest_means_are_known_and_the_noise_of_the_rise_is_not():
    draw = random.Random(6)
    guard, sound = Guard(STEPS), Guard(STEPS)
    for _ in range(64):
        assert not guard.add(loss := draw.gauss(3, 0.1)) and not sound.add(loss)
    assert any(guard.add(draw.gauss(3 + 2 * t, 0.1)) for t in range(1, 9))
    guard.restart(keep_lowest=True)
    sound.restart(keep_lowest=True)
    later = [draw.gauss(3.4, 0.1) for _ in range(40)]
    alarms = [(guard.add(loss), sound.add(loss)) for loss in later]
    assert all(one == other for one, other in alarms)
    assert [one for one, _ in alarms].index(True) == 2 * SHORTEST_WINDOW - 1, "the first with an estimate of the noise"


def test_other_rows_are_compared_with_their_own_noise():
    draw = random.Random(7)
    guard = Guard(STEPS)
    for _ in range(80):
        guard.add(draw.gauss(3, 0.1))
    few, many = 1.0, 1 / 16  # rows of a step over rows of the evaluation
    assert not guard.is_above(0.3, few) and guard.is_above(0.3, many) and guard.is_above(1.2, few)


def test_quantiles_are_those_of_student():
    # closed forms for 1 and 2 degrees do not suit an expansion for many; for 10 and 30 tabulated values do
    assert student_quantile(0.95, 10) == pytest.approx(1.8125, abs=1e-3)
    assert student_quantile(0.9995, 10) == pytest.approx(4.5869, rel=0.01)
    assert student_quantile(0.9995, 30) == pytest.approx(3.6460, rel=1e-3)
    assert student_quantile(0.999, 1e9) == pytest.approx(NormalDist().inv_cdf(0.999))
