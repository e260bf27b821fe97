"""A feedback step: what the readout says of the last hidden states, handed to the layers that write them."""

import math
import weakref

import pytest
import torch
from cases import effective_weight
from folders import words_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import Regression, lm_loss, tiny_bert, tiny_gpt2, tiny_llama, tiny_moe, tiny_opt, tiny_roberta, tokens
from torch import Tensor, nn

from tezo import export_adapter
from tezo.directions.random import DrawKey
from tezo.directions.targets import select_targets
from tezo.methods.head_feedback import head_feedback
from tezo.optim.estimators.estimate import StepRecord
from tezo.optim.estimators.feedback import last_errors, last_hidden, residual_writers
from tezo.runs.files import FactorFiles
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.objective import Encoded

RANK = 4
LR, SCALE = 1e-2, 0.5
WRITERS = {
    tiny_opt: ("out_proj", "fc2"),
    tiny_llama: ("o_proj", "down_proj"),
    tiny_moe: ("o_proj",),
    tiny_gpt2: ("c_proj",),
    tiny_roberta: ("output.dense",),
    tiny_bert: ("output.dense",),
}
"""Layers whose output is added to the residual stream, by the last parts of their names."""


def closure_of(model: nn.Module, seed: int = 1, *, batch: int = 3):
    ids = tokens(batch, seed=seed)
    if hasattr(model, "lm_head") or hasattr(model, "peft_config"):
        return lm_loss(model, ids)
    return lambda: model(input_ids=ids).last_hidden_state.mean(1).cos().square().sum()


def built(model: nn.Module, **options):
    return head_feedback(model, **{"rank": RANK, "lr": LR, "feedback_scale": SCALE, **options})


def true_errors(base: nn.Module, closure) -> Tensor:
    """dL/dh by backpropagation with a graph of everything."""
    found: list[Tensor] = []
    handle = base.register_forward_hook(lambda _, __, out: found.append(out.last_hidden_state))
    loss = closure()
    handle.remove()
    return torch.autograd.grad(loss, found[0])[0]


@pytest.mark.parametrize("make", WRITERS)
def test_the_error_is_the_gradient_at_the_last_hidden_states_and_no_layer_records_a_graph(make):
    model = make()
    closure = closure_of(model)
    base, (hidden,) = last_hidden(model, closure)
    outputs: list[Tensor] = []
    handles = [m.register_forward_hook(lambda _, __, out: outputs.append(out)) for m in base.modules()]
    loss, ((_, e),) = last_errors(base, closure, {})
    for handle in handles:
        handle.remove()
    assert len(outputs) > 5 and not any(isinstance(out, Tensor) and out.requires_grad for out in outputs)
    assert e.shape == hidden.shape and torch.is_grad_enabled()
    torch.testing.assert_close(loss, closure().detach())
    torch.testing.assert_close(e, true_errors(base, closure))


