"""Several models in one forward pass give the losses that they give one after another."""

import math
from dataclasses import dataclass

import pytest
import torch
import transformers
from cases import CASES, INTERVAL, Case, choose, effective_weights, every_method_fast_for_kinds
from tiny import (
    VOCAB,
    Regression,
    lm_loss,
    tiny_gpt2,
    tiny_llama,
    tiny_moe,
    tiny_opt,
    tiny_roberta,
    tokens,
)
from torch import Tensor, nn

from tezo.directions import random
from tezo.forward.blocks import Blocks, NotInBlocksError
from tezo.optim.closures import Losses
from tezo.optim.estimators.two_point import copies_of_a_pass

STEPS = INTERVAL + 2  # past a refresh
FAMILIES = {"opt": tiny_opt, "llama": tiny_llama, "gpt2": tiny_gpt2, "roberta": tiny_roberta}


@dataclass
class Repeated(Losses):
    """The loss of a language model on ids, for as many models as share a pass."""

    model: nn.Module
    ids: Tensor
    passes: list[int]
    tokens: int = 30

    def __call__(self) -> Tensor:
        self.passes.append(1)
        return lm_loss(self.model, self.ids)()

    def losses(self, copies: int) -> Tensor:
        self.passes.append(copies)
        shift = 0 if isinstance(self.model, transformers.RobertaForMaskedLM) else 1
        ids = self.ids.repeat(copies, 1)
        logits = self.model(input_ids=ids).logits
        logits = logits[:, : logits.shape[1] - shift]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, shift:], reduction="none")
        return losses.view(copies, -1).mean(1)


def follow(case: Case, model: nn.Module, together: bool, **options) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """(both losses of every step, the weights after the last, models in each pass)."""
    optimizer = case.build(model, lr=1e-3, **options)
    optimizer.unperturbed_loss = math.inf
    losses, passes = [], []
    for step in range(STEPS):
        closure = Repeated(model, tokens(seed=step), passes)
        optimizer.step(closure if together else lambda closure=closure: closure())
        losses += [(probe.loss_plus, probe.loss_minus) for probe in optimizer.last_step.probes]
    return torch.tensor(losses, dtype=torch.float64), effective_weights(optimizer), passes


def assert_same(case: Case, make, expected: list[int], **options) -> None:
    apart, weights_apart, passes_apart = follow(case, make(), False, **options)
    together, weights, passes = follow(case, make(), True, **options)
    assert set(passes_apart) == {1} and passes == expected
    assert (apart[:, 0] - apart[:, 1]).abs().min() > 1e-8, "the perturbation does not reach the loss"
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights, weights_apart, rtol=1e-8, atol=1e-10)


@every_method_fast_for_kinds
def test_both_signs_share_a_pass_and_the_trajectory_is_the_same(case):
    if "num_directions" in case.options:  # the loss itself, and then all points, which have one sign
        assert_same(case, tiny_opt, [1, case.passes - 1] * STEPS, targets=("all",))
        return
    further = [1] * (case.passes - 2)  # evaluations at other points than the two signs have passes of their own
    assert_same(case, tiny_opt, [2, *further] * STEPS, targets=("all",))


@pytest.mark.thinned
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
@choose("mezo", "lozo", "subzo", "tezo")
def test_they_do_on_every_architecture(case, family, tied):
    # two rows are below the rank; the head's bias belongs to the head and to its last layer
    targets = ("all", "!token_type_embeddings", "!lm_head.bias") if family == "roberta" else ("all",)
    assert_same(case, lambda: FAMILIES[family](tied=tied), [2] * STEPS, targets=targets)


@choose("mezo", "lozo", "subzo", "tezo")
def test_they_do_on_transposed_layers(case):
    assert_same(case, tiny_gpt2, [2] * STEPS)


@choose("mezo", "lozo", "subzo", "tezo")
def test_several_directions_share_passes_too(case):
    assert_same(case, tiny_opt, [6] * STEPS, num_directions=3, targets=("all",))


@choose("mezo", "tezo")
def test_a_module_that_does_not_see_the_rows_is_found_out_once_and_passes_are_apart_from_then_on(case):
    # GPT-2 looks one row of positions up for the whole batch
    first_and_rest = [2] + [1] * 2 * STEPS
    assert_same(case, tiny_gpt2, first_and_rest, targets=("all",))


@choose("mezo", "tezo")
def test_what_is_moved_in_place_is_never_shown_twice_in_a_pass(case):
    assert_same(case, tiny_moe, [1] * 2 * STEPS, targets=("all-linear", "experts"))
    assert_same(case, tiny_opt, [1] * 2 * STEPS, in_forward=False)


