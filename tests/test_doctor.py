"""What `tezo doctor` says of a model: forecasts are what a step keeps, and a scale is what a run would take."""

import json

import pytest
import torch
from cases import mostly_slow
from folders import model_folder, refused, saved, tezo, tiny_model, tokenizer_for
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tezo.forecast import doctor as diagnosis
from tezo.forecast import memory as memory_ways
from tezo.forecast.memory import (
    FULL,
    INFERENCE,
    LORA,
    LORA_CHECKPOINTED,
    USABLE,
    WITHOUT_RANDOM_STATE,
    ZEROTH_ORDER,
    WayMemory,
    advice,
    forecasts,
    memory_of_model,
    pass_peak,
)
from tezo.methods import METHODS
from tezo.methods.first_order import adam
from tezo.methods.tezo import tezo as plain_tezo
from tezo.models.kinds import ModelConfig
from tezo.models.loading import load_model
from tezo.models.peft import add_adapter
from tezo.models.quantization import stored_bytes
from tezo.runs import environment
from tezo.system.errors import RequestError


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "bert", "roberta"):
        model_folder(root, family)
    return root


def test_measuring_takes_no_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False, dtype=torch.float64))
    optimizer, x = plain_tezo(model, rank=3, num_directions=4, seed=1), torch.randn(7, 6, dtype=torch.float64)
    before = model[0].weight.clone()
    first = optimizer.measure(lambda: model(x).sum(), 1e-3)
    assert optimizer.measure(lambda: model(x).sum(), 1e-3) == first
    assert optimizer.num_steps == 0 and torch.equal(model[0].weight, before) and torch.equal(model(x), x @ before.T)


@pytest.mark.parametrize("family", ["opt", "bert"])
def test_forecasts_are_what_a_step_keeps(home, family):
    loaded = load_model(str(home / family))
    ids = torch.arange(5, 15).unsqueeze(0)
    for forecast in forecasts(loaded.model):
        if METHODS[forecast.method].takes_rows:
            continue  # a loss alone is no closure of its own
        options = {} if forecast.rank is None else {"rank": forecast.rank}
        model = load_model(str(home / family)).model
        optimizer = METHODS[forecast.method].build(model, seed=0, **options)

        def losses(model=model):
            return model(input_ids=ids)[0].square().flatten(1).mean(1)

        optimizer.step(losses if optimizer.per_example else lambda losses=losses: losses().mean())
        state = {key: value for key, value in optimizer.resumable_state().items() if not key.startswith("weight/")}
        factors = (
            value for key, value in state.items() if key.startswith("change/") and not key.endswith("/refresh_step")
        )
        changes = sum(value.nbytes for value in factors)
        if not changes and forecast.method == "tezo-adam":  # keeps a zero coefficient that it never moves
            changes = sum(4 * optimizer.perturbation.rank_of(name) for name in optimizer.parameters)
        moments = sum(value.nbytes for key, value in state.items() if key.startswith("update/"))
        assert forecast.kept == optimizer.factor_bytes + changes + moments, forecast.method
        assert forecast.trained == sum(target.parameter.numel() for target in optimizer.targets)
        assert not any(module._forward_hooks for module in loaded.model.modules()), "a forecast leaves nothing behind"


