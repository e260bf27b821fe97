"""Steps that would train nothing, or noise, are refused: the model cannot see what is shown, or another moves it."""

import copy
import math
import pickle

import pytest
import torch
from cases import CASES, choose, effective_weights, every_method, every_method_fast_for_kinds
from tiny import Regression, lm_loss, tiny_llama, tiny_opt, tokens

from tezo import NonFiniteLossError, RequestError
from tezo import closure as tezo_closure
from tezo.directions import scratch
from tezo.methods import method
from tezo.methods.first_order import adam
from tezo.methods.tezo import tezo

BESIDE = [name for name in CASES if CASES[name].low_rank and name != "tezo-adam"]
"""Methods that keep what they train beside the weights."""


@every_method
@pytest.mark.parametrize("end", ["close", "merge"])
def test_a_closed_optimizer_takes_no_step(case, end):
    model = tiny_opt()
    optimizer = case.build(model, lr=1e-2)
    optimizer.step(lm_loss(model, tokens()))
    getattr(optimizer, end)()
    with pytest.raises(RequestError, match="closed, or merged"):
        optimizer.step(lm_loss(model, tokens()))
    assert optimizer.num_steps == 1


@every_method
def test_a_closure_that_cannot_see_what_is_shown_is_refused(case):
    model, other = tiny_opt(), tiny_opt(seed=1)
    optimizer = case.build(model, lr=1e-2)
    before = effective_weights(optimizer)
    with pytest.raises(
        RequestError, match=r"runs none of the modules that are tuned, such as model\.decoder\.layers\.0"
    ):
        optimizer.step(lm_loss(other, tokens()))
    torch.testing.assert_close(effective_weights(optimizer), before, rtol=0, atol=0)
    assert optimizer.num_steps == 0


@choose("tezo", "mezo")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_half_precision_is_refused(case, dtype):
    model = tiny_opt(torch.float32)
    optimizer = case.build(model, lr=1e-2)
    before = effective_weights(optimizer)
    loss = lm_loss(model, tokens())
    with pytest.raises(RequestError, match=r"loss is torch\.b?float16, too coarse.*logits\.float\(\)"):
        optimizer.step(lambda: loss().to(dtype))
    torch.testing.assert_close(effective_weights(optimizer), before, rtol=0, atol=0)
    optimizer.step(lambda: loss().item())


@every_method_fast_for_kinds
def test_a_closure_in_inference_mode_gives_the_same_steps(case):
    trained = []
    vars(scratch._kept).clear()
    for mode in (torch.inference_mode, torch.no_grad):  # what the first keeps, the second may use
        model = tiny_opt()
        optimizer = case.build(model, lr=1e-3)
        loss = mode()(lm_loss(model, tokens()))
        for _ in range(2):
            optimizer.step(loss)
        trained.append(effective_weights(optimizer))
        optimizer.close()
    torch.testing.assert_close(*trained, rtol=0, atol=0)


@every_method
def test_layers_that_are_shown_no_tokens_are_passed_by(case):
    model, without = Regression(), Regression()
    optimizer, expected = case.build(model, lr=1e-3), case.build(without, lr=1e-3)
    optimizer.step(lambda: model.loss() + model.layer(model.x[:0]).sum())
    expected.step(without.loss)
    assert optimizer.last_step.projected_grads == expected.last_step.projected_grads != (0.0,)


@choose(*BESIDE, "tezo-adam")
def test_a_second_optimizer_does_not_lose_what_the_first_trained(case):
    model = tiny_opt()
    first = case.build(model, lr=1e-2)
    case.build(model).close()  # nothing is trained yet
    first.step(lm_loss(model, tokens()))
    trained = lm_loss(model, tokens())().item()
    if case.name in BESIDE:  # not in the weights
        with pytest.raises(RequestError, match=r"k_proj\.weight has been tuned by another optimizer"):
            case.build(model)
        assert lm_loss(model, tokens())().item() == trained
    first.merge()
    assert lm_loss(model, tokens())().item() == pytest.approx(trained, rel=1e-10)
    case.build(model).step(lm_loss(model, tokens()))


@choose("tezo", "lozo-m")
def test_a_model_that_was_compiled_and_run_before_is_refused(case):
    torch._dynamo.reset()
    model = Regression()
    compiled = torch.compile(model.layer, backend="eager")

    def loss():
        return (compiled(model.x) - model.y).square().mean()

    with torch.no_grad():
        loss()  # hooks that are made later are not in what was compiled
    optimizer = case.build(model)
    optimizer.step(loss)  # the first step runs what is not compiled
    with pytest.raises(RequestError, match="a compiled one only after"):
        optimizer.step(loss)
    optimizer.close()
    torch._dynamo.reset()
    optimizer = case.build(model)
    optimizer.step(loss)
    assert optimizer.last_step.projected_grads != (0.0,)
    torch._dynamo.reset()


def test_what_was_compiled_before_follows_dense_noise_all_the_same():
    found = []
    for compiled in (torch.compile, lambda layer, **_: layer):
        torch._dynamo.reset()
        model = Regression()
        layer = compiled(model.layer, backend="eager")

        def loss(model=model, layer=layer):
            return (layer(model.x) - model.y).square().mean()

        with torch.no_grad():
            loss()
        optimizer = CASES["mezo"].build(model)
        optimizer.step(loss)
        found.append(optimizer.last_step.projected_grads)
    torch._dynamo.reset()
    assert found[0] == pytest.approx(found[1]) and found[0] != (0.0,)


