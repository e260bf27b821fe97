"""Which parameters move: patterns, layouts, ties, experts, and those that no forward pass meets."""

import numpy as np
import pytest
import torch
from cases import CASES, choose, effective_weights, every_method_fast_for_kinds
from tiny import (
    Regression,
    lm_loss,
    tiny_bert,
    tiny_deberta,
    tiny_falcon,
    tiny_gpt2,
    tiny_llama,
    tiny_moe,
    tiny_opt,
    tiny_qwen2,
    tiny_roberta,
    tokens,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tezo import RequestError, methods, tezo
from tezo.directions.random import DrawKey
from tezo.directions.targets import find_targets, never_called, select_targets

MODELS = {
    "opt": tiny_opt, "llama": tiny_llama, "qwen2": tiny_qwen2, "gpt2": tiny_gpt2, "roberta": tiny_roberta,
    "bert": tiny_bert, "moe": tiny_moe,
}  # fmt: skip
on_every_model = pytest.mark.parametrize(
    "model",
    [make(tied=tied) for make in MODELS.values() for tied in (False, True)],
    ids=[f"{name}-{kind}" for name in MODELS for kind in ("untied", "tied")],
)


OPTIONS_THAT_CANNOT_BE = [
    ("mezo", {"lr": "auto"}, r"method\.lr is 'auto'; it must be a number"),
    ("mezo", {"seed": "first"}, r"method\.seed is 'first'; it must be a whole number"),
    ("tezo", {"rank": 1.5}, r"method\.rank is 1\.5; it must be a whole number"),
    ("lozo", {"directions": "own"}, r"method\.directions is 'own'; it must be one of shared, per-example"),
    ("head_feedback", {"targets": 3}, r"method\.targets is 3; it must be a list of strings"),
    ("adam", {"betas": 0.9}, r"method\.betas is 0\.9; it must be a list of 2 values"),
]


@pytest.mark.parametrize(("name", "options", "said"), OPTIONS_THAT_CANNOT_BE)
def test_an_option_of_another_type_is_a_sentence(name, options, said):
    with pytest.raises(RequestError, match=said):
        getattr(methods, name)(nn.Linear(2, 2), **options)


def test_a_method_is_given_the_model_and_options_that_it_has():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(RequestError, match=r"the model is a generator; .*tezo\.mezo\(model\)"):
        methods.mezo(model.parameters())
    with pytest.raises(RequestError, match=r"method\.seeds: tezo\.mezo has no such option\. Did you mean 'seed'"):
        methods.mezo(model, seeds=1)
    assert methods.mezo(model=model, lr=2).settings["lr"].value == 2.0
    assert [target.name for target in methods.mezo(model, targets="1", lr="1e-3").targets] == names(model, "1")


@pytest.mark.parametrize("returned", [None, (torch.ones(()), 1), "1", {"loss": torch.ones(())}])
def test_a_closure_that_returns_no_loss_is_a_sentence(returned):
    optimizer = methods.mezo(nn.Linear(2, 2))
    with pytest.raises(RequestError, match=r"the closure returned \w+; have it return the loss"):
        optimizer.step(lambda: returned)
    with pytest.raises(RequestError, match="was given Tensor; write lambda:"):
        optimizer.step(torch.ones(()))


def test_numbers_of_torch_and_numpy_are_numbers():
    model = nn.Linear(2, 2)
    assert methods.mezo(model, lr=torch.tensor(0.5)).settings["lr"].value == 0.5
    assert methods.adam(model, betas=np.array([0.5, 0.75])).settings["betas"].value == (0.5, 0.75)


@pytest.mark.parametrize("rows", [None, {}, [1], lambda: 1])
def test_rows_to_look_at_are_given_by_a_function(rows):
    with pytest.raises(RequestError, match="set_rows: give a function of a step and of a number of rows"):
        methods.gauss_newton(nn.Linear(2, 2)).set_rows(rows)


def test_a_change_that_was_dropped_is_not_merged():
    model = nn.Linear(2, 2)
    optimizer = methods.lozo(model, lr=0.1)
    optimizer.step(lambda: model(torch.ones(2)).sum())
    weight = model.weight.clone()
    optimizer.close()
    with pytest.raises(RequestError, match="was closed, and its change dropped"):
        optimizer.merge()
    assert torch.equal(model.weight, weight)


def names(model: nn.Module, *patterns: str) -> list[str]:
    return [target.name for target in select_targets(model, patterns)]


@on_every_model
def test_all_is_every_parameter_once(model):
    targets = select_targets(model, ("all",))
    assert [target.name for target in targets] == [name for name, _ in model.named_parameters()]
    assert len({id(target.parameter) for target in targets}) == len(targets)
    owned = {(id(m), p.data_ptr()) for m in model.modules() for p in m.parameters(recurse=False)}
    assert {(id(s.module), t.parameter.data_ptr()) for t in targets for s in t.sites} == owned


@on_every_model
def test_all_linear_is_the_linear_layers_without_the_head(model):
    head = model.get_output_embeddings()
    tied_to_head = {id(head.weight)} if head is not None else set()
    expected = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module.weight) not in tied_to_head
    }
    assert {id(target.parameter) for target in select_targets(model)} == expected
    assert expected