@pytest.mark.parametrize("family", mostly_slow(["opt", "bert", "roberta"], "bert"))
def test_doctor_answers_for_every_kind_of_model(home, family):
    done = tezo("doctor", "--model", home / family, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["model"]
    assert {row["method"] for row in report["methods"]} == set(METHODS)
    shown = tezo("doctor", "--model", home / family).out
    assert "exact LoRA adapter" in shown
    if family == "roberta":  # its tokenizer has no word for the answers
        assert "is not a single token of this model" in report["scales"] and report["scales"] in shown
    else:
        assert report["recommended_rho"] in [row["rho"] for row in report["scales"]]
        assert "<- method.rho" in shown


@pytest.mark.parametrize("model", ["tiny", pytest.param("embedded:all-minilm-l6-v2", marks=pytest.mark.slow)])
def test_doctor_says_what_a_packed_model_cannot_take(tmp_path, model):
    if model == "tiny":
        tokenizer = tokenizer_for("bert")
        wide = tiny_model(
            "bert", len(tokenizer), hidden_size=64, intermediate_size=64
        )  # a CPU packs no narrower layers
        model = saved(wide, tokenizer, tmp_path / "wide")
    done = tezo("doctor", "--model", model, "--quantization", "nf4", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)["model"]
    can = {row["method"] for row in report["methods"] if row["refusal"] is None}
    assert can == {
        "tezo",
        "tezo-m",
        "tezo-cadam",
        "lozo",
        "lozo-m",
        "head-feedback",
        "subzo",
        "gauss-newton",
        "es",
        "probe",
    }
    whole = load_model(str(model)).model
    assert report["parameters"] == sum(p.numel() for p in whole.parameters()), "numbers, not bytes that hold two"


def test_doctor_refuses_what_train_refuses(home):
    refused(tezo("doctor", "--model", home / "opt", "--quantization", "nf5"), "model.quantization", "nf5")
    refused(tezo("doctor", "--model", home / "opt", "--set", "model.dtype=int4"), "model.dtype", "int4")


def by_way(loaded, rows=4, length=12):
    return {one.way: one for one in memory_of_model(loaded, rows, length)}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["opt", "bert"])
def test_the_memory_of_training_is_that_of_real_passes_and_of_what_real_steps_keep(home, family):
    found = by_way(load_model(str(home / family)))
    for way, peft in ((INFERENCE, "none"), (LORA, "lora"), (LORA_CHECKPOINTED, "lora"), (FULL, "none")):
        loaded = load_model(str(home / family))
        model = add_adapter(loaded, ModelConfig(name="", peft=peft), seed=0).model
        if way == LORA_CHECKPOINTED:
            loaded.model.gradient_checkpointing_enable(WITHOUT_RANDOM_STATE)
        with sdpa_kernel(SDPBackend.MATH):  # the meta device has no fused kernel
            peak = pass_peak(model, 4, 12, backward=way != INFERENCE)
        assert found[way].passing == peak, way
        assert found[way].weights == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
        if way != INFERENCE:
            optimizer = adam(model)
            optimizer.step(lambda model=model: model(input_ids=torch.ones(2, 5, dtype=torch.int64))[0].square().mean())
            states = optimizer.state.values()
            moments = sum(v.nbytes for state in states for key, v in state.items() if key != "step")
            stepped = sum(2 * target.parameter.nbytes for target in optimizer.targets)
            assert moments <= found[way].kept == stepped  # a pooler that the loss leaves out gets no moments


def test_training_takes_more_memory_the_more_of_it_is_kept(home):
    found = by_way(load_model(str(home / "opt")), rows=64, length=24)  # too many tokens for a pass of both signs
    total = {way: one.total for way, one in found.items()}
    assert total[INFERENCE] < total[ZEROTH_ORDER[0]] < total[LORA] < total[FULL]
    assert total[LORA_CHECKPOINTED] < total[LORA]
    more = by_way(load_model(str(home / "opt")), rows=128, length=24)
    assert more[LORA].passing - found[LORA].passing == pytest.approx(found[LORA].passing, rel=0.2)


def test_of_a_packed_model_a_layer_is_unpacked_and_nothing_is_fine_tuned_whole(tmp_path):
    tokenizer = tokenizer_for("bert")
    wide = saved(tiny_model("bert", len(tokenizer), hidden_size=64, intermediate_size=64), tokenizer, tmp_path / "wide")
    plain, packed = load_model(str(wide)), load_model(str(wide), quantization="nf4")
    found, before = by_way(packed), by_way(plain)
    assert FULL not in found
    assert found[INFERENCE].weights == stored_bytes(packed.model) < before[INFERENCE].weights
    layer = 64 * 64 * 4
    assert found[INFERENCE].passing - before[INFERENCE].passing == layer == found[LORA].passing - before[LORA].passing