class Experts(nn.Module):
    """A layer whose linear modules are each shown the tokens that choose them, those of all rows together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.router = nn.Embedding(VOCAB, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.double()

    def forward(self, input_ids: Tensor) -> Tensor:
        x_TD = self.embedding(input_ids).view(-1, 16)
        weights_TE, chosen_TE = self.router(x_TD).softmax(-1).topk(2, -1)
        out_TD = x_TD.clone()
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_TE == number)
            out_TD = out_TD.index_add(0, token, expert(x_TD[token]) * weights_TE[token, slot, None])
        return out_TD.view(*input_ids.shape, -1)


def tiny_t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    torch.manual_seed(0)
    return transformers.T5EncoderModel(config).double().eval()


def tiny_mpnet() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    return transformers.MPNetModel(transformers.MPNetConfig(vocab_size=VOCAB, **sizes)).double().eval()


@dataclass
class Outputs(Repeated):
    """A loss of whatever comes out."""

    def __call__(self) -> Tensor:
        return self.losses(1)[0]

    def losses(self, copies: int) -> Tensor:
        self.passes.append(copies)
        found = self.model(input_ids=self.ids.repeat(copies, 1))
        hidden = found if isinstance(found, Tensor) else found.last_hidden_state
        return hidden.exp().view(copies, -1).mean(1)


@pytest.mark.parametrize(
    ("make", "targets", "rows", "length"),
    [
        (Experts, ("experts*",), 1, 8),
        (Experts, ("experts*",), 2, 8),
        *((make, ("*relative_attention_bias*",), 2, length) for make in (tiny_t5, tiny_mpnet) for length in (4, 7, 8)),
        (tiny_t5, ("all-linear",), 2, 8),
    ],
)
@choose("mezo", "lozo", "tezo")
def test_what_modules_see_beside_rows_is_never_cut_into_blocks(case, make, targets, rows, length):
    model, passes = make(), []
    optimizer = case.build(model, targets=targets)
    closure = Outputs(model, tokens(rows, length), passes)
    (together,) = optimizer.measure(closure, 1e-2)
    (apart,) = optimizer.measure(lambda: closure(), 1e-2)
    assert passes[0] == 2 and abs(apart.projected_grad) > 1e-6
    assert together.projected_grad == pytest.approx(apart.projected_grad, rel=1e-8)


@pytest.mark.parametrize(
    ("tokens", "directions", "dense", "copies"),
    [
        (32, 1, False, 2),
        (32, 4, False, 8),
        (200, 4, False, 4),
        (512, 4, False, 2),
        (513, 4, False, 1),
        (5000, 1, False, 1),
        (1024, 1, True, 2),
        (4096, 3, True, 2),
        (4097, 3, True, 1),
    ],
)
def test_how_many_models_share_a_pass(tokens, directions, dense, copies):
    closure = Repeated(nn.Identity(), torch.zeros(1), [], tokens)
    assert isinstance(closure, Losses)
    assert copies_of_a_pass(closure, 2 * directions, dense=dense) == copies
    assert copies_of_a_pass(lambda: 0.0, 2 * directions, dense=dense) == 1


def test_rows_that_do_not_fall_into_blocks_are_refused():
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(blocks.split(x, 2, 1).shape)
            with pytest.raises(NotInBlocksError):
                blocks.split(x[:2], 2, 1)  # two rows of the pass's four: not its batch
            with pytest.raises(NotInBlocksError):
                blocks.split(x[:3], 2, 1)
            return x

    model = Inner()
    seen: list[torch.Size] = []
    blocks = Blocks(model)
    model(torch.zeros(4, 5, 3))
    assert seen == [(2, 10, 3)] and blocks.rows is None
    blocks.close()
    assert not model._forward_hooks and not model._forward_pre_hooks


@choose("mezo", "tezo", "lozo")
def test_a_shift_below_the_spacing_of_a_bfloat16_norm_weight_reaches_the_loss(case):
    # Weights near 1 are 2^-7 or 2^-8 apart; in place a shift of 1e-3 is rounded away.
    model = tiny_opt(torch.bfloat16)
    (norm,) = [m for n, m in model.named_modules() if n.endswith("decoder.final_layer_norm")]
    with torch.no_grad():
        norm.weight.fill_(1.0)
    outputs: list[Tensor] = []
    optimizer = case.build(model, lr=0.0, rho=1e-3, targets=("decoder.final_layer_norm.weight",))
    assert len(optimizer.parameters) == 1

    def closure() -> float:
        outputs.append(norm(torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()).float())
        return 0.0

    optimizer.step(closure)
    assert not torch.equal(outputs[0], outputs[1])
    assert (norm.weight == 1).all()


def test_each_model_of_a_pass_draws_dense_noise_once_for_both_signs():
    model = Regression()
    optimizer = CASES["mezo"].build(model)
    optimizer.unperturbed_loss = math.inf
    calls: list[str] = []
    draw = random.fill_normal_

    def counted(*args, role: str, **key) -> Tensor:
        calls.append(role)
        return draw(*args, role=role, **key)

    class Closure(Losses):
        tokens = 64

        def __call__(self) -> Tensor:
            raise AssertionError("both signs fit one pass")

        def losses(self, copies: int) -> Tensor:
            out = model.layer(model.x.repeat(copies, 1)) - model.y.repeat(copies, 1)
            return out.square().view(copies, -1).mean(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tezo.directions.spaces.fill_normal_", counted)
        optimizer.step(Closure())
    assert len(calls) == 2, "once for the evaluations, once for the update"
