"""In the forward pass and in place, a parameter moves alike; and what each leaves alone, exactly."""

import math

import pytest
import torch
from cases import CASES, INTERVAL, Case, choose, effective_weights, every_method, every_method_fast_for_kinds, run
from tiny import Regression, lm_loss, tiny_gpt2, tiny_llama, tiny_opt, tiny_qwen2, tiny_roberta, tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tezo import NonFiniteLossError, RequestError
from tezo.directions.targets import Target
from tezo.forward.beside_weight import InForward
from tezo.forward.in_place import FromCopy
from tezo.forward.perturbed_parameter import require_writable
from tezo.methods import METHODS

STEPS = INTERVAL + 2  # past a refresh
FAMILIES = {
    "opt": (tiny_opt, "embed_tokens"),
    "llama": (tiny_llama, "embed_tokens"),
    "qwen2": (tiny_qwen2, "embed_tokens"),
    "gpt2": (tiny_gpt2, "wte"),
    "roberta": (tiny_roberta, "word_embeddings"),
}
LOW_RANK = ("lozo", "lozo-m", "subzo", "tezo", "tezo-m", "tezo-adam", "tezo-cadam")


def trajectory(case: Case, model: nn.Module, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """Both losses of every step, and the weights after the last."""
    optimizer = case.build(model, lr=1e-3, **options)
    losses = []
    for step in range(STEPS):
        optimizer.step(lm_loss(model, tokens(seed=step)))
        losses += [(probe.loss_plus, probe.loss_minus) for probe in optimizer.last_step.probes]
    return torch.tensor(losses, dtype=torch.float64), effective_weights(optimizer)


def assert_same_trajectory(case: Case, make, **options) -> None:
    losses, weights = trajectory(case, make(), in_forward=True, **options)
    losses_in_place, weights_in_place = trajectory(case, make(), in_forward=False, **options)
    assert (losses[:, 0] - losses[:, 1]).abs().min() > 1e-8, "the perturbation does not reach the loss"
    torch.testing.assert_close(losses, losses_in_place, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights, weights_in_place, rtol=1e-8, atol=1e-10)


@choose(*LOW_RANK)
def test_in_forward_and_in_place_are_the_same_method(case):
    assert_same_trajectory(case, tiny_opt, targets=("all",), num_directions=2)


@pytest.mark.thinned
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@choose("tezo", "lozo-m")
def test_in_forward_and_in_place_are_the_same_method_on_every_architecture(case, family, tied):
    make, _ = FAMILIES[family]
    targets = ("all", "!token_type_embeddings") if family == "roberta" else ("all",)  # two rows: below the rank
    assert_same_trajectory(case, lambda: make(tied=tied), targets=targets)


@pytest.mark.thinned
@pytest.mark.parametrize("family", FAMILIES)
@choose("tezo", "subzo")
def test_a_tied_embedding_alone_moves_in_the_forward_pass_at_both_its_sites(case, family):
    make, pattern = FAMILIES[family]
    model = make(tied=True)
    optimizer = case.build(model, targets=(pattern,))
    (moving,) = optimizer.parameters.values()
    assert isinstance(moving, InForward)
    assert {site.layout for site in moving.target.sites} == {"embedding", "linear"}
    assert_same_trajectory(case, lambda: make(tied=True), targets=(pattern,))


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@choose(*[name for name, case in CASES.items() if case.base_untouched])
def test_the_base_is_bit_identical_after_twenty_steps(case, dtype):
    model = tiny_opt(dtype)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = case.build(model, lr=1e-2)
    start = lm_loss(model, tokens())().item()
    for step in range(20):
        optimizer.step(lm_loss(model, tokens(seed=step)))
    assert lm_loss(model, tokens())().item() != start, "nothing was trained"
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@choose("lozo", "lozo-m", "subzo")
def test_the_base_is_written_at_refreshes_and_at_no_other_step(case):
    model = tiny_opt(torch.bfloat16)
    optimizer = case.build(model, lr=1.0)
    kept = {name: moving.weight.clone() for name, moving in optimizer.parameters.items()}
    for step in range(2 * INTERVAL + 1):
        optimizer.step(lm_loss(model, tokens(seed=step)))
        now = {name: moving.weight.clone() for name, moving in optimizer.parameters.items()}
        changed = [name for name in now if not torch.equal(now[name], kept[name])]
        assert bool(changed) == (step in (INTERVAL, 2 * INTERVAL)), (step, changed)
        kept = now


@choose("mezo", "mezo-adam", "zo-adamu", "lozo", "tezo", "tezo-adam")
def test_vectors_come_back_exactly_in_bfloat16(case):
    model = tiny_opt(torch.bfloat16)
    # rho 1e-3 is below the spacing near 1
    optimizer = case.build(model, lr=0.0, rho=0.05, targets=("all",), in_forward=False)
    vectors = {name: moving for name, moving in optimizer.parameters.items() if moving.weight.ndim == 1}
    assert vectors and all(isinstance(moving, FromCopy) for moving in vectors.values())
    before = {name: moving.weight.clone() for name, moving in vectors.items()}
    loss, shown = lm_loss(model, tokens()), []

    def closure() -> Tensor:
        shown.append({name: moving.weight.clone() for name, moving in vectors.items()})
        return loss()

    for _ in range(5):
        optimizer.step(closure)
    assert all(not torch.equal(seen[name], before[name]) for seen in shown for name in vectors)
    assert all(torch.equal(moving.weight, before[name]) for name, moving in vectors.items())


class Deaf(Tensor):
    """A tensor on which an in-place add is lost in silence, as on some quantised ones."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (Tensor.add_, Tensor.__iadd__):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class Hearing(Tensor):
    """A subclass that can be written, for all one can see in one entry."""


class LostWrites(TorchFunctionMode):
    """What a device does that takes an in-place add and drops it, on plain tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is Tensor.add_ else func(*args, **(kwargs or {}))


def target_of(data: Tensor) -> Target:
    return Target("layer.weight", nn.Parameter(data, requires_grad=False), ())


@pytest.mark.parametrize(
    "data",
    [
        torch.empty(3, 3, device="meta"),
        torch.ones(3, 3, dtype=torch.int8),
        torch.ones(3, 3).as_subclass(Deaf),
        torch.ones(3, 3).as_subclass(Hearing),
        torch.ones(3, 3).to(torch.float8_e4m3fn),
    ],
    ids=["meta", "integers", "deaf", "hearing", "float8"],
)
def test_tensors_that_cannot_be_written_are_refused_by_name(data):
    with pytest.raises(RequestError, match=r"MeZO writes to weights, and layer\.weight .* cannot be written in place"):
        require_writable(target_of(data), "MeZO")


def test_a_plain_tensor_on_which_the_add_is_lost_is_refused():
    require_writable(target_of(torch.ones(3, 3)), "MeZO")
    with LostWrites(), pytest.raises(RequestError, match="cannot be written in place"):
        require_writable(target_of(torch.ones(3, 3)), "MeZO")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_probe_for_writing_leaves_the_tensor_as_it_was(dtype):
    values = torch.linspace(-2, 2, 12).to(dtype)
    for data in (values.view(3, 4), values.view(4, 3).T, torch.zeros(0, 3, dtype=dtype)):
        before = data.clone()
        require_writable(target_of(data), "MeZO")
        assert torch.equal(data, before)


@pytest.mark.parametrize(("name", "refused"), [("mezo", True), ("tezo-adam", True), ("tezo", False)])
def test_methods_that_write_refuse_such_a_base_at_once_and_those_that_read_take_it(name, refused):
    model = Regression()
    model.layer.weight = nn.Parameter(model.layer.weight.detach().as_subclass(Deaf))
    if refused:
        with pytest.raises(RequestError, match="Deaf"):
            CASES[name].build(model)
        assert not model.layer._forward_hooks, "a refused optimizer left its hook"
        return
    optimizer = CASES[name].build(model)
    losses = [optimizer.step(model.loss) for _ in range(100)]
    assert losses[-1] < 0.99 * losses[0]


@choose(*LOW_RANK)
def test_after_close_no_hook_is_left_and_the_base_answers(case):
    model = tiny_opt()
    base = lm_loss(model, tokens())().item()
    optimizer = case.build(model, lr=1e-2)
    assert any(module._forward_hooks for module in model.modules())
    for _ in range(2):
        optimizer.step(lm_loss(model, tokens()))
    trained = lm_loss(model, tokens())().item()
    optimizer.close()
    assert not any(module._forward_hooks for module in model.modules())
    assert trained != base
    assert lm_loss(model, tokens())().item() == (trained if case.name == "tezo-adam" else base)


@choose(*LOW_RANK)
def test_a_closure_may_autocast(case):
    model = tiny_opt(torch.float32)
    optimizer = case.build(model, lr=1e-3, targets=("all",))
    plain = lm_loss(model, tokens())

    def lowered():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain()

    losses = [optimizer.step(lowered) for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses) and optimizer.last_step.projected_grads != (0.0,)


@every_method_fast_for_kinds
def test_merging_changes_no_output_and_leaves_no_hook(case):
    model = tiny_llama(tied=True)
    optimizer = case.build(model, lr=1e-2, targets=("all",))
    for step in range(INTERVAL + 2):
        optimizer.step(lm_loss(model, tokens(seed=step)))
    with torch.no_grad():
        before = model(input_ids=tokens()).logits
        assert optimizer.merge() is model
        after = model(input_ids=tokens()).logits
        assert optimizer.merge() is model, "merging twice is merging once"
        again = model(input_ids=tokens()).logits
    assert not any(module._forward_hooks for module in model.modules())
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)
    assert torch.equal(again, after)