def test_a_bare_word_is_a_dotted_part_of_the_name_and_a_star_matches_the_whole_of_it():
    model = tiny_opt()
    both = names(model, "q_proj")
    assert len(both) == 4 and all(".q_proj." in name for name in both)
    assert names(model, "self_attn.q_proj.weight") == [name for name in both if name.endswith("weight")]
    assert names(model, "*q_proj.bias") == [name for name in both if name.endswith("bias")]
    assert names(model, "*.layers.1.*q_proj*") == [name for name in both if ".layers.1." in name]
    with pytest.raises(RequestError):  # not a part of the name, but of a part
        names(model, "q_pro")


def test_patterns_apply_in_order_and_the_model_gives_the_order_of_the_result():
    model = tiny_opt()
    linear = names(model, "all-linear")
    assert names(model, "all-linear", "!v_proj") == [name for name in linear if "v_proj" not in name]
    assert names(model, "all-linear", "!layers.1", "*1.fc1.weight") == [
        name for name in linear if ".layers.1." not in name or name.endswith("1.fc1.weight")
    ]
    assert names(model, "!v_proj", "all-linear") == linear
    assert names(model, "fc2", "fc1") == names(model, "fc1", "fc2")
    assert names(model, "all-linear", "all-linear") == linear


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["q_porj"], r"'q_porj' matches no trainable parameter\. Did you mean 'q_proj'\?"),
        (["all-lineer"], r"'all-lineer' matches no .* Did you mean 'all-linear'\?"),
        (["all", "!*.lora.*"], r"'!\*\.lora\.\*' matches no trainable parameter\. (Did you mean|Known:)"),
        (["all", "!*"], r"\['all', '!\*'\] leaves no parameter to train; start with 'all-linear' or 'all'"),
        ([], r"leaves no parameter to train"),
    ],
)
def test_a_request_that_means_nothing_names_the_key_and_the_way_out(patterns, message):
    with pytest.raises(RequestError, match=r"method\.targets: .*" + message):
        select_targets(tiny_opt(), patterns)


def test_frozen_parameters_are_never_chosen():
    model = tiny_opt()
    model.model.decoder.layers[0].requires_grad_(False)
    assert not any("layers.0" in name for name in names(model, "all"))
    with pytest.raises(RequestError, match="matches no trainable parameter"):
        select_targets(model, ("layers.0",))


@pytest.mark.parametrize(
    ("make", "name", "kind", "layouts"),
    [
        (tiny_opt, "model.decoder.embed_tokens.weight", "embedding", ["embedding", "linear"]),
        (tiny_opt, "model.decoder.embed_positions.weight", "embedding", ["embedding"]),
        (tiny_opt, "model.decoder.layers.0.fc1.weight", "linear", ["linear"]),
        (tiny_opt, "model.decoder.layers.0.fc1.bias", "vector", ["bias"]),
        (tiny_opt, "model.decoder.final_layer_norm.weight", "vector", ["layer_norm"]),
        (tiny_opt, "model.decoder.final_layer_norm.bias", "vector", ["bias"]),
        (tiny_llama, "model.norm.weight", "vector", ["norm"]),
        (tiny_gpt2, "transformer.h.0.mlp.c_fc.weight", "linear", ["transposed"]),
        (tiny_gpt2, "transformer.wpe.weight", "embedding", ["embedding"]),
        (tiny_moe, "model.layers.0.mlp.experts.gate_up_proj", "other", [None]),
    ],
)
def test_how_each_parameter_is_used_is_known(make, name, kind, layouts):
    (target,) = [target for target in find_targets(make(tied=True)) if target.name == name]
    assert target.kind == kind
    assert [site.layout for site in target.sites] == layouts


