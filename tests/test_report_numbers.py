"""What the page about runs computes: means, statistics, bins, groups, ticks and times."""

import json
import math
import random

import pytest
from reports import made

from tezo.runs.reader import PlanRow, read_run
from tezo.studies.report import charts
from tezo.studies.report import curves as numbers


def test_the_smoothed_curve_is_the_weighted_mean_of_what_came_before():
    values = [random.Random(0).gauss(0, 1) for _ in range(50)]
    for half in (1, 7):
        weights = [0.5 ** (i / half) for i in range(50)]
        for i, mean in enumerate(numbers.smooth(values, half)):
            past = values[i::-1]
            assert mean == pytest.approx(
                sum(w * v for w, v in zip(weights, past, strict=False)) / sum(weights[: i + 1])
            )
    assert numbers.smooth([3.0, 3.0, 3.0], 5) == pytest.approx([3.0] * 3)


def test_statistics_of_kappa_are_their_closed_forms():
    values = [1.0] * 98 + [-20.0, 20.0]
    found = numbers.kappa_statistics(values)
    assert (found.count, found.largest, found.beyond) == (100, 20.0, 0.02)
    assert found.mean == pytest.approx(0.98)
    assert found.rms == pytest.approx(math.sqrt(8.98))
    assert numbers.kappa_statistics([]) is None
    assert math.isfinite(numbers.kappa_statistics([1e300, -1e300]).rms)


def test_the_histogram_has_every_value_once_and_the_far_ones_in_the_outer_bins():
    bins = dict(numbers.histogram([-9.0, -3.9, 0.1, 0.2, 3.9, 4.0, 1e300], 4.0, 16))
    assert sum(bins.values()) == pytest.approx(1)
    assert (bins[-4.0], bins[0.0], bins[3.5]) == pytest.approx((2 / 7, 2 / 7, 3 / 7))


def test_parameters_are_grouped_by_what_differs_but_the_layer():
    rows = [PlanRow(f"h.{i}.fc.weight", (4, 3), True, 2 + (i == 2), "in forward") for i in range(5)]
    rows += [PlanRow(f"h.{i}.norm", (4,), False, None, "") for i in range(5)]
    first, other, idle = numbers.groups(rows)
    assert (first.name, first.layers, first.tensors, first.rank, first.numbers) == (
        "h.*.fc.weight",
        "0-1, 3-4",
        4,
        2,
        48,
    )
    assert (other.layers, other.rank) == ("2", 3)
    assert (idle.moved, idle.numbers) == ("", 20)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3.7, 12.2), (1e-9, 3e-9), (0, 23456), (5e6, 5.0001e6), (-1e140, 1e140)]
)
def test_ticks_are_round_inside_and_a_few(low, high):
    found = charts.ticks(low, high, 5)
    assert 3 <= len(found) <= 9
    slack = 1e-9 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in found)
    assert len({charts.readable(tick) for tick in found}) == len(found) or high - low < 1e-4 * high


def test_time_between_the_lines_of_metrics_is_interpolated_and_ends_with_the_summary(tmp_path):
    folder = made(tmp_path / "r", [1.0] * 6, summary={"seconds_stepping": 12.0})
    lines = [{"step": s, "seconds": t, "memory": 1} for s, t in ((2, 4.0), (4, 6.0))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "sec')
    assert numbers.seconds_at(read_run(folder)) == pytest.approx({1: 2, 2: 4, 3: 5, 4: 6, 5: 9, 6: 12})