@pytest.mark.thinned
@pytest.mark.parametrize(("bad", "call"), [(math.nan, 0), (-math.inf, 1)], ids=["nan-at-plus", "inf-at-minus"])
@every_method_fast_for_kinds
def test_a_loss_that_is_not_finite_stops_the_step_and_leaves_the_parameters(case, call, bad):
    model, twin = tiny_opt(torch.float32), tiny_opt(torch.float32)
    optimizer, undisturbed = (case.build(m, lr=1e-3, targets=("all",)) for m in (model, twin))
    run(undisturbed, 0, INTERVAL)
    last = run(optimizer, 0, INTERVAL)[-1]  # the step that fails is a refresh
    before, answer = effective_weights(optimizer), lm_loss(model, tokens())().item()
    calls = iter(range(case.passes))
    with pytest.raises(NonFiniteLossError, match=rf"{bad} at step {INTERVAL}; the last good loss was {last:.6g}") as e:
        optimizer.step(lambda: bad if next(calls) == call else 1.0)
    assert (e.value.step, e.value.last_loss) == (INTERVAL, last)
    assert optimizer.num_steps == INTERVAL
    after = effective_weights(optimizer)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    assert lm_loss(model, tokens())().item() == pytest.approx(answer, rel=1e-5)
    exact = [n for n in before if before[n].ndim == 1 or (case.base_untouched and "positions" not in n)]
    assert all(torch.equal(after[n], before[n]) for n in exact)
    # And the run can go on as if nothing had happened.
    rest, expected = run(optimizer, INTERVAL, INTERVAL + 3), run(undisturbed, INTERVAL, INTERVAL + 3)
    assert rest == pytest.approx(expected, rel=1e-5)


