"""First-order fine-tuning against torch's own loop, and adapters of PEFT by any method, through the command line."""

import copy
import json

import pytest
import torch
import transformers
from cases import mostly_slow
from folders import label_rows, model_folder, read_jsonl, refused, settings, tezo, train, write_rows
from peft import PeftModel
from tiny import lm_loss, tiny_opt, tokens

from tezo.methods.first_order import adam
from tezo.system.errors import NonFiniteLossError, RequestError, RunError


def test_its_steps_are_those_of_torchs_adamw():
    model, options = tiny_opt(), {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    twin = copy.deepcopy(model)
    optimizer = adam(model, **options)
    literal = torch.optim.AdamW(twin.parameters(), **options)
    for step in range(5):
        batch = tokens(seed=step)
        expected = lm_loss(twin, batch)()
        assert optimizer.step(lm_loss(model, batch)) == pytest.approx(float(expected.detach()), rel=1e-12)
        literal.zero_grad()
        expected.backward()
        literal.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not any(parameter.grad is not None for parameter in model.parameters()), "gradients take no memory between"


HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@HALF
def test_in_half_precision_its_steps_are_torchs_on_float32_copies_of_the_weights(dtype):
    model = tiny_opt().to(dtype)
    copies = [torch.nn.Parameter(weight.detach().float()) for weight in model.parameters()]
    optimizer, literal = adam(model, lr=1e-5), torch.optim.AdamW(copies, lr=1e-5, weight_decay=0.0)
    twin = copy.deepcopy(model)
    for step in range(5):
        loss = lm_loss(twin, tokens(seed=step))()
        loss.backward()
        for weight, kept in zip(twin.parameters(), copies, strict=True):
            kept.grad, weight.grad = weight.grad.float(), None
        literal.step()
        for weight, kept in zip(twin.parameters(), copies, strict=True):
            weight.data.copy_(kept.data)
        optimizer.step(lm_loss(model, tokens(seed=step)))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.isfinite().all()


@HALF
def test_without_a_float32_copy_a_step_is_rounded_to_a_neighbour_without_bias(dtype):
    """The first step of Adam is lr sign(g) in each entry, here far below the spacing of the weights."""
    lr, model = 1e-6, torch.nn.Linear(400, 400, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(400, 400, generator=torch.Generator().manual_seed(0)))
    before, x = model.to(dtype).weight.detach().clone(), torch.linspace(-1, 1, 400).to(dtype)
    optimizer = adam(model, lr=lr, eps=1e-12, master_weights=False)
    optimizer.step(lambda: model(x).float().sum())
    moved = (model.weight.detach().float() - before.float()) * -x.float().sign()
    spacing = (torch.nextafter(before, torch.full_like(before, torch.inf)).float() - before.float()).abs()
    assert (moved >= 0).all() and (moved <= lr + 2 * spacing).all()
    error = float(moved.mean()) - lr
    assert abs(error) < 5 * float((lr * spacing).sum()) ** 0.5 / moved.numel(), "one false alarm in a million"
    state = optimizer.resumable_state()
    assert all(value.dtype == torch.float32 for key, value in state.items() if "exp_avg" in key)
    assert not any(key.endswith("copy") for key in state)


@HALF
@pytest.mark.parametrize("master", [True, False])
def test_a_state_in_half_precision_goes_on_to_the_bit(dtype, master):
    def steps(optimizer, model, numbers):
        for number in numbers:
            optimizer.step(lm_loss(model, tokens(seed=number)))
            records.append(optimizer.last_step)

    records = []
    model = tiny_opt().to(dtype)
    again = copy.deepcopy(model)
    optimizer = adam(model, lr=1e-5, master_weights=master)
    steps(optimizer, model, range(3))
    state = {key: value.clone() for key, value in optimizer.resumable_state().items()}
    resumed = adam(again, lr=1e-5, master_weights=master)
    resumed.load_resumable_state(state, records[:3])
    steps(optimizer, model, range(3, 6))
    steps(resumed, again, range(3, 6))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@HALF
def test_a_state_dict_has_the_float32_copies_and_other_weights_are_stepped_from(dtype):
    model, batches = tiny_opt().to(dtype), [tokens(seed=step) for step in range(6)]
    optimizer = adam(model, lr=1e-2)
    for batch in batches[:5]:
        optimizer.step(lm_loss(model, batch))
    twin = copy.deepcopy(model)
    other = adam(twin, lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, tuned in ((optimizer, model), (other, twin)):
        lm_loss(tuned, batches[0])().backward()  # a gradient that is there already is not a step's
        own.step(lm_loss(tuned, batches[5]))
    assert other.num_steps == optimizer.num_steps == 6
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    start = {name: torch.zeros_like(value) + 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    optimizer.param_groups[0]["lr"] = 1e-9
    optimizer.step(lm_loss(model, batches[0]))
    assert all(torch.equal(own, start[name]) for name, own in model.named_parameters())
    with pytest.raises(RequestError, match="belongs to another optimizer"):
        other.load_state_dict(adam(tiny_opt(), lr=1e-2).state_dict())


def test_a_gradient_that_is_not_finite_leaves_all_as_before():
    model = tiny_opt().to(torch.float16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = adam(model, lr=1e-5)
    with pytest.raises(RunError, match=r"the gradient of .* is not finite in torch.float16"):
        optimizer.step(lambda: lm_loss(model, tokens(seed=1))() * 1e9)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert optimizer.num_steps == 0 and not any(weight.grad is not None for weight in model.parameters())
    optimizer.step(lm_loss(model, tokens(seed=1)))
    assert optimizer.num_steps == 1


def test_a_step_that_could_overflow_the_weights_leaves_all_as_before():
    model = tiny_opt().to(torch.float16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = adam(model, lr=1e6)
    with pytest.raises(RequestError, match=r"method.lr is 1000000.0: .*largest torch.float16"):
        optimizer.step(lm_loss(model, tokens(seed=1)))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert optimizer.num_steps == 0 and not optimizer.state


def test_dropout_is_on_in_a_step_and_a_function_of_seed_and_step():
    def losses(seed: int) -> list[float]:
        model = tiny_opt(dropout=0.5)
        optimizer = adam(model, lr=0.0, seed=seed)
        found = [optimizer.step(lm_loss(model, tokens(seed=1))) for _ in range(2)]
        assert not model.training
        return found

    before = torch.get_rng_state()
    first = losses(0)
    assert torch.equal(before, torch.get_rng_state())
    assert first[0] != first[1] and first == losses(0) and first != losses(1)


def test_only_what_is_chosen_is_trained():
    model = tiny_opt()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adam(model, lr=1e-2, targets=["q_proj"]).step(lm_loss(model, tokens(seed=1)))
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed and all("q_proj" in name for name in changed)


def test_what_it_refuses():
    model = tiny_opt()
    optimizer = adam(model, lr=1e-2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(NonFiniteLossError):
        optimizer.step(lambda: lm_loss(model, tokens(seed=1))() * float("nan"))
    with pytest.raises(RequestError, match="has a gradient"):
        optimizer.step(lambda: torch.tensor(1.0))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(RequestError, match=r"method\.lr is -1"):
        adam(model, lr=-1)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "llama", "roberta", "bert"):
        model_folder(root, family)
    write_rows(root / "rows.jsonl", label_rows(24))
    return root


@pytest.mark.parametrize("family", mostly_slow(["opt", "roberta", "bert"], "opt"))
def test_it_learns_rows_by_heart_in_the_loop_of_the_other_methods(home, tmp_path, family):
    flags = ("--model", home / family, "--data", home / "rows.jsonl", "--test", home / "rows.jsonl")
    named = settings(method__lr=1e-2, train__batch_size=8, train__keep_best=False, data__hold_out=0)
    done = tezo("train", *flags, "--method", "adam", "--steps", 150, "--output", tmp_path / "run", "--json", *named)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["after"]["loss"] < 0.3 * summary["before"]["loss"]
    assert summary["result"]["kind"] == "model"
    assert json.loads(tezo("eval", tmp_path / "run", "--json").out)["loss"] == pytest.approx(
        summary["after"]["loss"], abs=1e-5
    )
    kappas = [line.get("projected_grads") for line in read_jsonl(tmp_path / "run/metrics.jsonl")]
    assert [] in kappas and not any(kappas)


ADAPTERS = [
    (family, adapter, method)
    for family, adapter in (("opt", "lora"), ("llama", "lora"), ("roberta", "lora"), ("bert", "lora"),
                            ("opt", "prefix"), ("llama", "prefix"), ("roberta", "prefix"), ("bert", "prefix"),
                            ("opt", "prompt"), ("llama", "prompt"), ("roberta", "prompt"), ("bert", "prompt"))
    for method in ("adam", "mezo", "tezo")
]  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize(("family", "adapter", "method"), ADAPTERS, ids=["-".join(entry) for entry in ADAPTERS])
def test_any_method_tunes_an_adapter_that_peft_loads(home, tmp_path, family, adapter, method):
    rank = 2 if method == "tezo" else None
    more = ("--method", method, "--json", "--test", home / "rows.jsonl")
    named = {"model__peft": adapter, "model__lora_rank": 4 if adapter == "lora" else None, "method__rank": rank,
             "method__lr": 0.05, "train__keep_best": False}  # fmt: skip
    done = train(home / family, home / "rows.jsonl", tmp_path / "run", *more, **named)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["before"] != summary["after"]
    part = "lora_" if adapter == "lora" else "prompt_encoder"
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert all(part in row["name"] for row in plan if row["trained"])
    assert {row["moved"] for row in plan if row["trained"]} == {"by its gradient" if method == "adam" else "in forward"}
    found = json.loads(tezo("eval", tmp_path / "run", "--json", "--data", home / "rows.jsonl").out)
    assert found["loss"] == pytest.approx(summary["after"]["loss"], abs=1e-5)
    kind = {"opt": "OPTForCausalLM", "llama": "LlamaForCausalLM", "roberta": "RobertaForMaskedLM", "bert": "BertModel"}
    base = getattr(transformers, kind[family]).from_pretrained(home / family)
    assert PeftModel.from_pretrained(base, str(tmp_path / "run/adapter"))


def test_a_lora_run_is_exported_and_virtual_tokens_only_as_they_are(home, tmp_path):
    for adapter in ("lora", "prefix", "prompt"):
        more = ("--method", "mezo", "--json", "--test", home / "rows.jsonl")
        named = {"model__peft": adapter, "method__rank": None, "method__lr": 0.01}
        assert train(home / "opt", home / "rows.jsonl", tmp_path / adapter, *more, **named).code == 0
        assert tezo("export", tmp_path / adapter, "--output", tmp_path / f"{adapter}-out").code == 0
    assert tezo("export", tmp_path / "lora", "--format", "merged", "--output", tmp_path / "merged").code == 0
    loss = [
        json.loads(tezo("eval", name, "--json", "--data", home / "rows.jsonl").out)["loss"]
        for name in (tmp_path / "lora", tmp_path / "merged")
    ]
    assert loss[0] == pytest.approx(loss[1], rel=1e-4)
    for adapter in ("prefix", "prompt"):
        refused(tezo("export", tmp_path / adapter, "--format", "merged", "--output", tmp_path / "x"), "merged", adapter)


def test_adapters_that_cannot_be_had(home, tmp_path):
    for family, values, parts in (
        ("opt", {"model__peft": "lora", "model__lora_rank": 0}, ["model.lora_rank", "0"]),
        ("opt", {"model__peft": "ia9"}, ["model.peft", "'ia9'"]),
    ):
        refused(train(home / family, home / "rows.jsonl", tmp_path / "out", **values), *parts)
    assert not (tmp_path / "out").exists()
