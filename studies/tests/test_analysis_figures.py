"""The analyses that need no model: their figures show the numbers, their words say of what, a command writes both."""

import json
import math

import pytest
from analyses import SMALL, options_of
from cases import mostly_slow
from folders import refused, settings, tezo
from tezo_studies.analysis import ANALYSES, Given, analysis, drawn
from tezo_studies.analysis import convergence as conv
from tezo_studies.analysis import estimator_variance as est


@pytest.fixture(scope="module")
def numbers() -> dict:
    return {name: analysis(name).run(options_of(name), Given()) for name in SMALL}


# figures and words


def lines(axes) -> dict[str, tuple[list, list]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def labelled(figure) -> bool:
    return all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes if axes.get_label() != "<colorbar>")


def test_the_figure_of_the_second_moment_shows_its_numbers(numbers):
    found = numbers["second-moment"]
    figure = drawn(analysis("second-moment"), found)
    *patches, bar, errors, papers, correlations, taus = figure.axes
    assert labelled(figure) and bar.get_ylabel()
    for axes, name in zip(patches, ("full", "separable", "cross"), strict=True):
        assert axes.images[0].get_array().tolist() == found["sizes"][-1]["patch"][name]
    for row in found["sizes"]:
        label = f"{row['size']} x {row['size']}"
        steps = [point["step"] for point in row["averaged"]]
        for axes, key in ((errors, "entries"), (papers, "paper"), (correlations, "correlation")):
            assert lines(axes)[label] == (steps, [point[key] for point in row["averaged"]])
        assert lines(taus)[label][1] == row["uniformity"]["relative"]
        roots = [point["entries_of_root"] for point in row["averaged"]]
        assert roots in [list(line.get_ydata()) for line in errors.get_lines()]
    assert all(axes.get_legend() for axes in (errors, papers, correlations, taus))


def test_the_figure_of_the_estimator_shows_its_numbers(numbers):
    found = numbers["estimator"]
    figure = drawn(analysis("estimator"), found)
    variances, cosines = figure.axes
    assert labelled(figure)
    words = [text.get_text() for text in variances.get_legend().get_texts()]
    assert words == [*est.SECOND_MOMENTS, "5 x 5", "8 x 8"]
    points = [y for line in variances.get_lines() for y in line.get_ydata()]
    for row in found["over_all_draws"]:
        assert row["variance"] / row["size"] ** 2 in points and row["variance_closed"] / row["size"] ** 2 in points
    points = [pair for line in cosines.get_lines() for pair in zip(*line.get_data(), strict=True)]
    for row in found["given_factors"]:
        assert (row["cosine_closed"], row["cosine"]) in points
    assert len(found["over_all_draws"]) == 2 * (1 + 3 * 2) and len(found["given_factors"]) == 2 * 3 * 2


def test_the_figure_of_convergence_shows_its_numbers(numbers):
    found = numbers["convergence"]
    figure = drawn(analysis("convergence"), found)
    whole, part, bounded = figure.axes
    assert whole.get_xlabel() and whole.get_ylabel() and part.get_xlabel()
    assert bounded.get_xlabel()
    drawn_lines = [list(line.get_ydata()) for line in bounded.get_lines()]
    for key in ("printed", "bound", "fresh", "fixed"):
        assert [row[key] / found["bound"]["first"] for row in found["bound"]["rows"]] in drawn_lines
    words = [text.get_text() for text in bounded.get_legend().get_texts()]
    assert len(words) == 4 and sum("bound" in text for text in words) == 2
    for axes, key, slope in ((whole, "full", "slope"), (part, "span", "span_slope")):
        shown = lines(axes)
        rows = [row for row in found["methods"] if key in row]
        assert len(shown) == len(rows) + 1
        for row in rows:
            (label,) = [label for label in shown if label.startswith(row["method"] + " ")]
            assert shown[label] == ([10, 20], row[key])
            assert float(label.split("(")[1].rstrip(")")) == round(row[slope], 2)
        guide = shown["$1/\\sqrt{T}$ (-0.50)"][1]
        assert conv.slope([10, 20], guide) == pytest.approx(-0.5)
    assert [row["method"] for row in found["methods"] if "span" in row] == ["tezo", "tezo-m", "tezo-adam", "tezo-cadam"]


