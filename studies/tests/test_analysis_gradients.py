"""Figures of a first-order run's gradients and of benchmarks: against numpy, pandas and hand cases."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from folders import label_rows, refused, saved, settings, tezo, tiny_model, tokenizer_for, write_rows
from tezo_studies.analysis import ANALYSES, Given, drawn
from tezo_studies.analysis.costs import CostOptions, measure_memory, measure_time
from tezo_studies.analysis.gradient_spectrum import LINE, Spectrum, SpectrumOptions, measure_spectrum
from tezo_studies.analysis.gradient_subspace import (
    Directions,
    SubspaceOptions,
    growth,
    mapped_layers,
    measure_subspace,
    needed,
    prefixes_of,
)
from tezo_studies.analysis.gradients import Sketch, singular_values
from tezo_studies.analysis.weight_rank import WeightRankOptions, measure_weight_rank, rank_correlation
from tezo_studies.cost_tables.paper_costs import GIGABYTES, MILLISECONDS, MODELS

from tezo.directions.ranks import LayerwiseRank, significant_rank
from tezo.directions.targets import find_targets, select_targets
from tezo.training.job import prepare
from tezo.training.rows_of_steps import BatchSampler
from tezo.training.settings import parse_config

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    tokenizer = tokenizer_for("opt")
    saved(tiny_model("opt", len(tokenizer), dropout=0.0), tokenizer, root / "opt")
    write_rows(root / "rows.jsonl", label_rows(24))
    return root


def given(home) -> Given:
    return Given(parse_config({"model": str(home / "opt"), "data": str(home / "rows.jsonl"), "method": "adam",
                              "train": {"seed": 3}}))  # fmt: skip


def gradients(home, batch_size: int) -> dict[str, np.ndarray]:
    """Of the first step, by autograd alone."""
    job = prepare(given(home).config)
    batches = job.batches(BatchSampler(range(len(job.train)), batch_size, seed=3).rows(0))
    targets = select_targets(job.model)
    found = torch.autograd.grad(job.objective.closure(job.model, batches)(), [target.parameter for target in targets])
    return {target.name: gradient.double().numpy() for target, gradient in zip(targets, found, strict=True)}


def test_the_spectrum_of_the_first_step_is_numpys(home):
    options = SpectrumOptions(layers=("all-linear",), steps=2, batch_size=4, top=10)
    numbers = measure_spectrum(options, given(home))
    expected = gradients(home, 4)
    assert set(numbers["layers"]) == set(expected)
    for name, layer in numbers["layers"].items():
        values = np.linalg.svd(expected[name], compute_uv=False)
        assert np.allclose(layer["singular_values"][0], values[:10], rtol=1e-3, atol=1e-4 * values[0])
        assert layer["above_line"][0] == (values > LINE * values[0]).sum()
        assert len(layer["singular_values"]) == 2


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6)])
def test_singular_values_are_numpys(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    assert np.allclose(singular_values(matrix), np.linalg.svd(matrix.numpy(), compute_uv=False), atol=1e-6)
    watcher = Spectrum(top=3)
    watcher.see(matrix)
    assert len(watcher.values[0]) == 3


def test_the_cosines_of_a_run_are_those_of_its_gradients(home):
    exact = measure_subspace(SubspaceOptions(layers=("fc1.weight",), steps=4, batch_size=4), given(home))
    (layer, _), (cosines, _) = exact["layers"].values(), exact["cosines"].values()
    gram = np.array(cosines)
    assert np.allclose(np.diag(gram), 1, atol=1e-3) and np.allclose(gram, gram.T)
    assert layer["standard_error"] == 0
    roots = np.sqrt(np.linalg.eigvalsh(gram)[::-1].clip(0))
    assert np.allclose(layer["singular_values"], roots, atol=5e-3)
    assert layer["mean_cosine"] == pytest.approx((gram.sum() - 4) / 12, abs=1e-3)
    assert exact["prefixes"] == [1, 2, 3, 4]
    assert layer["growth"] == pytest.approx(growth(torch.tensor(gram), [1, 2, 3, 4]), abs=1e-3)


def test_growth_counts_the_directions_of_the_first_gradients():
    columns = torch.eye(3, dtype=torch.float64)[[0, 0, 0, 1, 2]]  # energies 1; 2; 3; 3 + 1; 3 + 1 + 1
    assert growth(columns @ columns.T, [1, 2, 3, 4, 5]) == [1, 1 / 2, 1 / 3, 2 / 4, 3 / 5]


def test_all_layers_are_in_the_heat_map_and_two_have_cosines(home):
    numbers = measure_subspace(SubspaceOptions(steps=3, batch_size=4, top=2), given(home))
    assert set(numbers["layers"]) == set(gradients(home, 4)) and len(numbers["cosines"]) == 2
    assert all(len(layer["singular_values"]) == 2 for layer in numbers["layers"].values())


def test_cosines_are_those_of_the_papers_depths_or_of_both_layers_chosen():
    assert mapped_layers([f"layers.{i}" for i in range(32)]) == ["layers.15", "layers.28"]
    assert mapped_layers(["one", "other"]) == ["one", "other"] and mapped_layers(["one"]) == ["one"]
    assert prefixes_of(500)[:2] == [10, 20] and len(prefixes_of(500)) == 50 and prefixes_of(500)[-1] == 500
    assert prefixes_of(7) == [1, 2, 3, 4, 5, 6, 7]


def test_gradients_in_one_direction_have_one_singular_value():
    target = next(t for t in find_targets(torch.nn.Linear(4, 3)) if t.is_matrix)
    watcher, matrix = Directions(target, 100), torch.randn(3, 4)
    for scale in (1.0, 5.0, -2.0):
        watcher.see(scale * matrix)
    signs = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    assert torch.allclose(watcher.gram(), signs.outer(signs), atol=1e-6), "length does not count, sign does"
    assert needed(torch.linalg.eigvalsh(watcher.gram()).clamp(min=0).sqrt().flip(0), 0.9) == 1


def test_as_many_directions_are_needed_as_energy_says():
    assert needed([3.0, 1.0, 1.0, 1.0], 0.7) == 1  # 9 of 12
    assert needed([3.0, 1.0, 1.0, 1.0], 0.8) == 2
    assert needed([1.0, 1.0, 1.0, 1.0], 1.0) == 4


def test_sketches_keep_inner_products_within_their_standard_error():
    size, length, draws = 211, 20000, 200
    sketch = Sketch(length, size)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(draws):
        x, y = (torch.nn.functional.normalize(torch.randn(length, generator=generator), dim=0) for _ in range(2))
        errors.append(float(sketch.of(x) @ sketch.of(y) - x @ y))
    assert abs(np.mean(errors)) < 4 * np.std(errors) / draws**0.5, "unbiased"
    assert np.std(errors) < sketch.standard_error
    assert sketch.of(torch.ones(length)).shape == (size,)
    short = torch.randn(100)
    assert torch.equal(Sketch(100, size).of(short), short) and Sketch(100, size).standard_error == 0


def test_a_sketched_run_has_the_cosines_of_the_exact_one(home):
    layers = ("fc2.weight",)
    exact, sketched = (
        measure_subspace(SubspaceOptions(layers=layers, steps=4, batch_size=4, sketch=size), given(home))
        for size in (65521, 307)
    )
    for name, layer in sketched["layers"].items():
        assert layer["standard_error"] > 0
        gap = np.abs(np.array(exact["cosines"][name]) - np.array(sketched["cosines"][name])).max()
        assert 0 < gap < 4 * layer["standard_error"]


def test_rank_correlation_is_spearmans():
    draw = np.random.default_rng(0)
    one, other = draw.integers(0, 6, 30), draw.integers(0, 6, 30)
    table = pandas.DataFrame({"one": one, "other": other})
    assert rank_correlation(one, other) == pytest.approx(table.corr(method="spearman").iloc[0, 1])
    assert rank_correlation([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_ranks_of_weights_and_gradients_are_counted_alike(home):
    options = WeightRankOptions(steps=1, batch_size=4, thresholds=(0.25, 0.5), max_rank=6)
    numbers = measure_weight_rank(options, given(home))
    model = prepare(given(home).config).model
    targets = select_targets(model)
    found = gradients(home, 4)
    chosen = [LayerwiseRank(threshold=threshold, max_rank=6).ranks(targets) for threshold in (0.25, 0.5)]
    moved = 0
    for target in targets:
        layer = numbers["layers"][target.name]
        # a step of Adam has moved the weights, by lr at most
        expected = [significant_rank(target.parameter.detach(), threshold) for threshold in (0.25, 0.5)]
        moved += layer["weight"] != expected
        assert layer["selected"] == [ranks[target.name] for ranks in chosen]
        values = np.linalg.svd(found[target.name], compute_uv=False)
        assert layer["gradient"] == [(values > threshold * values[0]).sum() for threshold in (0.25, 0.5)]
    assert moved == 0


def test_figures_show_the_numbers(home):
    options = SpectrumOptions(layers=("fc1.weight",), steps=3, batch_size=4, top=5)
    figure = drawn(ANALYSES["gradient-spectrum"], numbers := measure_spectrum(options, given(home)))
    places = [place for place in figure.axes if place.get_images()]
    assert len(places) == 2 and all(place.get_xlabel() == "step" for place in places)
    for place, layer in zip(places, numbers["layers"].values(), strict=True):
        values = np.array(layer["singular_values"])
        assert np.allclose(
            place.get_images()[0].get_array(), np.log10((values / values[:, :1]).clip(1e-4)).T, atol=1e-5
        )
        assert list(place.get_lines()[0].get_ydata()) == [count - 0.5 for count in layer["above_line"]]
    weight = measure_weight_rank(WeightRankOptions(steps=1, batch_size=4), given(home))
    left, right = drawn(ANALYSES["weight-rank"], weight).axes
    assert [line.get_label() for line in left.get_lines()] == ["weight", "gradient"]
    assert list(left.get_lines()[0].get_ydata()) == [layer["weight"][1] for layer in weight["layers"].values()]
    assert len(right.get_lines()) == 4
    subspace = measure_subspace(SubspaceOptions(steps=4, batch_size=4), given(home))
    spectra, growths, one, other, *bars = drawn(ANALYSES["gradient-subspace"], subspace).axes
    assert all(place.get_xlabel() and place.get_ylabel() for place in (spectra, growths, one, other))
    assert len(bars) == 3 and all(bar.get_ylabel() for bar in bars)
    values = np.array([layer["singular_values"] for layer in subspace["layers"].values()])
    assert np.allclose(spectra.get_images()[0].get_array(), (values / values[:, :1]).T)
    assert np.allclose(growths.get_images()[0].get_array().T, [of["growth"] for of in subspace["layers"].values()])
    for place, (name, cosines) in zip((one, other), subspace["cosines"].items(), strict=True):
        assert np.allclose(place.get_images()[0].get_array(), cosines)
        assert place.get_title() == name.removesuffix(".weight")


def test_costs_are_the_benchmarks_beside_the_papers():
    memory = measure_memory(CostOptions(), Given(paths=(RESULTS / "memory_cpu.json",)))
    first = json.loads((RESULTS / "memory_cpu.json").read_text())[0]
    of_tezo = next(row for row in first["rows"] if row["label"] == "tezo")
    assert memory["ours"][0]["figures"]["tezo"] == of_tezo["over_F"]["ratio"]
    assert memory["paper"]["mezo-adam"] == pytest.approx(75.27 / 24.39)
    assert memory["paper"]["ft"] == pytest.approx(9.77, abs=0.005), "the ratio that the paper prints"
    time = measure_time(CostOptions(paper_model="OPT 125M"), Given(paths=(RESULTS / "step_cpu.json",)))
    assert time["paper"]["tezo-adam"] == pytest.approx(54 / 33)
    assert len(time["ours"]) == len(json.loads((RESULTS / "step_cpu.json").read_text()))
    left, right = drawn(ANALYSES["step-time"], time).axes
    widths = [bar.get_width() for bar in right.patches]
    assert widths == pytest.approx(list(time["paper"].values()))
    bars = [bar.get_width() for bar in left.patches]
    assert time["ours"][0]["figures"]["mezo"] in bars
    words = [text.get_text() for text in left.get_yticklabels()]
    assert "F2: two forward passes" in words and "mezo" in words and not {"F2", "N2", "J2"} & set(words)
    words = [text.get_text() for text in drawn(ANALYSES["memory"], memory).axes[0].get_yticklabels()]
    assert words[:2] == ["F: a forward pass", "N: a pass, needed logits only"]
    assert all(len(row) == len(MODELS) for row in (*GIGABYTES.values(), *MILLISECONDS.values()))


@pytest.mark.parametrize("name", ["gradient-spectrum", "gradient-subspace", "weight-rank"])
def test_the_command_writes_figure_and_numbers(home, tmp_path, name):
    done = tezo("analyze", name, "--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "out",
                *settings(steps=3, batch_size=4), "--set", "data.num_train=16")  # fmt: skip
    assert done.code == 0, done.err
    numbers = json.loads((tmp_path / f"out/{name}.json").read_text())
    assert numbers["caption"] in done.out and numbers["options"]["steps"] == 3
    assert (tmp_path / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / f"out/{name}.svg").read_text()


def test_the_commands_of_costs_read_what_bench_wrote(tmp_path):
    for name, file in (("memory", "memory_cpu.json"), ("step-time", "step_cpu.json")):
        done = tezo("analyze", name, RESULTS / file, "--output", tmp_path)
        assert done.code == 0, done.err
    assert set(ANALYSES) <= {line.split()[0] for line in tezo("analyze").out.splitlines()}


def test_bad_requests_are_refused(home, tmp_path):
    base = ("--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "out")
    refused(tezo("analyze", "gradient-spectra", *base), "gradient-spectra", "gradient-spectrum")
    refused(tezo("analyze", "gradient-spectrum", *base, *settings(layers="[fc9]")), "fc9")
    refused(tezo("analyze", "gradient-spectrum", *base, *settings(layers="[norm]", steps=2)), "norm")
    refused(tezo("analyze", "gradient-subspace", *base, *settings(steps=2)), "steps is 2", "at least 3")
    refused(tezo("analyze", "gradient-subspace", *base, *settings(stps=2)), "stps", "steps")
    refused(tezo("analyze", "weight-rank", *base, *settings(thresholds="[2]")), "thresholds is [2", "between 0 and 1")
    refused(tezo("analyze", "gradient-spectrum", "--output", tmp_path / "out"), "gradient-spectrum looks at a model")
    refused(tezo("analyze", "gradient-spectrum", "--model", home / "opt"), "output is not set")
    refused(tezo("analyze", "memory", "--output", tmp_path / "out"), "JSON files of tezo bench")
    other = tmp_path / "other.json"
    other.write_text('[{"kind": "memory", "results": []}]')
    refused(tezo("analyze", "memory", other, "--output", tmp_path / "out"), "other.json", "measure again")
    refused(tezo("analyze", "memory", tmp_path / "none.json", "--output", tmp_path / "out"), "none.json")
    refused(
        tezo("analyze", "memory", RESULTS / "step_cpu.json", "--output", tmp_path / "out"), "no result of tezo bench"
    )
    refused(tezo("analyze", "memory", RESULTS / "memory_cpu.json", "--output", tmp_path / "out",
                 *settings(paper_model="GPT")), "paper_model", "OPT 13B")  # fmt: skip
    refused(tezo("analyze", "memory", RESULTS / "memory_cpu.json", "--output", other), "output", "other.json")
    assert not (tmp_path / "out").exists()
