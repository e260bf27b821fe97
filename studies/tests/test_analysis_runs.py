"""Loss curves of real runs, and what half precision does to weights: against the logs, and against hand cases."""

import json
import math

import pytest
import torch
from folders import label_rows, model_folder, refused, settings, tezo, train, write_rows
from tezo_studies.analysis import ANALYSES, Given, drawn
from tezo_studies.analysis.half_precision import HalfOptions, arrived, drift_in_place, drift_ours, measure_half
from tezo_studies.analysis.loss_curves import LossOptions, gaussian_smooth, measure_loss

from tezo.report.curves import smooth
from tezo.runs.folder import LOG
from tezo.runs.step_log import read_log


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    rows = write_rows(root / "rows.jsonl", label_rows(24))
    for name, directions in (("one", 1), ("two", 2)):
        done = train(model_folder(root, "opt"), rows, root / name, steps=6, train__log_every=2,
                     method__num_directions=directions)  # fmt: skip
        assert done.code == 0, done.err
    return root


def test_curves_are_the_logs(runs):
    numbers = measure_loss(LossOptions(half_life=2), Given(paths=(runs / "one", runs / "two")))
    for run, passes in zip(numbers["runs"], (2, 4), strict=True):
        logged = [step.loss for step in read_log(runs / run["name"] / LOG).steps]
        assert run["losses"] == pytest.approx(logged, rel=1e-4)
        assert run["smoothed"] == pytest.approx(smooth(logged, 2), rel=1e-4)
        assert run["forward_passes"] == [passes * (step + 1) + 2 for step in range(6)], "2: a check of the first step"
        seconds = list(run["seconds"].values())
        assert seconds == sorted(seconds) and seconds[-1] > 0
    figure = drawn(ANALYSES["loss"], numbers)
    steps, papers, by_passes, timed = figure.axes
    assert [place.get_xlabel() for place in figure.axes] == ["steps", "steps", "forward passes", "seconds of steps"]
    assert list(steps.get_lines()[1].get_ydata()) == numbers["runs"][0]["smoothed"]
    assert list(papers.get_lines()[1].get_ydata()) == numbers["runs"][0]["gaussian"]
    assert numbers["runs"][0]["gaussian"] == pytest.approx(gaussian_smooth(numbers["runs"][0]["losses"], 30), rel=1e-4)
    assert "sigma 30" in papers.get_title() and "half-life 2" in steps.get_title()
    assert list(by_passes.get_lines()[1].get_xdata()) == numbers["runs"][1]["forward_passes"]
    assert len(timed.get_lines()) == 2


def test_the_command_draws_runs(runs, tmp_path):
    done = tezo("analyze", "loss", runs / "one", runs / "two", "--output", tmp_path / "out")
    assert done.code == 0, done.err
    numbers = json.loads((tmp_path / "out/loss.json").read_text())
    assert [run["name"] for run in numbers["runs"]] == ["one", "two"] and "2 runs" in done.out
    refused(tezo("analyze", "loss", "--output", tmp_path / "none"), "run folders")
    refused(tezo("analyze", "loss", tmp_path, "--output", tmp_path / "none"), "no run folder")
    refused(
        tezo("analyze", "loss", runs / "one", "--output", tmp_path / "none", *settings(half_life=0)), "half_life is 0"
    )
    refused(tezo("analyze", "loss", runs / "one", "--output", tmp_path / "none", *settings(sigma=0)), "sigma is 0")
    assert not (tmp_path / "none").exists()


def mirrored(values: list[float], place: int) -> float:
    """The value at `place` of ... c b a | a b c | c b a ..., the "reflect" of scipy."""
    place %= 2 * len(values)
    return values[min(place, 2 * len(values) - 1 - place)]


@pytest.mark.parametrize(("count", "sigma"), [(40, 3.0), (7, 30.0), (1, 2.0), (300, 30.0)])
def test_the_papers_smoothing_is_the_sum_it_is_defined_by(count, sigma):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).tolist()
    reach = range(-int(4 * sigma + 0.5), int(4 * sigma + 0.5) + 1)
    weights = [math.exp(-(k**2) / (2 * sigma**2)) for k in reach]
    found = gaussian_smooth(values, sigma)
    assert len(found) == count
    for i in range(0, count, 13):
        expected = sum(w * mirrored(values, i + k) for w, k in zip(weights, reach, strict=True)) / sum(weights)
        assert found[i] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sigma", "documented"),
    [(1, [1.42704095, 2.06782203, 3.0, 3.93217797, 4.57295905]), (4, [2.91948343, 2.95023502, 3.0, 3.04976498])],
)
def test_the_papers_smoothing_gives_the_examples_of_scipys_documentation(sigma, documented):
    found = gaussian_smooth([1.0, 2.0, 3.0, 4.0, 5.0], sigma)
    assert found[: len(documented)] == pytest.approx(documented, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_drift_in_place_and_not_here(dtype):
    start = (torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    options = HalfOptions(size=32, steps=20)
    assert drift_ours(start, options) == [0.0] * 20
    wandering = drift_in_place(start, options)
    assert wandering[-1] > 2 * wandering[0] > 0, "a random walk"
    exact = drift_in_place(start.double(), options)
    assert max(exact) < 1e-12


def test_updates_arrive_on_average_when_rounded_stochastically():
    # neighbours of bf16 weights near 1 are 2^-7 away: a step of 2^-10 has one chance in 8 to take one
    start = torch.full((64, 64), 1.25, dtype=torch.bfloat16)
    options = HalfOptions(size=64, steps=8, step=2.0**-10)
    assert arrived(start, options, stochastic=False) == [0.0] * 8
    found = arrived(start, options, stochastic=True)
    # of the 4096 entries a share of 1/8 moves by 8 steps' worth: the mean of the first has sd sqrt(7 / 4096) = 0.041
    assert found[0] == pytest.approx(1, abs=4 * 0.042)
    assert found[-1] == pytest.approx(1, abs=4 * 0.042 / 8**0.5)
    wide = arrived(start.double(), options, stochastic=False)
    assert wide == pytest.approx([1.0] * 8)


def test_half_precision_draws_what_it_measured():
    numbers = measure_half(HalfOptions(size=8, steps=5, dtypes=("bfloat16",)), Given())
    left, right = drawn(ANALYSES["half-precision"], numbers).axes
    of = numbers["of"]["bfloat16"]
    assert list(left.get_lines()[0].get_ydata()) == [100 * x for x in of["drift_in_place"]]
    assert list(right.get_lines()[1].get_ydata()) == [100 * x for x in of["arrived_stochastic"]]
    assert "bfloat16" in ANALYSES["half-precision"].caption(numbers)
    refused(tezo("analyze", "half-precision", "--output", "/nowhere", *settings(dtypes="[int8]")), "dtypes", "bfloat16")
    refused(tezo("analyze", "half-precision", "--output", "/nowhere", *settings(steps=0)), "steps is 0")