def test_the_command_prints_the_bound_beside_what_was_measured(numbers, tmp_path):
    done = tezo("analyze", "convergence", "--output", tmp_path, *settings(**SMALL["convergence"]))
    bound = numbers["convergence"]["bound"]
    printed = [line.split() for line in done.out.splitlines()]
    assert ["delta_rho", f"{bound['delta_rho']:g}", f"{bound['printed_delta_rho']:g}"] in printed
    for name, key in (("lambda", "lipschitz"), ("sigma^2", "variance"), ("D_0", "gap"), ("delta", "delta")):
        assert [name, *[f"{bound[key]:g}"] * 2] in printed
    for row in bound["rows"]:
        found = next(line for line in printed if line[:1] == [str(row["steps"])])
        assert found[2:4] == [f"{row['bound']:.2f}", f"{row['printed']:.2f}"]
        assert found[4:] == [f"{x:.2f}" for key in ("fresh", "fixed") for x in (row[key], 2 * row[f"{key}_se"])]


def test_captions_name_what_was_computed(numbers):
    for name, words in {
        "second-moment": ("M = N = 8, 12", "rank 3", "30 steps", "0.99"),
        "estimator": ("M = N = 5, 8", "rank 1, 3", "8 x 8"),
        "convergence": ("4 x 4", "rank 2", "T = 10, 20", "lambda = 3", "12.5%", "delta_rho = 6.36e+05"),
    }.items():
        assert all(word in numbers[name]["caption"] for word in words), numbers[name]["caption"]


# the command line


def finite(value: object) -> bool:
    if isinstance(value, dict | list):
        return all(map(finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


SLOWEST = ("second-moment", "convergence")


@pytest.mark.parametrize("name", mostly_slow(SMALL, *(name for name in SMALL if name not in SLOWEST)))
def test_the_command_writes_figure_and_numbers(name, tmp_path):
    done = tezo("analyze", name, "--output", tmp_path, *settings(**SMALL[name]))
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for kind in ("png", "svg", "json")}
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / f"{name}.svg").read_text()
    assert "<text" in svg
    assert tezo("analyze", name, "--output", tmp_path, *settings(**SMALL[name])).code == 0
    assert (tmp_path / f"{name}.svg").read_text() == svg
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert finite(found) and found["options"]["seed"] == 0 and found["caption"] in done.out


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("second-moment", {"sizse": 3}, ("sizse", "'sizes'")),
        ("second-moment", {"sizes": 8}, ("sizes is 8", "a list of whole numbers")),
        ("convergence", {"rates": 2}, ("rates is 2", "a list of numbers")),
        ("second-moment", {"sizes": [0]}, ("sizes is 0", "at least 1")),
        ("second-moment", {"sizes": []}, ("sizes is empty", "at least one")),
        ("second-moment", {"rank": 13}, ("rank: 13 is above 8", "lower it")),
        ("second-moment", {"rank": 0}, ("rank is 0", "at least 1")),
        ("second-moment", {"beta2": 1.0}, ("beta2 is 1.0", "below 1")),
        ("second-moment", {"draws": 29}, ("draws is 29", "at least 30")),
        ("estimator", {"ranks": [1, 6]}, ("ranks: 6 is above 5", "lower it")),
        ("estimator", {"draws": 1}, ("draws is 1", "at least 2")),
        ("convergence", {"sizes": [4, 5]}, ("sizes is [4, 5]", "takes one")),
        ("convergence", {"rank": 5}, ("rank: 5 is above 4", "lower it")),
        ("convergence", {"horizons": [20, 10]}, ("horizons is [20, 10]", "ascending")),
        ("convergence", {"rates": [-1.0]}, ("rates is [-1.0]", "above 0")),
        ("convergence", {"noise": -1.0}, ("noise is -1.0", "negative")),
        ("convergence", {"rho": 0.0}, ("rho is 0.0", "above 0")),
        ("convergence", {"seeds": 1}, ("seeds is 1", "at least 2")),
    ],
)
def test_what_does_not_fit_is_refused_in_words(name, setting, words, tmp_path):
    done = tezo("analyze", name, "--output", tmp_path / "out", *settings(**(SMALL[name] | setting)))
    refused(done, *words)
    assert not (tmp_path / "out").exists()


def test_the_list_of_analyses_says_what_each_is():
    listed = tezo("analyze").out
    for name in SMALL:
        assert len(ANALYSES[name].summary) > 20
        assert name in listed and ANALYSES[name].summary in listed and ANALYSES[name].paper in listed
