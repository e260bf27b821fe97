"""A server of vLLM that has other weights than the folder, or computes a part of an adapter, is told by its answers."""

from dataclasses import replace

import pytest
import torch
import transformers
from cases import mostly_slow
from few_bits import LAYER, in_few_bits, in_groups, rewritten
from folders import refused, tezo
from short_runs import stopped
from vllm_server import another_of_its_base, vllm_home, vllm_server

from tezo.engines import load
from tezo.engines.second_copy import DOUBTFUL, OTHER, SecondCopy, compared, left_out
from tezo.models.kinds import ModelConfig
from tezo.models.lora import Adapter
from tezo.system.errors import RequestError
from tezo.training.job import prepare
from tezo.training.loop import train as run_config
from tezo.training.settings import parse_config

RANK = 12
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = vllm_home(tmp_path_factory.mktemp("home"))
    another_of_its_base(root / "tiny", root / "tuned")
    return root


@pytest.fixture(scope="module")
def standin(home):
    with vllm_server(home / "tiny") as server:
        yield server


@pytest.fixture
def loaded(home, standin, monkeypatch):
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    return load(ModelConfig(name=str(home / "tiny"), engine=standin.url))


def modules_of(model):
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ALL]


def attention_alone(adapter: Adapter) -> Adapter:
    return replace(adapter, pairs={name: pair for name, pair in adapter.pairs.items() if "self_attn" in name})


def without(kind: str):
    return lambda adapter: replace(adapter, pairs={n: p for n, p in adapter.pairs.items() if kind not in n})


def cut_to(rank: int):
    return lambda adapter: replace(
        adapter, pairs={name: (a_RI[:rank], b_OR[:, :rank]) for name, (a_RI, b_OR) in adapter.pairs.items()}
    )


def times(factor: float):
    return lambda adapter: replace(
        adapter, pairs={n: (a_RI, factor * b_OR) for n, (a_RI, b_OR) in adapter.pairs.items()}
    )


LIES = {
    "attention alone": (attention_alone, ["gate_proj, up_proj, down_proj", "--lora-target-modules"]),
    "all but one kind": (without("k_proj"), ["leaves k_proj out"]),
    "a rank less": (cut_to(RANK - 1), [f"rank {RANK}", "--max-lora-rank"]),
    "half as strong": (times(0.5), ["computes an adapter otherwise"]),
    "of the other sign": (times(-1.0), ["computes an adapter otherwise"]),
}


def test_an_honest_server_is_taken_without_a_word(loaded):
    assert loaded.engine.reserve(RANK, modules_of(loaded.model)) == []


@pytest.mark.parametrize("name", LIES)
def test_a_part_of_an_adapter_is_told_by_what_is_left_out(loaded, standin, monkeypatch, name):
    alters, said = LIES[name]
    monkeypatch.setattr(standin, "alters", alters)
    with pytest.raises(RequestError) as error:
        loaded.engine.reserve(RANK, modules_of(loaded.model))
    for part in (standin.url, *said):
        assert part in str(error.value)
    assert not standin.adapters


def test_layers_that_are_not_tuned_may_be_left_out(loaded, standin, monkeypatch):
    monkeypatch.setattr(standin, "alters", attention_alone)
    attention = [name for name in modules_of(loaded.model) if "self_attn" in name]
    assert loaded.engine.reserve(RANK, attention) == []


def test_other_weights_end_a_run_before_anything_is_written(home, standin, tmp_path, monkeypatch):
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    done = tezo(
        "train", "--model", home / "tuned", "--data", home / "labels.jsonl", "--engine", standin.url, "--output",
        tmp_path / "run",
    )  # fmt: skip
    refused(done, standin.url, "has other weights than the folder")
    assert not (tmp_path / "run").exists()


def test_without_a_second_copy_it_is_said_what_could_not_be_checked(home, standin, monkeypatch, tmp_path):
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    folder = rewritten(home / "tiny", tmp_path, in_groups)
    loaded = load(ModelConfig(name=str(folder), engine=standin.url))
    (said,) = loaded.engine.reserve(RANK, modules_of(loaded.model))
    assert standin.url in said and "could not be checked" in said and f"{LAYER} is in I8" in said
    monkeypatch.setattr(standin, "alters", attention_alone)  # which needs none
    with pytest.raises(RequestError, match="leaves gate_proj, up_proj, down_proj out"):
        loaded.engine.reserve(RANK + 1, modules_of(loaded.model))


def test_weights_in_few_bits_are_a_second_copy_where_their_scales_are_read(home, standin, monkeypatch, tmp_path):
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    folder = rewritten(home / "tiny", tmp_path, in_few_bits(torch.int8, "rows x 1"))
    loaded = load(ModelConfig(name=str(folder), engine=standin.url))
    assert loaded.engine.reserve(RANK, modules_of(loaded.model)) == []