GIB = 2**30
SIZES = {INFERENCE: 1, ZEROTH_ORDER[0]: 3, ZEROTH_ORDER[1]: 2, LORA: 8, LORA_CHECKPOINTED: 5, FULL: 20}


@pytest.mark.parametrize(
    ("least", "said"),
    [
        (
            8,
            "LoRA with gradients fits here and will be faster: 8.00 GiB of 10.00 GiB, beside 3.00 GiB for head-feedba",
        ),
        (5, "LoRA with gradients fits here by gradient checkpointing and will be faster: 5.00 GiB of 6.25 GiB"),
        (3, "LoRA with gradients needs 5.00 GiB by gradient checkpointing, too much for 3.75 GiB; head-feedback fits"),
        (2, "too much for 2.50 GiB; tezo-cadam fits, with 2.00 GiB."),
        (1, "neither fits into 1.25 GiB"),
    ],
)
def test_the_advice_names_the_fastest_way_that_fits(least, said):
    ways = [WayMemory(way, size * GIB, 0, 0) for way, size in SIZES.items()]
    assert said in advice(ways, int(least * GIB / USABLE))
    assert said not in advice(ways, int(least * GIB / USABLE) - 2 * GIB // 10)


@pytest.mark.parametrize("family", mostly_slow(["opt", "roberta"], "roberta"))
def test_doctor_says_whether_lora_fits_with_the_numbers(home, family, monkeypatch):
    report = json.loads(tezo("doctor", "--model", home / family, "--json", "--set", "data.max_length=8").out)
    memory = report["model"]["memory"]
    assert (memory["rows"], memory["length"]) == (16, 8) and memory["available"] == report["memory"]
    assert all(way["total"] == way["weights"] + way["kept"] + way["passing"] for way in memory["ways"])
    monkeypatch.setattr(diagnosis, "usable_memory", lambda: 10**9)
    shown = tezo("doctor", "--model", home / family).out
    assert "LoRA with gradients fits here and will be faster" in shown and "of 0.93 GiB" in shown
    monkeypatch.setattr(diagnosis, "usable_memory", lambda: 10**3)
    assert "neither fits into 0.00 GiB" in tezo("doctor", "--model", home / family).out


def test_a_model_that_cannot_be_forecast_says_why(home, monkeypatch):
    def fails(*given, **more):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(memory_ways, "meta_twin", fails)
    with pytest.raises(RequestError, match="does not run without values"):
        memory_of_model(load_model(str(home / "opt")), 2, 4)
    done = tezo("doctor", "--model", home / "opt")
    assert done.code == 0 and "no forecast: OPTForCausalLM does not run without values" in done.out


def test_the_memory_is_that_of_the_container(tmp_path, monkeypatch):
    whole = environment.usable_memory()
    for text, expected in (("max\n", whole), ("1048576\n", 1048576), (f"{10**18}\n", whole)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(environment, "CONTAINER_LIMIT", tmp_path / "memory.max")
        assert environment.usable_memory() == min(expected, whole)


def test_the_range_finders_of_a_basis_that_sees_data_are_forecast(home, monkeypatch):
    from tezo.directions.bases import activation

    made = []

    class Kept(activation.RangeFinder):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(activation, "RangeFinder", Kept)
    model = load_model(str(home / "opt")).model
    (said,) = (forecast for forecast in forecasts(model) if forecast.method == "head-feedback")
    optimizer = METHODS["head-feedback"].build(model, seed=0)
    optimizer.step(lambda: model(input_ids=torch.ones(2, 5, dtype=torch.int64))[0].square().mean())
    tensors = [value for finder in made for value in vars(finder).values() if isinstance(value, torch.Tensor)]
    assert said.collecting == sum(tensor.nbytes for tensor in tensors) > 0
    optimizer.close()
    looking = {forecast.method for forecast in forecasts(model) if forecast.collecting}
    assert looking == {"head-feedback", "gauss-newton", "es"}
