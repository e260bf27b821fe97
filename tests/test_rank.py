"""The rank of each layer: counts of singular values, the least of a block, and the cache of counts."""

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from cases import CASES
from folders import label_rows, saved, tezo, tiny_model, train, words_tokenizer, write_rows
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from tiny import tiny_llama, tiny_moe
from torch import Tensor, nn

from tezo import RequestError
from tezo.directions.ranks import FixedRank, LayerwiseRank, block_of, chosen_rank, energy_rank, significant_rank
from tezo.directions.targets import Target, select_targets
from tezo.methods import METHODS
from tezo.system.digests import content_hash
from tezo.system.files import default_cache


def matrix_with(spectrum: list[float], rows: int, columns: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, rows, generator=draw, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, columns, generator=draw, dtype=torch.float64))[0]
    middle = torch.zeros(rows, columns, dtype=torch.float64)
    middle.diagonal()[: len(spectrum)] = torch.tensor(spectrum, dtype=torch.float64)
    return left @ middle @ right


def counted_by_svd(weight: Tensor, threshold: float) -> int:
    values = np.linalg.svd(weight.to(torch.float64).numpy(), compute_uv=False)
    return int((values > threshold * values[0]).sum())


@given(
    spectrum=st.lists(st.integers(1, 1000), min_size=1, max_size=8, unique=True),
    shape=st.sampled_from([(8, 8), (8, 13), (13, 8), (9, 40)]),
    threshold=st.sampled_from([0.2003, 0.2503, 0.3003, 0.7503, 0.0203]),
)
def test_it_counts_the_singular_values_above_the_threshold(spectrum, shape, threshold):
    known = [value for value in spectrum if value > threshold * max(spectrum)]
    assert significant_rank(matrix_with(sorted(spectrum, reverse=True), *shape), threshold) == len(known)


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.25, 0.35, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (20, 30), (64, 17)])
def test_it_agrees_with_an_svd_on_random_matrices(shape, threshold):
    for seed in range(20):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert significant_rank(weight, threshold) == counted_by_svd(weight, threshold)


def test_a_singular_value_at_the_threshold_does_not_count_and_one_above_does():
    assert significant_rank(torch.diag(torch.tensor([4.0, 1.0])), 0.25) == 1
    assert significant_rank(torch.diag(torch.tensor([4.0, 1.0001])), 0.25) == 2
    assert significant_rank(torch.diag(torch.tensor([4.0, 0.9999])), 0.25) == 1
    assert significant_rank(torch.diag(torch.tensor([0.0, 4.0, -4.0])), 0.99) == 2


def test_it_is_one_at_the_least_and_does_not_depend_on_the_scale():
    assert significant_rank(torch.zeros(3, 5), 0.25) == 1
    weight = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
    assert {significant_rank(weight * scale, 0.25) for scale in (1e-6, 1.0, 1e6)} == {counted_by_svd(weight, 0.25)}


@given(
    spectrum=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    shape=st.sampled_from([(8, 8), (8, 13), (13, 8), (9, 40)]),
    threshold=st.sampled_from([0.2003, 0.3003, 0.7503, 0.9903]),
)
def test_the_energy_rule_takes_the_fewest_singular_values_with_this_share_of_the_squares(spectrum, shape, threshold):
    squares = [value**2 for value in sorted(spectrum, reverse=True)]
    least = next(k for k in range(1, 9) if sum(squares[:k]) >= threshold * sum(squares))
    assert energy_rank(matrix_with(sorted(spectrum, reverse=True), *shape), threshold) == least


def test_the_rules_differ_and_their_counts_do_not_meet_in_the_cache(tmp_path):
    weight = target_of(matrix_with([10, 1, 1, 1, 1, 1], 10, 12))
    for _ in range(2):
        rules = [LayerwiseRank(criterion=rule, threshold=0.97, cache=tmp_path) for rule in ("ratio", "energy")]
        assert [rule.ranks([weight])["layer.weight"] for rule in rules] == [1, 3]
    with pytest.raises(RequestError, match=r"method\.rank_rule: there is no rule 'energie'.*energy"):
        LayerwiseRank(criterion="energie")


def test_matrices_of_zeros_are_left_out_of_the_minimum():
    weights = {
        "layers.0.a": matrix_with([5, 4, 4, 3, 0.1], 8, 12),
        "layers.0.zero": torch.zeros(8, 12),
        "layers.0.narrow": torch.zeros(2, 12),
        "layers.1.zero": torch.zeros(8, 12),
    }
    ranks = LayerwiseRank(threshold=0.25, max_rank=6).ranks([target_of(w, name) for name, w in weights.items()])
    assert ranks == {"layers.0.a": 4, "layers.0.zero": 4, "layers.0.narrow": 2, "layers.1.zero": 6}