def test_a_linear_layer_with_a_forward_of_its_own_is_not_hooked():
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubling(3, 4), nn.Linear(4, 4))
    own, plain = (t for t in find_targets(model) if t.is_matrix)
    assert not own.in_forward and plain.in_forward
    assert names(model, "all-linear") == ["1.weight"]


class Scaled(nn.Embedding):
    """As Gemma's: a factor after the lookup."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


@choose("tezo", "lozo", "subzo", "mezo")
def test_an_embedding_with_a_forward_of_its_own_is_perturbed_at_its_lookup(case):
    # At each sign the module must answer as it would with that weight stored.
    module = Scaled(7, 4, dtype=torch.float64)
    model, ids = nn.Sequential(module), torch.tensor([[0, 3], [6, 3]])
    before, seen = module.weight.detach().clone(), []

    def closure() -> Tensor:
        seen.append(model(ids))
        return seen[-1].sum()

    optimizer = case.build(model, lr=0.0, targets=("all",))
    optimizer.step(closure)
    z = torch.zeros_like(before)
    optimizer.perturbation.direction(optimizer.targets[0], DrawKey(0, 0), {}).add_to_(z, 1.0)
    for output, sign in zip(seen, (1, -1), strict=True):
        torch.testing.assert_close(output, (before + sign * 1e-3 * z)[ids] * 3.0)
    assert torch.equal(module.weight, before)


@choose("tezo", "mezo", "lozo", "subzo", "tezo-adam")
def test_experts_are_found_when_asked_for_and_all_of_them_move(case):
    model = tiny_moe()
    assert not any("experts" in name for name in names(model, "all-linear"))
    optimizer = case.build(model, targets=("all-linear", "experts"), lr=1e-2)
    experts = {n: m.target for n, m in optimizer.parameters.items() if "experts" in n}
    assert len(experts) == 4  # two a layer
    before = {name: target.parameter.detach().clone() for name, target in experts.items()}
    directions = {n: optimizer.perturbation.direction(t, DrawKey(0, 0), {}) for n, t in experts.items()}
    optimizer.step(lm_loss(model, tokens()))
    kappa = optimizer.last_step.projected_grads[0]
    for name, target in experts.items():
        change = target.parameter.detach() - before[name]
        assert change.ndim == 3 and (change.flatten(1).norm(dim=1) > 0).all(), "an expert stood still"
        if case.plain:
            expected = torch.zeros(target.matrix_shape, dtype=torch.float64)
            directions[name].add_to_(expected, -1e-2 * kappa)
            torch.testing.assert_close(change, expected.view_as(change), rtol=1e-8, atol=1e-10)


def test_a_scalar_parameter_is_a_vector_of_one():
    model = Regression()
    model.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    optimizer = CASES["mezo"].build(model, targets=("scale",))
    losses = [optimizer.step(lambda: (model.scale * model.y).square().mean()) for _ in range(50)]
    assert losses[-1] < 0.5 * losses[0]
    assert model.scale.shape == ()
    assert effective_weights(optimizer)["scale"].shape == (1,)


class Bare(nn.Module):
    """A model of no library: one matrix, used directly and not through a module."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(4, dtype=torch.float64))

    def forward(self) -> Tensor:
        return (self.matrix - 1).square().sum()


@choose("mezo", "lozo", "subzo", "tezo")
def test_a_parameter_used_outside_any_module_call_is_moved_in_place(case):
    model = Bare()
    optimizer = case.build(model, lr=1e-2, targets=("matrix",))
    before = model.matrix.detach().clone()
    optimizer.step(model)
    (kappa,) = optimizer.last_step.projected_grads
    assert kappa != 0
    expected = before.clone()
    optimizer.perturbation.direction(optimizer.targets[0], DrawKey(0, 0), {}).add_to_(expected, -1e-2 * kappa)
    torch.testing.assert_close(model.matrix.detach(), expected, rtol=1e-8, atol=1e-12)


@choose("mezo", "lozo", "subzo", "tezo")
def test_a_weight_that_attention_reads_past_its_module_is_moved_in_place(case):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert [t.name for t in find_targets(attention) if t.is_linear] == []
    optimizer = case.build(attention, lr=1e-2, rho=1e-3, targets=("out_proj",))
    optimizer.step(lambda: attention(x, x, x)[0].square().mean())
    assert optimizer.last_step.projected_grads != (0.0,)
    assert {optimizer.rank_and_way(t.name)[1] for t in optimizer.targets} == {"in place", "from copy"}


