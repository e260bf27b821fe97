"""Models whose weights lie elsewhere between their uses: the same steps, by the real accelerate."""

import gc
import json
from pathlib import Path

import pytest
import torch
from folders import label_rows, model_folder, refused, saved, tezo, tiny_model, tokenizer_for, train, write_rows

from tezo.directions.targets import find_targets, matrix_of, select_targets
from tezo.methods.tezo import tezo_cadam
from tezo.models.loading import load_model

OFFLOADED = ("cpu", "disk")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "gpt2", "bert"):
        model_folder(root, family)
    tokenizer = tokenizer_for("llama")
    saved(tiny_model("llama", len(tokenizer), tie_word_embeddings=False), tokenizer, root / "untied")
    write_rows(root / "rows.jsonl", label_rows(24))
    return root


def losses(model, **options) -> list[float]:
    optimizer = tezo_cadam(model, rank=4, lr=0.05, seed=1, **options)
    ids = torch.arange(5, 15).unsqueeze(0)
    found = [optimizer.step(lambda: model(input_ids=ids, labels=ids).loss) for _ in range(4)]
    optimizer.close()
    return found


@pytest.mark.parametrize("placement", OFFLOADED)
@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_an_offloaded_model_takes_the_same_steps(home, placement, family):
    placed = load_model(str(home / family), placement=placement, device="cpu")
    assert all(target.parameter.device.type == "meta" for target in select_targets(placed.model))
    assert placed.device == torch.device("cpu")
    plain = load_model(str(home / family), device="cpu")
    assert losses(placed.model) == losses(plain.model)
    assert placed.fingerprint == plain.fingerprint


@pytest.mark.parametrize("placement", OFFLOADED)
def test_an_embedding_moves_where_its_weight_is_brought_in(home, placement):
    plain = load_model(str(home / "untied"), device="cpu").model
    placed = load_model(str(home / "untied"), placement=placement, device="cpu").model
    targets = ("embed_tokens",)
    moved = losses(plain, targets=targets)
    assert losses(placed, targets=targets) == moved and len(set(moved)) == 4


def test_a_tied_embedding_is_left_out_and_said_so(home):
    loaded = load_model(str(home / "opt"), placement="cpu", device="cpu")
    assert "embed_tokens.weight" in loaded.notices[0] and "offloaded" in loaded.notices[0]
    assert not any("embed_tokens" in target.name for target in find_targets(loaded.model))


def test_matrices_of_an_offloaded_model_can_be_read(home):
    for family in ("opt", "gpt2"):
        plain = load_model(str(home / family), device="cpu").model
        placed = load_model(str(home / family), placement="cpu", device="cpu").model
        for target, original in zip(select_targets(placed), select_targets(plain), strict=True):
            assert torch.allclose(matrix_of(target), original.parameter, atol=1e-6)


@pytest.mark.parametrize("placement", OFFLOADED)
def test_a_run_of_an_offloaded_model_is_the_run_of_the_model(home, tmp_path, placement):
    rows = home / "rows.jsonl"
    for name, more in (("whole", {}), ("placed", {"model__placement": placement})):
        done = train(home / "bert", rows, tmp_path / name, "--json", model__device="cpu", **more)
        assert done.code == 0, done.err
    adapters = [tmp_path / name / "adapter/adapter_model.safetensors" for name in ("whole", "placed")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    found = tezo("eval", tmp_path / "placed", "--data", rows, "--json")
    assert found.code == 0, found.err
    whole = tezo("eval", tmp_path / "whole", "--data", rows, "--json")
    assert json.loads(found.out) == json.loads(whole.out)
    merged = tezo("export", tmp_path / "placed", "--format", "merged", "--output", tmp_path / "merged")
    assert merged.code == 0, merged.err
    again = tezo("replay", tmp_path / "placed", "--device", "cpu", "--output", tmp_path / "again")
    assert again.code == 0, again.err
    assert (tmp_path / "again/adapter/adapter_model.safetensors").read_bytes() == adapters[0].read_bytes()


@pytest.mark.parametrize("placement", OFFLOADED)
def test_methods_that_write_weights_refuse_offloaded_ones(home, tmp_path, placement):
    done = train(home / "opt", home / "rows.jsonl", tmp_path / "run", "--method", "mezo",
                 model__placement=placement, method__rank=None)  # fmt: skip
    refused(done, "cannot be written in place", "meta")
    assert not (tmp_path / "run").exists()


def test_what_is_offloaded_to_disk_is_removed_with_the_model(home, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = load_model(str(home / "opt"), placement="disk", device="cpu")
    assert [path.name.startswith("tezo-offload-") for path in Path(tmp_path).iterdir()] == [True]
    del loaded
    gc.collect()
    assert not any(Path(tmp_path).iterdir())


def test_layers_spread_over_the_devices_there_are(home):
    loaded = load_model(str(home / "opt"), placement="spread")
    plain = load_model(str(home / "opt"), device=str(loaded.device))
    assert losses(loaded.model) == pytest.approx(losses(plain.model), rel=1e-5)


def test_a_placement_that_is_none_is_refused(home, tmp_path):
    rows = home / "rows.jsonl"
    refused(train(home / "opt", rows, tmp_path / "run", model__placement="tape"), "model.placement", "tape")
    refused(
        train(home / "opt", rows, tmp_path / "run", model__placement="shards"), "torchrun", "model.placement=device"
    )