@pytest.mark.parametrize("rule", ["ratio", "energy"])
def test_a_run_on_a_new_lora_adapter_says_its_ranks_and_which_matrices_are_zero(tmp_path, rule):
    saved(tiny_model("opt", len(words_tokenizer())), words_tokenizer(), tmp_path / "base")
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(8))
    settings = {"model__peft": "lora", "model__lora_rank": 3, "method__name": "tezo", "method__rank": None}
    done = train(tmp_path / "base", rows, tmp_path / "run", **settings | {"method__rank_rule": rule})
    assert done.code == 0, done.err
    plan = [row for row in json.loads((tmp_path / "run/plan.json").read_text()) if row["trained"]]
    ranks = sorted({row["rank"] for row in plan})
    if rule == "ratio":
        assert ranks == [3], "B, which is zero, has no rank"
    said = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    assert done.says(f"method.rank: {said} in {len(plan)} matrices, by method.rank_rule={rule}, without", "lora_B")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_in_lower_precision_are_counted_as_the_numbers_they_are(dtype):
    weight = matrix_with([10, 9, 8, 7, 1, 0.5], 10, 12).to(dtype)
    assert significant_rank(weight, 0.25) == counted_by_svd(weight, 0.25) == 4


def squeezed_llama() -> nn.Module:
    """Two blocks whose least ranks differ, and come from different matrices."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.copy_(matrix_with([5, 4, 4, 3, 0.1], 24, 16))
        model.model.layers[1].self_attn.k_proj.weight.copy_(matrix_with([5, 4, 3, 2, 2, 2, 0.1], 8, 16))
    return model


@pytest.mark.parametrize("max_rank", [2, 5, 64])
def test_the_rank_of_a_layer_is_the_least_of_its_block_under_the_cap(max_rank):
    model = squeezed_llama()
    targets = [target for target in select_targets(model, ("all",)) if target.is_matrix]
    counts = {target.name: counted_by_svd(target.parameter.detach(), 0.25) for target in targets}

    def of_block(block: str) -> int:
        return min(min(count for name, count in counts.items() if name.startswith(block)), max_rank)

    expected = {
        name: of_block(".".join(name.split(".")[:3]) + "." if "layers" in name else name) for name in counts
    }  # Eq. 7; the embedding and the head are blocks of their own
    assert LayerwiseRank(threshold=0.25, max_rank=max_rank).ranks(targets) == expected
    assert expected["model.layers.0.mlp.down_proj.weight"] == min(4, max_rank)
    assert expected["model.layers.1.mlp.down_proj.weight"] == min(6, max_rank)
    assert counts["model.layers.1.mlp.down_proj.weight"] > 6


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11"),
        ("transformer.h.0.attn.c_attn.weight", "transformer.h.0"),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3"),
        ("0.weight", "0"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.fc1.weight", "model.fc1.weight"),
    ],
)
def test_a_block_is_one_element_of_a_numbered_list_of_modules(name, block):
    assert block_of(name) == block


def test_experts_count_as_one_tall_matrix():
    (target,) = select_targets(tiny_moe(), ("*layers.0.mlp.experts.down_proj",))
    ranks = LayerwiseRank(threshold=0.25, max_rank=64).ranks([target])
    assert ranks == {target.name: counted_by_svd(target.parameter.detach().reshape(-1, 12), 0.25)}


def test_a_fixed_rank_is_everyones_whose_smaller_side_it_fits():
    targets = select_targets(tiny_llama())
    assert FixedRank(rank=8).ranks(targets) == {target.name: 8 for target in targets}
    assert FixedRank(rank=99).ranks(targets) == {target.name: min(target.matrix_shape) for target in targets}
    with pytest.raises(RequestError, match=r"method\.rank is 0"):
        FixedRank(rank=0)


class Narrow(nn.Module):
    """Layers that no rank but 1 or 2 fits, as the gate of experts or a classifier, among one that any fits."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.wide, self.gate, self.head = nn.Linear(12, 12), nn.Linear(12, 1), nn.Linear(12, 2)
        self.double()

    def loss(self, seed: int) -> Tensor:
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        h = self.wide(x)
        return (self.head(h.tanh()) * self.gate(h).sigmoid() - 1).square().mean()


@pytest.mark.parametrize("basis", ["gaussian", "activation"])
@pytest.mark.parametrize("case", [case for case in CASES.values() if case.low_rank], ids=lambda case: case.name)
def test_a_rank_above_a_smaller_side_is_lowered_there_and_in_all_that_is_kept(case, basis):
    more = {"rank": 8} | ({"basis": basis} if "basis" in METHODS[case.name].options() else {})
    whole, first, second = (case.build(Narrow(), **more) for _ in range(3))
    ranks = {"wide.weight": 8, "gate.weight": 1, "head.weight": 2}
    assert {name: whole.rank_and_way(name)[0] for name in whole.parameters} == ranks
    losses = [whole.step(partial(whole.model.loss, step)) for step in range(9)]
    assert losses[:4] == [first.step(partial(first.model.loss, step)) for step in range(4)]
    second.load_tuned_state(first.tuned_state(), 4)  # the weights, of methods that write them
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert losses[4:] == [second.step(partial(second.model.loss, step)) for step in range(4, 9)]