@every_method
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_difference_of_losses_that_overflows_leaves_everything_as_before(case, sign):
    model = tiny_opt()
    optimizer, turns = case.build(model, lr=1e-2), []
    optimizer.step(lm_loss(model, tokens()))
    before = {key: value.clone() for key, value in optimizer.resumable_state().items()}
    stored = {name: weight.clone() for name, weight in model.named_parameters()}

    def huge() -> float:
        turns.append(1)
        lm_loss(model, tokens())()
        return sign * 1e308 * (-1) ** len(turns)

    with pytest.raises(NonFiniteLossError, match=r"the loss is -?inf at step 1"):
        optimizer.step(huge)
    assert optimizer.num_steps == 1
    for key, value in optimizer.resumable_state().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, stored[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["tezo", "mezo", "adam"])
@pytest.mark.parametrize("lr", [math.nan, math.inf, -1e-3])
def test_a_rate_that_is_set_later_is_checked_as_the_first(name, lr):
    model = tiny_opt()
    optimizer = method(name).build(model, **({"rank": 2} if name == "tezo" else {}))
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(RequestError, match=r"method\.lr is (nan|inf|-0\.001)"):
        optimizer.step(lm_loss(model, tokens()))
    assert optimizer.num_steps == 0


def test_a_step_within_the_closure_of_a_step_is_refused_and_the_next_is_taken():
    model = tiny_opt()
    optimizer, loss = tezo(model, rank=2, lr=1e-3), lm_loss(model, tokens())
    with pytest.raises(RequestError, match="called by the closure of a step"):
        optimizer.step(lambda: optimizer.step(loss))
    assert optimizer.num_steps == 0
    alone = tezo(tiny_opt(), rank=2, lr=1e-3)
    assert optimizer.step(loss) == alone.step(lm_loss(alone.model, tokens()))


def with_first_order(model, case):
    return adam(model, lr=1e-2) if case is None else case.build(model, lr=1e-2)


bound = pytest.mark.parametrize("case", [*CASES.values(), None], ids=[*CASES, "adam"])


@bound
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_an_optimizer_is_not_copied_apart_from_its_model(case, copied):
    optimizer = with_first_order(tiny_opt(), case)
    with pytest.raises(RequestError, match="bound to its model"):
        copied(optimizer)


@bound
@pytest.mark.parametrize("change", [torch.nn.Module.double, torch.nn.Module.bfloat16])
def test_a_model_of_another_dtype_than_its_optimizer_was_made_for_is_refused(case, change):
    model = tiny_opt(torch.float32)
    optimizer = with_first_order(model, case)
    optimizer.step(lm_loss(model, tokens()))
    change(model)
    with pytest.raises(RequestError, match=r"was torch\.float32 on cpu when the optimizer was made"):
        optimizer.step(lm_loss(model, tokens()))
    assert optimizer.num_steps == 1


@every_method_fast_for_kinds
def test_steps_in_and_out_of_inference_mode_are_the_same_steps(case):
    taken = []
    for inside in (False, True):
        model = tiny_opt(torch.float32)
        losses = []
        with torch.inference_mode(inside):
            optimizer = case.build(model, lr=1e-2)
        for step in range(4):
            with torch.inference_mode(inside and step % 2 == 0):
                losses.append(optimizer.step(lm_loss(model, tokens(seed=step))))
        taken.append(losses)
    assert taken[0] == taken[1]
    with torch.inference_mode():
        model = tiny_opt(torch.float32)
        with pytest.raises(RequestError, match=r"made under torch\.inference_mode"):
            case.build(model, lr=1e-2)


def test_columns_of_zeros_are_carried_over_as_nothing():
    ids = tokens()
    for name in ("tezo-m", "tezo-cadam", "lozo-m"):
        model = tiny_llama()
        closure = tezo_closure(model, {"input_ids": ids, "labels": ids})  # what foretells texts is in one layer alone
        optimizer = method(name).build(model, basis="errors", rank=4, lazy_update_interval=2)
        for _ in range(3):
            optimizer.step(closure)
        assert all(value.isfinite().all() for value in optimizer.resumable_state().values())


@pytest.mark.parametrize("name", ["mezo-norm", "mezo-adam", "tezo-adam", "head-feedback", "adam"])
def test_a_smoothing_term_of_zero_which_divides_zero_by_zero_is_refused(name):
    with pytest.raises(RequestError, match=r"method.eps is 0.0; it must be finite and positive"):
        method(name).build(tiny_opt(), eps=0.0)


def test_an_optimizer_that_was_merged_or_closed_takes_no_state():
    for end in ("merge", "close"):
        model = tiny_opt()
        optimizer = tezo(model, lr=1e-2)
        optimizer.step(lm_loss(model, tokens()))
        state = copy.deepcopy(optimizer.state_dict())
        getattr(optimizer, end)()
        with torch.no_grad():
            expected = lm_loss(model, tokens())()
            with pytest.raises(RequestError, match="was closed, or merged"):
                optimizer.load_state_dict(state)
            assert lm_loss(model, tokens())() == expected


def test_a_scale_that_is_none_is_refused_when_it_is_set():
    optimizer = tezo(tiny_opt())
    with pytest.raises(RequestError, match=r"method.rho is 0; it must be positive"):
        optimizer.set_rho(0)


@pytest.mark.parametrize("basis", ["activation", "errors"])
def test_inputs_that_are_not_finite_end_the_step_as_a_loss_does(basis):
    model, ids = tiny_llama(), tokens()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(math.nan)
    optimizer = method("head-feedback").build(model, basis=basis, rank=4)
    with pytest.raises(NonFiniteLossError, match="the loss is nan at step 0"):
        optimizer.step(tezo_closure(model, {"input_ids": ids, "labels": ids}))
