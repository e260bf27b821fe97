"""The cost tables: forecasts count what real steps allocate, elements are the generator's, cells are kept."""

import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch
from cases import mostly_slow, tuples_mostly_slow
from folders import refused, tezo
from tezo_studies.bench.cases import LibraryCase
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.shapes import SHAPES, from_shape
from tezo_studies.bench.workload import Work
from tezo_studies.commands.reproduce import COST_TABLES as NAMES
from tezo_studies.cost_tables import COST_TABLES, chosen
from tezo_studies.cost_tables.cost_line import CostLine, settings_of
from tezo_studies.cost_tables.drawn_elements import count_elements, elements_after, paper_elements
from tezo_studies.cost_tables.gpu_forecast import BANDWIDTH, dry_pass, least_seconds, step_cost
from tezo_studies.cost_tables.gpu_measurement import _fitting, measured_bytes, measured_seconds
from tezo_studies.cost_tables.meta_models import meta_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from tezo.directions.random import count_draws, normal
from tezo.directions.targets import ALL, select_targets
from tezo.forecast.memory import (
    META,
    LiveBytes,
    copies_of,
    first_order_kept,
    forecast,
    forecasts,
    valueless,
)
from tezo.methods import METHODS
from tezo.methods.first_order import adam
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.peft import add_adapter
from tezo.optim.first_order import SteppedWeight
from tezo.system.errors import RequestError

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CPU = torch.device("cpu")
LINES = {line.key: line for table in COST_TABLES.values() for line in table.lines}
ZEROTH = [line for line in LINES.values() if line.method in METHODS]
WHOLE = [line for line in ZEROTH if line.peft == "none"]
HALF = Settings(model="tiny", dtype="float16")


def of(lines, *fast):
    """Lines of tables as values of a parameter, which are slow but for those with these keys."""
    return {
        "argvalues": mostly_slow(lines, *(line for line in lines if line.key in fast)),
        "ids": [line.key for line in lines],
    }


@pytest.mark.parametrize("device", [CPU, META])
def test_live_bytes_are_those_of_tensors_that_exist_at_a_time(device):
    x = torch.zeros(10, 20, device=device)
    with LiveBytes([x]) as live:
        y = x @ x.T  # 400 bytes
        y.view(-1).add_(1)
        x.mul_(2)
        assert live.peak == 400
        z = y + y  # 800 at a time
        del y
        _ = (z * z).sum()  # again 800, then 404 without the product
        del z
        assert live.peak == 804
        x.t().contiguous()  # 800, beside the sum
    assert live.peak == 804


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
def test_a_pass_without_values_takes_what_a_real_one_does(shape, backward):
    settings = Settings(model=shape, dtype="float32")
    real = from_shape(SHAPES[shape].make(), torch.float32, CPU)
    with sdpa_kernel(SDPBackend.MATH):  # the meta device has no fused kernel
        expected = dry_pass(real, 3, 40, backward=backward)
    assert dry_pass(meta_model(settings), 3, 40, backward=backward) == expected
    gradients = sum(parameter.nbytes for parameter in real.parameters())
    assert expected.peak > gradients if backward else expected.peak > 3 * 40 * 32 * 4


def test_operations_are_those_of_the_products():
    rows, length, hidden, ffn, vocabulary = 3, 40, 64, 128, 96
    a_layer = 2 * rows * length * (4 * hidden**2 + 3 * hidden * ffn) + 4 * rows * length**2 * hidden
    rotary = 2 * rows * length * 16  # the angles of positions, by a product
    found = dry_pass(meta_model(Settings(model="tiny-llama")), rows, length).flops
    assert found - (2 * a_layer + 2 * rows * hidden * vocabulary) in (0, rotary)


@pytest.mark.parametrize("line", **of(WHOLE, "mezo-adam", "lozo-m", "tezo-adam"))
def test_the_forecast_is_what_a_real_step_keeps(line):
    with valueless(meta_model(HALF)) as allocated:
        said = forecast(allocated, METHODS[line.method], **line.options)
    work = Work(settings_of(line, "tiny"))
    case = LibraryCase(line.method, work)
    case.run()
    assert said.kept == case.state_bytes()
    assert step_cost(line, "tiny").weights == sum(parameter.nbytes for parameter in work.model.parameters())
    assert said.trained == case.trained
    case.close()