@every_method
def test_a_closure_that_raises_leaves_the_parameters_and_the_mode(case):
    model = tiny_opt(torch.float64).train()
    optimizer = case.build(model, lr=1e-3, targets=("all",))
    run(optimizer, 0, 2)
    before = effective_weights(optimizer)
    for failing in range(2):
        calls = iter(range(2))
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda calls=calls, failing=failing: 1 / 0 if next(calls) == failing else 1.0)
        torch.testing.assert_close(effective_weights(optimizer), before, rtol=1e-12, atol=1e-12)
    assert model.training and optimizer.num_steps == 2


class ByName(nn.Module):
    """Calls its modules by position, or with their inputs named."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.named = named
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.first, self.norm, self.last):
            x = module(input=x) if self.named else module(x)
        return x.square().mean()


@pytest.mark.parametrize("method", ["tezo", "head-feedback", "mezo"])
def test_an_input_may_be_passed_by_its_name(method):
    x, losses, saved = torch.randn(12, 16), [], []
    for named in (False, True):
        model = ByName(named)
        options = {} if method == "mezo" else {"rank": 4}
        optimizer = METHODS[method].build(model, lr=1e-2, targets=("all",), **options)
        optimizer.set_passes(lambda _, model=model: model(x))
        losses.append([optimizer.step(lambda model=model: model(x)) for _ in range(3)])
        saved.append(effective_weights(optimizer))
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=0)