def test_a_run_says_which_ranks_were_lowered_and_its_adapter_loads_in_peft(tmp_path):
    model = tiny_model("opt", len(words_tokenizer()), ffn_dim=2)
    saved(model, words_tokenizer(), tmp_path / "base")
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(8))
    done = train(tmp_path / "base", rows, tmp_path / "run")
    assert done.code == 0, done.err
    assert done.says("method.rank is 4, lowered to the smaller side of: model.decoder.layers.0.fc1.weight", "1 more")
    plan = {row["name"]: row for row in json.loads((tmp_path / "run/plan.json").read_text()) if row["trained"]}
    assert plan["model.decoder.layers.0.fc1.weight"]["rank"] == 2
    assert plan["model.decoder.layers.0.self_attn.k_proj.weight"]["rank"] == 4
    assert tezo("export", tmp_path / "run", "--format", "merged", "--output", tmp_path / "merged").code == 0
    ids = torch.arange(5, 17).unsqueeze(0)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
    tuned = PeftModel.from_pretrained(model, tmp_path / "run/adapter")(input_ids=ids).logits
    assert torch.allclose(tuned, merged, atol=1e-5)


@pytest.mark.parametrize(("threshold", "max_rank"), [(0.0, 8), (1.0, 8), (-0.1, 8), (float("nan"), 8), (0.25, 0)])
def test_settings_out_of_range_are_refused(threshold, max_rank):
    with pytest.raises(RequestError, match=r"method\.(rank_threshold|max_rank) is"):
        LayerwiseRank(threshold=threshold, max_rank=max_rank)


def test_the_rule_follows_the_request(monkeypatch, tmp_path):
    assert chosen_rank(5, "ratio", 0.25, 64) == FixedRank(rank=5)
    for name, options in (("rank_rule", ("energy", 0.25, 64)), ("rank_threshold", ("ratio", 0.3, 64)),
                        ("max_rank", ("ratio", 0.25, 0))):  # fmt: skip
        with pytest.raises(RequestError, match=rf"method\.{name} is .*method\.rank is 5; set method\.rank=null"):
            chosen_rank(5, *options)
    monkeypatch.setenv("TEZO_CACHE", str(tmp_path / "own"))
    rule = LayerwiseRank(criterion="energy", threshold=0.3, max_rank=16, cache=tmp_path / "own")
    assert chosen_rank(None, "energy", 0.3, 16) == rule
    monkeypatch.delenv("TEZO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tezo"


def target_of(data: Tensor, name: str = "layer.weight") -> Target:
    return Target(name, nn.Parameter(data, requires_grad=False), ())


def test_a_second_count_of_the_same_weights_computes_nothing(tmp_path):
    rule = LayerwiseRank(threshold=0.25, max_rank=64, cache=tmp_path)
    weight = matrix_with([5, 4, 3, 0.1], 6, 7)
    assert rule.ranks([target_of(weight)]) == {"layer.weight": 3}
    (file,) = tmp_path.iterdir()
    counts = json.loads(file.read_text())
    file.write_text(json.dumps(dict.fromkeys(counts, 6)))  # a count that no computation could give
    assert rule.ranks([target_of(weight.clone(), "another.name")]) == {"another.name": 6}
    for other in (weight * 2, weight.float(), weight[:5], weight.T.contiguous()):
        assert rule.ranks([target_of(other)]) == {"layer.weight": 3}, "other weights took this one's count"
    assert LayerwiseRank(threshold=0.7, max_rank=64, cache=tmp_path).ranks([target_of(weight)]) == {"layer.weight": 2}


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "7", '{"a": "many"}', '{"a": null}', "\x00"])
def test_a_cache_that_cannot_be_read_is_done_without_and_written_anew(tmp_path, content):
    file = tmp_path / "ranks.json"
    file.write_text(content)
    rule = LayerwiseRank(threshold=0.25, max_rank=64, cache=tmp_path)
    assert rule.ranks([target_of(matrix_with([5, 4, 0.1], 6, 7))]) == {"layer.weight": 2}
    assert list(json.loads(file.read_text()).values()) == [2]
    assert list(tmp_path.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    rule = LayerwiseRank(threshold=0.25, max_rank=64, cache=tmp_path / "file" / "folder")
    assert rule.ranks([target_of(matrix_with([5, 4, 0.1], 6, 7))]) == {"layer.weight": 2}


def test_the_key_of_a_count_is_the_content_of_the_weight():
    weight = torch.arange(24.0).view(4, 6).to(torch.bfloat16)
    assert content_hash(weight) == content_hash(weight.clone())
    assert content_hash(weight.T.contiguous().T) == content_hash(weight), "the layout in memory is no content"
    changed = weight.clone()
    changed[-1, -1] += 1
    others = [changed, weight.float(), weight.view(6, 4), weight.view(torch.float16)]
    assert len({content_hash(x) for x in [weight, *others]}) == 5


def test_weights_that_are_not_floats_need_a_fixed_rank():
    target = target_of(torch.ones(4, 4, dtype=torch.int8))
    with pytest.raises(RequestError, match=r"layer\.weight is stored as torch\.int8.* give a fixed method\.rank"):
        LayerwiseRank().ranks([target])
