"""A basis that sees the data spans the leading directions of each layer's inputs, whatever keeps or moves them."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from tiny import lm_loss, sines, tiny_gpt2, tiny_llama, tiny_opt, tokens
from torch import Tensor, nn

from tezo.directions.bases import activation
from tezo.directions.bases.activation import ActivationBasis, collecting_bytes, finder_bytes, groups
from tezo.directions.bases.basis import GaussianBasis, input_size
from tezo.methods import METHODS
from tezo.methods.bases import BASES, find_basis
from tezo.methods.head_feedback import head_feedback
from tezo.runs.files import FactorFiles
from tezo.system.digests import content_hash
from tezo.system.errors import RequestError

RANK = 4


def seen_inputs(model: nn.Module, batches: list[Tensor], name: str) -> Tensor:
    """(T, I): all inputs of a module, from passes of their own."""
    found: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    handle.remove()
    return torch.cat(found)


def factors_of(optimizer) -> dict[str, Tensor]:
    """REFRESH_STEP/NAME -> what a basis keeps."""
    return {name: factor for name, factor in optimizer.basis.state().items() if name != "calls"}


def watched(model: nn.Module, basis: str | ActivationBasis, **options):
    """head-feedback on a tiny language model, whose basis sees two batches; and the batches."""
    batches = [tokens(batch=4, length=12, seed=seed) for seed in (50, 51)]
    optimizer = head_feedback(model, rank=RANK, basis=basis, **options)
    optimizer.set_passes(lambda _: [model(input_ids=batch) for batch in batches])
    return optimizer, batches


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (tiny_opt, "model.decoder.layers.1.fc2"),
        (tiny_llama, "model.layers.0.mlp.down_proj"),
        (tiny_gpt2, "transformer.h.1.mlp.c_proj"),
    ],
)
def test_directions_move_a_layer_along_the_leading_inputs_alone(make, name):
    model = make()
    optimizer, batches = watched(model, "activation", lr=1e-2)
    optimizer.step(lm_loss(model, tokens()))
    moving = optimizer.parameters[f"{name}.weight"]
    left, right = moving.change.factors()
    side = left if moving.target.input_role == "u" else right
    optimizer.close()
    x = seen_inputs(model, batches, name)
    leading = torch.linalg.svd(x, full_matrices=False)[2][:RANK].T
    assert sines(side, leading).max() < 1e-5


@pytest.mark.thinned
# these have factors of the sizes of scores and outputs: tests/test_errors_basis.py, tests/test_probe_method.py
@pytest.mark.parametrize("name", [name for name in BASES if name not in ("errors", "probe")])
@pytest.mark.parametrize("method", ["tezo", "lozo", "head-feedback"])
def test_directions_have_unit_variance_whatever_the_basis(name, method):
    model = tiny_opt()
    optimizer = METHODS[method].build(model, rank=RANK, basis=name, scale="unit", lr=1e-3, seed=5)
    optimizer.set_passes(lambda _: model(input_ids=tokens(batch=6, length=16, seed=9)))
    total, count = 0.0, 0
    for step in range(300):
        optimizer.num_steps = step
        optimizer.refresh()
        drawn = optimizer.draw().directions
        for (direction,) in drawn.values():
            left, right = direction.factors()
            total += float((left @ right.T).square().sum())
            count += left.shape[0] * right.shape[0]
    # over 12 matrices of rank 4 and 300 draws; u, drawn once by tezo, spreads the mean by a few percent
    assert total / count == pytest.approx(1.0, rel=0.1)
    optimizer.close()


def test_padding_is_not_looked_at():
    model = tiny_opt()
    ids = tokens(batch=2, length=8, seed=3)
    padded = torch.cat([ids, torch.full((2, 5), 7)], dim=1)
    mask = torch.cat([torch.ones(2, 8), torch.zeros(2, 5)], dim=1).long()
    found = []
    for call in (
        lambda _: model(input_ids=ids, attention_mask=torch.ones_like(ids)),
        lambda _: model(input_ids=padded, attention_mask=mask),
        lambda _: model(padded, mask),
    ):
        optimizer = head_feedback(model, rank=RANK)
        optimizer.set_passes(call)
        optimizer.refresh()
        found.append(factors_of(optimizer))
        optimizer.close()
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for name, factor in found[0].items():
        assert sines(factor, found[1][name]).max() < 1e-5, name
        assert torch.equal(found[2][name], found[1][name])


def test_layers_are_looked_at_in_groups_where_memory_is_short(monkeypatch):
    model = tiny_llama()
    whole, batches = watched(model, "activation")
    whole.refresh()
    whole.close()
    monkeypatch.setattr(
        "tezo.directions.bases.activation.MOST_BYTES", 8000
    )  # three range finders of 16 x 16 float64 numbers
    parts, _ = watched(model, "activation")
    parts.refresh()
    parts.close()
    number = len(list(groups(parts.targets, dict.fromkeys(parts.parameters, RANK))))
    assert number > 2
    assert parts.cost_of_basis[0] == number * len(batches) > whole.cost_of_basis[0] == len(batches)
    for name, factor in factors_of(whole).items():
        assert torch.equal(factor, factors_of(parts)[name]), name


@pytest.mark.parametrize(("least", "most"), [(0, 1 << 28), (7000, 1 << 28), (7000, 5000)])
def test_range_finders_take_a_share_of_the_layers_bytes_within_two_bounds(least, most, monkeypatch):
    monkeypatch.setattr(activation, "LEAST_BYTES", least)
    monkeypatch.setattr(activation, "MOST_BYTES", most)
    optimizer, _ = watched(tiny_llama(), "activation")
    targets, ranks = optimizer.targets, dict.fromkeys(optimizer.parameters, RANK)
    own = {t.name: finder_bytes(input_size(t), RANK, t.state_dtype) for t in targets}
    allowed = min(most, max(least, sum(t.parameter.nbytes for t in targets) / activation.SHARE))
    found = [[t.name for t in group] for group in groups(targets, ranks)]
    assert [name for group in found for name in group] == [t.name for t in targets]
    for group, following in itertools.pairwise(found):
        taken = sum(own[name] for name in group)
        assert taken <= allowed or len(group) == 1
        assert taken + own[following[0]] > allowed  # no group more than is needed
    assert len(found) > 1
    assert collecting_bytes(targets, ranks) == max(sum(own[name] for name in group) for group in found)


def test_looking_changes_neither_the_model_nor_its_mode():
    model = tiny_opt(dropout=0.5).train()
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer, _ = watched(model, "activation")
    optimizer.refresh()
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    hooks = {name: len(m._forward_pre_hooks) for name, m in model.named_modules() if name}
    assert set(hooks.values()) == {0}
    again, _ = watched(tiny_opt().eval(), "activation")  # dropout was off while the basis looked
    again.refresh()
    for name, factor in factors_of(optimizer).items():
        assert torch.equal(factor, factors_of(again)[name])


def test_a_basis_looks_at_the_steps_own_batch_where_nothing_else_was_said():
    model, other = tiny_opt(), tiny_opt()
    plain, told = (head_feedback(m, rank=RANK, lazy_update_interval=2) for m in (model, other))
    told.set_passes(lambda refresh_step: other(input_ids=tokens(seed=refresh_step)))
    for step in range(4):
        assert plain.step(lm_loss(model, tokens(seed=step))) == told.step(lm_loss(other, tokens(seed=step)))
    for name, factor in factors_of(plain).items():
        assert torch.equal(factor, factors_of(told)[name])


def test_a_basis_that_sees_nothing_says_what_to_do():
    model = tiny_opt()
    with pytest.raises(RequestError, match=r"call optimizer\.set_passes\(passes\)"):
        head_feedback(model, rank=RANK).refresh()
    optimizer = head_feedback(model, rank=RANK)
    optimizer.set_passes(lambda _: None)
    with pytest.raises(RequestError, match="do not call it"):
        optimizer.step(lm_loss(model, tokens()))


def test_a_basis_has_a_name_or_is_given():
    for name in ("activations", "activation-centred"):
        with pytest.raises(RequestError, match=rf"method\.basis: there is no basis '{name}'.*activation\b"):
            find_basis(name)
    assert isinstance(find_basis("gaussian"), GaussianBasis)
    own = ActivationBasis()
    assert find_basis(own) is own


def test_state_goes_to_a_new_optimizer_that_sees_no_data():
    model, other = tiny_opt(), tiny_opt()
    optimizer, _ = watched(model, "activation", lr=1e-2)
    for seed in range(3):
        optimizer.step(lm_loss(model, tokens(seed=seed)))
    fresh = head_feedback(other, rank=RANK, lr=1e-2)
    fresh.load_state_dict(optimizer.state_dict())
    for seed in range(3, 6):
        expected = optimizer.step(lm_loss(model, tokens(seed=seed)))
        assert fresh.step(lm_loss(other, tokens(seed=seed))) == expected


def test_what_was_seen_is_kept_in_files_that_are_checked(tmp_path):
    model = tiny_opt()
    optimizer, _ = watched(model, "activation")
    optimizer.set_factor_store(FactorFiles(tmp_path, writes=True))
    optimizer.refresh()
    (path,) = tmp_path.iterdir()
    assert path.name == "basis-0.safetensors"
    blind = head_feedback(tiny_opt(), rank=RANK)
    blind.set_factor_store(FactorFiles(tmp_path, writes=False))
    blind.refresh()
    for name, factor in factors_of(blind).items():
        assert torch.equal(factor, factors_of(optimizer)[name])
    sound = path.read_bytes()
    for place in (len(sound) - 3, len(sound) // 2, 20):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(RequestError, match=r"basis-0\.safetensors is damaged"):
            FactorFiles(tmp_path, writes=False).load("basis", 0)
    path.write_bytes(sound)
    assert len(load_file(path)) == len(optimizer.parameters)
    other = head_feedback(tiny_opt(), rank=RANK + 1)
    other.set_factor_store(FactorFiles(tmp_path, writes=False))
    with pytest.raises(RequestError, match="is not of the shape"):
        other.refresh()


def test_factors_of_rank_one_are_hashed_whatever_their_strides():
    factor = torch.arange(48.0).view(1, 48)
    assert content_hash(factor.T) == content_hash(factor.T.clone(memory_format=torch.contiguous_format))