def test_looks_at_weights_that_are_not_read_are_refused_before_anything_is_written(
    home, standin, monkeypatch, tmp_path
):
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    (tmp_path / "packed").mkdir()
    folder = rewritten(home / "tiny", tmp_path / "packed", in_groups)
    asked = {"model": {"name": str(folder), "engine": standin.url}, "data": {"train": str(home / "few.jsonl")}}
    asked["train"] = {"steps": 1}
    for named in ({"name": "gauss-newton"}, {"name": "head-feedback"}, {"name": "auto", "basis": "activation"}):
        asked["method"] = named
        with pytest.raises(
            RequestError, match=f"computed from inputs of layers.*{LAYER} is in I8.*method.basis=gaussian"
        ):
            run_config(parse_config(asked), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    asked["method"] = {"name": "tezo", "rank": 4, "lr": 0.01, "rho": 0.03}
    assert run_config(parse_config(asked), tmp_path / "run")["num_forward_passes"] == 2


@pytest.mark.parametrize(
    "case", mostly_slow([("labels", {}), ("texts", {}), ("labels", {"objective": "accuracy"})], ("labels", {})), ids=str
)
def test_the_default_of_such_a_folder_does_not_look_and_is_resumed(case, home, standin, monkeypatch, tmp_path):
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    (tmp_path / "packed").mkdir()
    folder = rewritten(home / "tiny", tmp_path / "packed", in_groups)
    rows, train = case
    asked = {
        "model": {"name": str(folder), "engine": standin.url},
        "data": {"train": str(home / f"{rows}.jsonl")},
        "method": {"lr": 1e-3, "rho": 0.03},
        "train": {"steps": 2, "batch_size": 4, **train},
    }
    done = run_config(parse_config(asked), tmp_path / "run")
    assert done["method"] == "head-feedback" and done["num_forward_passes"] == 4
    name, basis = (notice for notice in done["notices"] if notice.startswith(("method.name", "method.basis")))
    assert ("cannot be seen here" in name or "needs the loss" in name) and "gauss-newton" in name
    assert basis.startswith("method.basis is gaussian, because head-feedback looks") and f"{LAYER} is in I8" in basis
    again = run_config(parse_config(asked), tmp_path / "run", resume=True)
    assert again["after"] == done["after"]
    stopped(parse_config(asked), tmp_path / "stopped", 1)
    resumed = run_config(parse_config(asked), tmp_path / "stopped", resume=True)
    assert resumed["after"] == pytest.approx(done["after"], abs=1e-4) and resumed["steps"] == 2


def test_a_population_of_such_a_folder_has_random_directions(home, standin, monkeypatch, tmp_path):
    (tmp_path / "packed").mkdir()
    folder = rewritten(home / "tiny", tmp_path / "packed", in_groups)
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    asked = {
        "model": {"name": str(folder), "engine": standin.url},
        "data": {"train": str(home / "texts.jsonl")},
        "train": {"reward": "score.py:f", "max_new_tokens": 4},
    }
    job = prepare(parse_config(asked), measuring=False, score=lambda *_: 1.0)
    job.optimizer.close()
    assert (job.config.method.name, job.config.method.options["basis"]) == ("es", "gaussian")
    assert sum("method.basis is gaussian" in notice for notice in job.notices) == 1


@pytest.mark.parametrize("options", [{}, {"basis": "gaussian"}, {"basis": "activation"}], ids=str)
def test_weights_that_torch_reads_leave_the_method_and_its_basis(options, home, standin, monkeypatch):
    monkeypatch.setattr(standin, "alters", lambda adapter: adapter)
    asked = {"model": {"name": str(home / "tiny"), "engine": standin.url}, "method": options}
    job = prepare(parse_config(asked | {"data": {"train": str(home / "labels.jsonl")}}), measuring=False)
    job.optimizer.close()
    assert job.config.method.name == "gauss-newton" and job.config.method.options.get("basis") == options.get("basis")


def test_the_second_copy_computes_what_the_model_does_without_and_with_merged_weights(home, loaded):
    plain = transformers.AutoModelForCausalLM.from_pretrained(home / "tiny")
    tokens = list(range(5, 60))
    change, found = SecondCopy(loaded.model).log_probs(tokens, modules_of(plain))

    def log_probs():
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    torch.testing.assert_close(found[0], log_probs(), atol=1e-4, rtol=0)
    with torch.no_grad():
        for name, (a_RI, b_OR) in change.items():
            plain.get_submodule(name).weight.add_(b_OR @ a_RI)
    torch.testing.assert_close(found[1], log_probs(), atol=1e-4, rtol=0)
    assert (found[1] - found[0]).abs().mean() > 0.1


def test_what_a_server_rounds_otherwise_in_another_batch_is_no_effect():
    plain = torch.tensor([-1.0, -2.0])
    under = {"none": plain + 0.02, "some": plain - 0.5}
    assert left_out(plain, plain - 0.01, under) == ["none"]
    assert left_out(plain, plain, under | {"bits": plain.clone()}) == ["bits"]


@pytest.mark.parametrize(
    ("off", "off_changed", "wrong", "doubt"),
    [
        (0.01, 0.01, None, None),
        (DOUBTFUL + 0.05, DOUBTFUL + 0.05, None, "differ by 0.15"),
        (OTHER + 0.05, 0.0, "other weights", None),
        (0.01, 0.6, "computes an adapter otherwise", None),
    ],
)
def test_what_is_off_is_told_apart_by_where_it_is_off(off, off_changed, wrong, doubt):
    expected = torch.tensor([[-1.0, -2.0], [-2.0, -3.0]])
    told = expected + torch.tensor([[off, -off], [off_changed, -off_changed]])
    found = compared(told, expected)
    assert (found.wrong is None) == (wrong is None) and (wrong or "") in (found.wrong or "")
    assert (found.doubt is None) == (doubt is None) and (doubt or "") in (found.doubt or "")