@every_method_fast_for_kinds
def test_a_linear_layer_with_a_forward_of_its_own_is_tuned_as_one(case):
    model = tiny_falcon()
    linear = {module for module in model.modules() if isinstance(module, nn.Linear)} - {model.lm_head}
    optimizer = case.build(model, lr=1e-2)
    assert {site.module for target in optimizer.targets for site in target.sites} == linear
    loss, before = lm_loss(model, tokens()), effective_weights(optimizer)
    optimizer.refresh()
    draw = optimizer.draw()
    probe, *_ = optimizer.measure(loss, rho=0.1)
    at = tiny_falcon()
    for name, (direction, *_) in draw.directions.items():
        direction.add_to_(at.get_parameter(name).data, 0.1)
    torch.testing.assert_close(probe.loss_plus, float(lm_loss(at, tokens())().detach()), rtol=1e-9, atol=0)
    for _ in range(2):
        optimizer.step(loss)
    assert all(not torch.equal(weight, before[name]) for name, weight in effective_weights(optimizer).items())
    tuned = loss()
    optimizer.merge()
    torch.testing.assert_close(loss(), tuned, rtol=1e-9, atol=0)


READ = {True: ["encoder.rel_embeddings"], False: ["embeddings.word_embeddings", "encoder.rel_embeddings"]}


@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "new"])
@every_method_fast_for_kinds
def test_a_weight_that_is_read_past_its_module_is_refused_or_moved_in_place_or_left_out(case, legacy):
    read = [f"deberta.{name}.weight" for name in READ[legacy]]
    model = tiny_deberta(legacy=legacy)
    loss, stored = lm_loss(model, tokens()), {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = case.build(model, targets=("all",), lr=1e-2)
    with pytest.raises(RequestError, match=f"{', '.join(read)} are read past their modules"):
        optimizer.step(loss)
    optimizer.close()
    assert all(torch.equal(weight, stored[name]) for name, weight in model.named_parameters())
    ways = {"in_forward": False}, {"targets": ("all", *(f"!{name}" for name in read))}
    for way in ways:
        model = tiny_deberta(legacy=legacy)
        optimizer = case.build(model, **({"targets": ("all",), "lr": 1e-2} | way))
        for step in range(2):
            optimizer.step(lm_loss(model, tokens(seed=step)))
        before = lm_loss(model, tokens())().detach()
        optimizer.merge()
        torch.testing.assert_close(lm_loss(model, tokens())().detach(), before, rtol=1e-9, atol=0)


def test_a_loss_that_reads_the_weights_itself_is_refused_and_their_dtypes_and_shapes_are_no_reads():
    model = tiny_llama()
    plain, weight = lm_loss(model, tokens()), model.model.layers[0].mlp.up_proj.weight
    optimizer = tezo(model, rank=3)

    def penalised() -> Tensor:
        return plain() + weight.square().sum()

    def harmless() -> Tensor:
        zeros = torch.zeros_like(weight, dtype=weight.dtype).expand_as(weight)
        return plain().to(weight) + zeros.sum() * weight.shape[0]

    with pytest.raises(RequestError, match=r"up_proj\.weight are read past their modules"):
        optimizer.step(penalised)
    assert optimizer.num_steps == 0
    optimizer.step(harmless)
    optimizer.step(penalised)  # looked at in the first step alone


def test_parameters_that_no_forward_pass_meets_are_reported():
    model = tiny_bert()
    targets = select_targets(model, ("all",))
    missed = never_called(targets, lambda: model.encoder(model.embeddings(tokens())))
    assert [target.name for target in missed] == ["pooler.dense.weight", "pooler.dense.bias"]
    assert never_called(targets, lambda: model(tokens())) == []


def test_a_tied_parameter_is_met_at_any_of_its_sites():
    model = tiny_llama(tied=True)
    targets = select_targets(model, ("embed_tokens",))
    assert never_called(targets, lambda: model.lm_head(torch.zeros(1, 16, dtype=torch.float64))) == []
    assert never_called(targets, lambda: model.model.norm(torch.zeros(1, 16, dtype=torch.float64))) == targets


def test_looking_for_them_leaves_no_hook_even_when_the_pass_fails():
    model = tiny_bert()
    with pytest.raises(ZeroDivisionError):
        never_called(select_targets(model, ("all",)), lambda: 1 / 0)
    assert not any(module._forward_hooks for module in model.modules())