def test_a_forecast_needs_no_values():
    real = from_shape(SHAPES["tiny"].make(), torch.float16, CPU)
    model = meta_model(HALF)
    with valueless(model) as allocated:
        assert forecasts(allocated) == forecasts(real)
        assert sum(parameter.untyped_storage().nbytes() for parameter in allocated.parameters()) < 1000
    assert {parameter.device for parameter in model.parameters()} == {META}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("line", **of(ZEROTH, "mezo", "tezo", "mezo-prefix"))
def test_a_step_has_as_many_models_in_a_pass_as_the_forecast(line):
    length = max(settings_of(line, "tiny").lengths())
    work = Work(Settings(model="tiny", batch=16, length=str(length), targets=ALL))
    model = add_adapter(LoadedModel(work.model, None, "causal"), ModelConfig(name="tiny", peft=line.peft), 0).model
    optimizer, rows = METHODS[line.method].build(model, **line.options), []
    optimizer.unperturbed_loss = math.inf  # no pass of the model itself
    work.model.register_forward_hook(lambda *called: rows.append(len(called[-1].logits)))
    optimizer.step(work.closure(model))
    optimizer.close()
    said = forecast(model, METHODS[line.method], **line.options)
    assert set(rows) == {16 * copies_of(said, 16 * length)}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_first_order_keeps_what_is_forecast(dtype):
    work = Work(Settings(model="tiny", dtype=dtype, batch=2, length="8"))
    optimizer = adam(work.model)
    optimizer.step(work.closure(work.model))
    kept = {k: v for k, v in optimizer.resumable_state().items() if not k.startswith("weight/") and "/step" not in k}
    expected, gradients = first_order_kept(meta_model(Settings(model="tiny", dtype=dtype)))
    assert sum(value.nbytes for value in kept.values()) == expected
    weights = [SteppedWeight(target, master=True) for target in select_targets(work.model, (ALL,))]
    work.closure(work.model)().backward()
    for weight in weights:
        weight.begin_step()
    found = {id(g): g for weight in weights for g in (weight.stepped.grad, weight.target.parameter.grad)}
    assert sum(gradient.nbytes for gradient in found.values()) == gradients


def test_time_is_bounded_by_what_must_be_read_and_written():
    plain, adaptive = LINES["mezo"], LINES["mezo-adam"]
    cost = step_cost(adaptive, "tiny")
    trained = sum(p.numel() for p in meta_model(HALF).parameters())
    assert (cost.kept, cost.written) == (8 * trained, 2 * trained), "two float32 moments, and float16 weights"
    more = least_seconds(adaptive, "tiny") - least_seconds(plain, "tiny")
    assert more == pytest.approx(2 * 8 * trained / BANDWIDTH)
    low, low_adam = (step_cost(LINES[key], "tiny") for key in ("tezo", "tezo-adam"))
    vectors = sum(p.numel() for p in meta_model(HALF).parameters() if p.ndim == 1)
    assert (low.written, low_adam.written) == (2 * vectors, 2 * trained), "TeZO-Adam steps whole weights"
    more = least_seconds(LINES["tezo-adam"], "tiny") - least_seconds(LINES["tezo"], "tiny")
    assert more == pytest.approx(2 * (low_adam.kept - low.kept + 2 * (trained - vectors)) / BANDWIDTH)


@pytest.mark.parametrize("key", ["mezo", "mezo-adam", "tezo-adam"])
def test_the_papers_times_are_above_the_bound(key):
    line = next(line for line in COST_TABLES["time"].lines if line.key == key)
    assert least_seconds(line, "opt-125m") < line.published["opt-125m"] / 1e3