class Saved:
    """A tensor that a graph has stored for its backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_of_a_batch_in_parts_the_graph_of_one_part_exists_at_a_time():
    model = tiny_opt()
    objective = CausalObjective(words_tokenizer(), torch.device("cpu"), 100, ())
    texts = [*tokens(8, 4, seed=1).tolist(), *tokens(2, 20, seed=2).tolist()]
    rows = [Encoded((tuple(ids),), (len(ids) - 2,), Example("", "", (), None, "a row")) for ids in texts]
    closure = objective.closure(model, objective.batches(rows))
    parts = len(closure.batches)
    assert parts > 1
    base, _ = last_hidden(model, closure)
    outputs: list[Tensor] = []
    handle = base.register_forward_hook(lambda _, __, out: outputs.append(out.last_hidden_state))
    expected_loss = closure()
    expected = torch.autograd.grad(expected_loss, outputs)
    handle.remove()
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()
    stored, at_calls = [0], []

    def pack(tensor: Tensor) -> Saved:
        stored[0] += 1
        alive.add(saved := Saved(tensor))
        return saved

    base.register_forward_pre_hook(lambda *_: at_calls.append(len(alive)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss, found = last_errors(base, closure, {})
    assert stored[0] > parts and at_calls == [0] * parts
    torch.testing.assert_close(loss, expected_loss.detach())
    torch.testing.assert_close([e for _, e in found], list(expected))


@pytest.mark.parametrize("make", WRITERS)
def test_layers_that_write_the_residual_stream_are_told_from_the_others(make):
    model = make()
    targets = select_targets(model, ("all-linear",))
    _, writers = residual_writers(model, targets, closure_of(model, batch=16), seed=0)
    ends = tuple(f".{name}.weight" for name in WRITERS[make])
    assert [t.name for t in writers] == [t.name for t in targets if t.name.endswith(ends)]


def test_a_phase_that_tells_no_layers_apart_has_those_of_the_start(tmp_path):
    def grown(*, checked: bool) -> list[str]:
        model = tiny_roberta()
        optimizer, closure, store = built(model), closure_of(model, batch=16), FactorFiles(tmp_path, writes=True)
        optimizer.set_factor_store(store)
        if checked:
            optimizer.check_rule("feedback", closure)
        with torch.no_grad():  # the outputs of attention drown what they are added to, and differ by a constant alone
            for name, weight in model.named_parameters():
                weight.mul_(1e12 if name.endswith("dense.weight") else 0.0 if name.endswith("dense.bias") else 1.0)
        optimizer.step(closure, rule="feedback")
        return list(store.load("feedback", 0).tensors)

    assert sorted({name.split(".", 4)[-1] for name in grown(checked=True)}) == [
        "attention.output.dense.weight",
        "output.dense.weight",
    ]
    with pytest.raises(RequestError, match="found no tuned layer"):
        grown(checked=False)


def without_norm() -> nn.Module:
    """OPT whose last layer's fc2 is added to the last hidden states, with nothing after it."""
    model = tiny_opt()
    model.model.decoder.final_layer_norm = None
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_the_last_layer_the_gradient_is_the_true_one(dtype, tmp_path):
    model = without_norm().to(dtype)
    closure, name = closure_of(model, batch=16), "model.decoder.layers.1.fc2.weight"
    optimizer = built(model)
    optimizer.set_factor_store(FactorFiles(tmp_path, writes=True))
    loss = closure()
    (whole,) = torch.autograd.grad(loss, model.get_parameter(name))
    assert optimizer.step(closure, rule="feedback") == pytest.approx(float(loss.detach()))
    found = FactorFiles(tmp_path, writes=False).load("feedback", 0).tensors
    torch.testing.assert_close(found[name], whole @ optimizer.parameters[name].change.v_NR, rtol=1e-4, atol=1e-6)
    assert set(found) == {n for n in optimizer.parameters if n.endswith(("out_proj.weight", "fc2.weight"))}


