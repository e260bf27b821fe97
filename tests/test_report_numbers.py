"""What a report computes and draws: means, statistics, bins, groups, times, and curves that show their points."""

import itertools
import json
import math
import random
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from reports import made

from tezo.report import charts
from tezo.report import curves as numbers
from tezo.report.charts import COLOURS, chart_svg, plot
from tezo.runs.files import write_manifest
from tezo.runs.folder import FILES
from tezo.runs.reader import PlanRow, read_run
from tezo.runs.step_log import StepLog


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
    assert (found.count, found.largest, found.outliers) == (100, 20.0, 0.02)
    assert found.mean == pytest.approx(0.98)
    assert found.rms == pytest.approx(math.sqrt(8.98))
    assert numbers.kappa_statistics([]) is None
    assert math.isfinite(numbers.kappa_statistics([1e300, -1e300]).rms)


def test_the_histogram_has_every_value_once_and_the_far_ones_in_the_outer_bins():
    bins = dict(numbers.histogram([-9.0, -3.9, 0.1, 0.2, 3.9, 4.0, 1e300]))
    assert sum(bins.values()) == pytest.approx(1)
    assert (bins[-4.0], bins[0.0], bins[3.5]) == pytest.approx((2 / 7, 2 / 7, 3 / 7))


def test_parameters_are_grouped_by_what_differs_but_the_layer():
    rows = [PlanRow(f"h.{i}.fc.weight", (4, 3), True, 2 + (i == 2), "in forward") for i in range(5)]
    rows += [PlanRow(f"h.{i}.norm", (4,), False, None, "") for i in range(5)]
    first, other, idle = numbers.group_parameters(rows)
    assert (first.name, first.layers, first.tensors, first.rank, first.numbers) == (
        "h.*.fc.weight",
        "0-1, 3-4",
        4,
        2,
        48,
    )
    assert (other.layers, other.rank) == ("2", 3)
    assert (idle.moved, idle.numbers) == ("", 20)


def test_a_long_curve_keeps_its_ends_and_points_at_even_distances():
    points = [(float(x), -float(x)) for x in range(1000)]
    kept = numbers.subsample(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1]) and 200 < len(kept) <= numbers.MAX_POINTS + 1
    assert {b[0] - a[0] for a, b in itertools.pairwise(kept[:-1])} == {4.0}
    assert numbers.subsample(points[:300]) == points[:300]


def test_a_few_far_dots_are_left_out_and_counted(tmp_path):
    losses = [1.0 + i % 2 for i in range(200)]
    losses[7] = 900.0
    (axes,) = charts.loss_charts([read_run(made(tmp_path / "r", losses))]).values()
    steps = axes["steps"]
    dots = next(one for one in steps.series if one.style == "dots")
    assert [y for _, y in dots.points] == losses[:7] + losses[8:]
    assert steps.caption.endswith(" 1 points lie beyond the axis.")


def test_only_so_many_metrics_have_a_chart(tmp_path):
    folder = made(tmp_path / "r", [1.0, 2.0])
    named = {f"metric {n}": 0.5 for n in range(5000)}
    log = StepLog(folder / "steps.log", {})
    for step in (1, 2):
        log.append_evaluation("dev", step, named)
    log.close()
    found = charts.metric_charts([read_run(folder)])
    assert [chart.y for chart in found] == [*named][: charts.MAX_METRICS]


def test_a_chart_draws_its_points_in_the_colour_of_their_run(tmp_path):
    runs = [read_run(made(tmp_path / name, [2.0, 1.0, 1.5])) for name in ("a", "b")]
    (kinds,) = charts.loss_charts(runs).values()
    chart = kinds["steps"]
    figure = Figure()
    plot(chart, figure)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("steps", "loss")
    for line, one in zip(axes.get_lines(), chart.series, strict=True):
        assert [*zip(*line.get_data(), strict=True)] == one.points
        assert line.get_color() == COLOURS[one.colour]
    svg = ElementTree.fromstring(chart_svg(chart))
    styles = [group.get("style", "") for group in svg.iter("g") if any(child.tag == "use" for child in group)]
    assert ["var(--c0)" in style for style in styles] == [True, False] and "var(--c1)" in styles[1]
    texts = [text.text for text in svg.iter("text")]
    assert {"steps", "loss", "1", "3"} <= {*texts, *(text.removesuffix(".0") for text in texts)}


def test_time_between_the_lines_of_metrics_is_interpolated_and_ends_with_the_summary(tmp_path):
    folder = made(tmp_path / "r", [1.0] * 6, summary={"seconds_stepping": 12.0})
    lines = [{"step": s, "seconds": t, "memory": 1} for s, t in ((2, 4.0), (4, 6.0))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "sec')
    write_manifest(folder, FILES)
    assert numbers.seconds_at(read_run(folder)) == pytest.approx({1: 2, 2: 4, 3: 5, 4: 6, 5: 9, 6: 12})