FORMS = {
    "mezo": lambda m, n, _r, t, _nu: m * n * t,
    "lozo": lambda m, n, r, t, nu: (m * t + n * -(-t // nu)) * r,
    "subzo": lambda m, n, r, t, nu: (m + n) * r * -(-t // nu) + r * r * t,
    "tezo": lambda m, n, r, t, _nu: (m + n + t) * r,
}


@pytest.mark.parametrize("line", **of(COST_TABLES["elements"].lines, "mezo", "lozo-m", "tezo-adam"))
def test_elements_are_those_of_a_real_run_and_of_the_closed_form(line):
    steps, nu = 7, 3
    counts = count_elements(line, "tiny", "cpu")
    work = Work(Settings(model="tiny", batch=1, length="8"))
    options = line.options | ({} if counts["interval"] is None else {"lazy_update_interval": nu})
    optimizer = METHODS[line.method].build(work.model, **options)
    matrices = {target.name: target.matrix_shape for target in optimizer.targets if target.is_matrix}
    with count_draws() as drawn:
        for _ in range(steps):
            optimizer.step(work.closure(work.model))
    real = sum(size for (_, _, name, _), size in dict(drawn).items() if name in matrices)
    optimizer.close()
    own = counts if counts["interval"] is None else counts | {"interval": nu}
    family = line.method.partition("-")[0]
    ranks = {shape: min(line.rank or 0, *shape) for shape in matrices.values()}
    form = sum(FORMS[family](m, n, ranks[m, n], steps, nu) for m, n in matrices.values())
    assert elements_after(own, steps) == real == form
    assert counts["vectors"] * steps == sum(dict(drawn).values()) - real
    papers = paper_elements(line, counts, steps)
    assert papers == form if family in ("mezo", "tezo") else papers > form, "the paper leaves the interval out"


def test_a_repeated_draw_is_counted_as_one():
    with count_draws() as drawn:
        for step in (0, 0, 1):
            normal((2, 3), seed=0, step=step, name="w", role="u")
    assert (sum(dict(drawn).values()), sum(size for _, size in drawn)) == (12, 18)


def test_what_a_step_draws_again_is_told_apart():
    assert count_elements(LINES["tezo"], "tiny", "cpu")["again"] == 0, "the numbers of a step are few and kept"
    mezo = count_elements(LINES["mezo"], "tiny", "cpu")
    # the update draws every matrix again, and the head of OPT, tied to the embedding, a third time
    assert mezo["again"] == mezo["step"] + 96 * 64


@pytest.mark.parametrize(
    "line", **of([line for line in COST_TABLES["peft-memory"].lines if line.method], "ft-lora", "mezo-lora")
)
def test_every_row_of_peft_memory_can_be_measured(line):
    if line.peft != "none" or line.by_gradient:  # the others are bench's, which tests its own
        assert measured_bytes(line, "tiny", "cpu") > 1 << 20


@pytest.mark.slow
def test_seconds_are_the_benchmarks():
    assert 0 < measured_seconds(LINES["tezo"], "tiny", "cpu") < 10


@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("adapter", ["none", "lora", "prefix"])
def test_a_model_without_values_has_the_parameters_of_a_real_one(shape, adapter):
    settings = Settings(model=shape, dtype="float16")
    real = LoadedModel(from_shape(SHAPES[shape].make(), torch.float16, CPU), None, "causal")
    expected = add_adapter(real, ModelConfig(name=shape, peft=adapter), seed=0).model

    def described(model):
        return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}

    assert described(meta_model(settings, adapter)) == described(expected)


def test_what_does_not_fit_has_no_number():
    def no_memory():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def refusing(cause):
        def measure():
            raise RequestError("refused") from cause

        return measure

    assert _fitting(no_memory) is None
    assert _fitting(refusing(torch.OutOfMemoryError())) is None
    with pytest.raises(RequestError):
        _fitting(refusing(None))


def test_the_tables_have_the_papers_numbers():
    assert set(NAMES) == set(COST_TABLES)
    memory = {line.key: line for line in COST_TABLES["memory"].lines}
    assert memory["mezo"].published["llama-7b"] == 13.91 and memory["mezo-m"].published["opt-30b"] is None
    assert len(memory) == 10 and len(COST_TABLES["memory"].models) == 9
    printed = {"ft": 8.27, "ft-lora": 2.98, "ft-prefix": 3.00, "mezo": 1.13, "mezo-lora": 1.02, "mezo-prefix": 1.03,
               "mezo-adam": 3.14, "tezo-adam": 1.10}  # fmt: skip
    rows = {line.key: line.published["opt-6.7b"] for line in COST_TABLES["peft-memory"].lines}
    for key, ratio in printed.items():
        assert rows[key] / rows["zero-shot"] == pytest.approx(ratio, abs=0.006)


def reproduced(*arguments):
    done = tezo("reproduce", *arguments, "--devices", "cpu")
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize("name", mostly_slow(["memory", "time", "peft-memory"], "memory"))
def test_without_a_gpu_the_table_is_a_forecast_and_says_so(name, tmp_path):
    only = {"peft-memory": "ft-prefix,mezo-lora"}.get(name, "mezo,tezo-adam")
    said = reproduced(name, "--model", "tiny,opt-125m", "--only", only, "--output", tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert re.match(r"# .*\bforecast\b", text) and "\n| forecast |" in text and "nothing was measured" in text
    assert len(re.findall("^[0-9]/4 .*: forecast$", said, flags=re.M)) == 4
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and {row["by"] for row in rows} == {"forecast"}
    unit = next(key for key in ("bytes", "seconds") if key in rows[0])
    assert all(float(row[unit]) > 0 for row in rows)
    published = [row[f"published_{unit}"] for row in rows if row["model"] == "opt-125m"]
    assert all(published) or name == "peft-memory"


@pytest.mark.parametrize(
    ("name", "key"),
    tuples_mostly_slow([("memory", "tezo-adam"), ("peft-memory", "mezo-prefix")], ("memory", "tezo-adam")),
)
def test_the_committed_forecasts_are_what_the_code_says(name, key):
    with (RESULTS / f"costs-{name}/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = COST_TABLES[name]
    assert [(row["method"], row["model"]) for row in rows] == [(o.label, m) for m in table.models for o in table.lines]
    row = next(row for row in rows if row["method"].lower() == key)
    line = next(line for line in table.lines if line.key == key)
    assert row["by"] == "forecast"
    # another version of torch may take another temporary
    assert float(row["bytes"]) == pytest.approx(step_cost(line, row["model"]).memory, rel=0.03)


def test_finished_cells_are_kept(tmp_path):
    command = ("memory", "--model", "tiny", "--output", tmp_path)
    reproduced(*command, "--only", "mezo")
    cells = json.loads((tmp_path / "cells.json").read_text())
    cells["cells"]["mezo tiny"] = 123 * 2**30
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    said = reproduced(*command, "--only", "mezo,tezo")
    assert re.findall("^./. (.*)$", said, flags=re.M) == ["tezo tiny: forecast"]
    assert "| MeZO | 123.00 |" in (tmp_path / "table.md").read_text()


def test_a_table_of_counts(tmp_path):
    said = reproduced("elements", "--model", "tiny", "--only", "tezo,mezo", "--output", tmp_path)
    assert "tezo tiny: counted" in said
    with (tmp_path / "table.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    for row in rows.values():  # of both, the paper's form is ours
        assert row["steps_15000"] == row["paper_15000"] != "0"
    assert "forecast" not in (tmp_path / "table.md").read_text()


def test_wrong_requests_are_refused(tmp_path):
    out = ("--devices", "cpu", "--output", tmp_path / "out")
    refused(tezo("reproduce", "memory", *out, "--only", "tezzo"), "tezzo", "tezo")
    refused(tezo("reproduce", "memory", *out, "--model", "opt-13"), "opt-13", "opt-13b")
    refused(tezo("reproduce", "memory", *out, "--scale", "small"), "scale")
    refused(tezo("reproduce", "time", *out, "--plan"), "plan")
    refused(tezo("reproduce", "time", *out, "--data-dir", tmp_path), "data-dir")
    refused(tezo("reproduce", "time", "--devices", "cpu,cpu", "--output", tmp_path / "out"), "devices")
    assert not (tmp_path / "out").exists()
    reproduced("memory", "--model", "tiny", "--only", "zero-shot", "--output", tmp_path / "out")
    refused(tezo("reproduce", "time", *out, "--model", "tiny"), "time", "memory", "--output")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("mine")
    refused(tezo("reproduce", "memory", "--devices", "cpu", "--output", tmp_path / "other"), "exists already")


def test_rows_and_columns_can_be_chosen():
    table = chosen(COST_TABLES["memory"], only=["TeZO", "opt-13b", "zero-shot"])
    assert [line.label for line in table.lines] == ["zero-shot", "TeZO"] and table.models == ("opt-13b",)
    assert chosen(COST_TABLES["memory"], only=["mezo"]).models == COST_TABLES["memory"].models
    assert isinstance(table.lines[0], CostLine)