def test_steps_are_those_of_torchs_adam_on_the_coefficients(tmp_path):
    model = tiny_opt()
    optimizer, store = built(model, weight_decay=0.1), FactorFiles(tmp_path, writes=True)
    optimizer.set_factor_store(store)
    for step in range(4):
        optimizer.step(closure_of(model, seed=step, batch=16), rule="feedback")
    for name, g in store.load("feedback", 0).tensors.items():
        a_MR = nn.Parameter(torch.zeros_like(g))
        reference = torch.optim.AdamW([a_MR], lr=LR * SCALE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        for step in range(4):
            a_MR.grad = store.load("feedback", step).tensors[name]
            reference.step()
        torch.testing.assert_close(optimizer.parameters[name].change.coefficient, a_MR.detach())
    others = [m for name, m in optimizer.parameters.items() if name not in store.load("feedback", 0).tensors]
    assert others and not any(m.trained() for m in others)


def test_a_later_phase_begins_like_the_first(tmp_path):
    model = tiny_opt()
    optimizer, store = built(model), FactorFiles(tmp_path, writes=True)
    optimizer.set_factor_store(store)
    walk(optimizer, model, "fffz")
    before = {name: moving.change.coefficient.clone() for name, moving in optimizer.parameters.items()}
    walk(optimizer, model, "f", 4)
    for name, g in store.load("feedback", 4).tensors.items():
        first = before[name] - LR * SCALE * g / (g.abs() + 1e-8)
        torch.testing.assert_close(optimizer.parameters[name].change.coefficient, first)


def test_new_factors_in_a_phase_take_the_moments_of_zeroth_order_steps_along():
    model = tiny_opt()
    optimizer = built(model, lazy_update_interval=3)
    walk(optimizer, model, "zzz")
    before = {name: state["exp_avg"].clone() for name, state in optimizer.moments["two-point"].items()}
    walk(optimizer, model, "f", 3)
    for name, state in optimizer.moments["two-point"].items():
        direction = optimizer.perturbation.direction(optimizer.parameters[name].target, DrawKey(0, 3), {})
        torch.testing.assert_close(state["exp_avg"], direction.carry_over(before[name]))
        assert not torch.allclose(state["exp_avg"], before[name])


@pytest.mark.parametrize("make", WRITERS)
def test_it_lowers_the_loss_and_zeroth_order_steps_go_on_from_there(make):
    model = make()
    closure = closure_of(model, batch=16)
    optimizer = built(model, feedback_scale=0.1)
    losses = [optimizer.step(closure, rule="feedback") for _ in range(10)]
    assert losses[-1] < losses[0]
    after = float(closure().detach())
    # LOZO-Adam's first step measures around the point where feedback ended
    assert optimizer.step(closure) == pytest.approx(after, rel=1e-3)


def test_every_call_of_the_closure_is_counted_and_a_phase_ends_with_a_step_of_another_kind():
    model = tiny_opt()
    optimizer, calls = built(model, basis="gaussian", num_directions=2), []
    inner = closure_of(model, batch=16)

    def closure() -> Tensor:
        calls.append(1)
        return inner()

    for kind in "ffzfffzz":
        optimizer.step(closure, rule="feedback" if kind == "f" else "two-point")
        assert optimizer.num_forward_passes == len(calls)
    assert len(calls) == 5 + 2 * 2 + 3 * 4
    assert not any(key.endswith("exp_avg") for key in optimizer.resumable_state() if key.startswith("feedback/"))


def walk(optimizer, model, kinds: str, start: int = 0) -> list[StepRecord]:
    records = []
    for step, kind in enumerate(kinds, start):
        closure = closure_of(model, seed=step, batch=16)
        optimizer.step(closure, rule="feedback" if kind == "f" else "two-point")
        records.append(optimizer.last_step)
    return records


@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_it_goes_on_from_its_state_to_the_bit(stop):
    kinds, models = "ffzzfffz", [tiny_opt(), tiny_opt()]
    whole, second = (built(model, lazy_update_interval=5, frozen_rank=6) for model in models)
    walk(whole, models[0], kinds)
    first = tiny_opt()
    begun = built(first, lazy_update_interval=5, frozen_rank=6)
    records = walk(begun, first, kinds[:stop])
    second.load_resumable_state({k: v.clone() for k, v in begun.resumable_state().items()}, records)
    walk(second, models[1], kinds[stop:], stop)
    for name in whole.parameters:
        assert torch.equal(effective_weight(second, name), effective_weight(whole, name))
    assert second.num_forward_passes == whole.num_forward_passes


def test_it_is_taken_again_from_what_was_kept_and_not_without(tmp_path):
    models = [tiny_opt(), tiny_opt()]
    whole, again = (built(model) for model in models)
    whole.set_factor_store(FactorFiles(tmp_path, writes=True))
    again.set_factor_store(FactorFiles(tmp_path, writes=False))
    records = []
    for step, kind in enumerate("ffzf"):
        walk(whole, models[0], kind, step)
        records.append(whole.last_step)
    assert [len(record.probes) for record in records] == [0, 0, 1, 0]
    for record in records[:3]:
        again.replay(record)
    (tmp_path / "feedback-3.safetensors").rename(tmp_path / "aside")
    with pytest.raises(RequestError, match=r"feedback step 3 .* missing"):
        again.replay(records[3])
    with pytest.raises(RequestError, match="record is of step 1"):
        again.replay(records[1])
    (tmp_path / "aside").rename(tmp_path / "feedback-3.safetensors")
    again.replay(records[3])
    for name in whole.parameters:
        assert torch.equal(effective_weight(again, name), effective_weight(whole, name))
    assert again.num_forward_passes == whole.num_forward_passes


def test_the_torch_interface_takes_its_state_along():
    models = [tiny_opt(), tiny_opt()]
    whole, second = (built(model) for model in models)
    walk(whole, models[0], "ff")
    second.load_state_dict(whole.state_dict())
    for optimizer, model in zip((whole, second), models, strict=True):
        walk(optimizer, model, "fz", 2)
    for name in whole.parameters:
        assert torch.equal(effective_weight(second, name), effective_weight(whole, name))


@pytest.mark.slow
def test_a_compiled_model_takes_the_steps_of_a_plain_one():
    losses = []
    for compiled in (False, True):
        model, ids = tiny_opt(torch.float32), tokens(16)
        optimizer = built(model, feedback_scale=0.1)
        called = torch.compile(model, backend="eager") if compiled else model
        closure = lm_loss(called, ids)
        losses.append([optimizer.step(closure, rule="feedback") for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("make", [tiny_opt, tiny_gpt2, tiny_bert])
def test_the_result_is_an_exact_adapter(make, tmp_path):
    model = make(torch.float32)
    optimizer = built(model)
    walk(optimizer, model, "fzf")
    ids = tokens()
    with torch.no_grad():
        expected = model(input_ids=ids)[0]
        export_adapter(optimizer, tmp_path)
        loaded = PeftModel.from_pretrained(make(torch.float32), tmp_path)
        torch.testing.assert_close(loaded(input_ids=ids)[0], expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_peft_takes_feedback_where_it_ends_in_the_residual_stream():
    model = get_peft_model(tiny_opt(), LoraConfig(r=2, init_lora_weights=False, target_modules=["fc2", "q_proj"]))
    optimizer = built(model, rank=2, targets=["all"], basis="gaussian")
    before = {name: p.clone() for name, p in model.named_parameters()}
    walk(optimizer, model, "ff")
    moved = [name for name, moving in optimizer.parameters.items() if moving.state()]
    assert moved and all("fc2.lora_B" in name for name in moved)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_cannot_be_done_is_said_and_nothing_moves():
    regression = Regression()
    with pytest.raises(RequestError, match="last hidden states, and no part of Regression does"):
        built(regression, rank=2, basis="gaussian").step(regression.loss, rule="feedback")
    model = tiny_opt()
    optimizer = built(model)
    for closure in (lambda: closure_of(model)().item(), lambda: closure_of(model)().detach()):
        with pytest.raises(RequestError, match="a tensor and differentiable"):
            optimizer.step(closure, rule="feedback")
    with pytest.raises(NonFiniteLossError):
        optimizer.step(lambda: closure_of(model)() * math.nan, rule="feedback")
    assert optimizer.num_steps == optimizer.num_forward_passes == 0
    assert not any(moving.trained() for moving in optimizer.parameters.values())
    optimizer.close()
    with pytest.raises(RequestError, match="no tuned layer"):
        built(model, targets=["q_proj"]).step(closure_of(model), rule="feedback")
    with pytest.raises(RequestError, match=r"method\.feedback_scale is -1"):
        built(tiny_opt(), feedback_scale=-1.0)
    with pytest.raises(RequestError, match="with 0 directions"):
        built(tiny_opt()).replay(StepRecord(1, 0.0, LR, rule="feedback"))


def test_the_losses_of_rows_have_the_feedback_of_their_mean():
    ids, changes = tokens(4), []
    for rows in (False, True):
        model = tiny_llama()

        def losses(model=model, rows=rows) -> Tensor:
            logits = model(input_ids=ids).logits[:, :-1]
            own = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
            return own if rows else own.mean()

        optimizer = head_feedback(model, directions="per-example" if rows else "shared", basis="gaussian", rank=2)
        optimizer.step(losses, rule="feedback")
        changes.append(optimizer.tuned_tensors())
    assert changes[0].keys() == changes[1].keys()
    for name, value in changes[0].items():
        torch.testing.assert_close(changes[1][name], value, rtol=1e-9, atol=1e-12)
