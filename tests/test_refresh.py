"""New factors in the middle of a run: the function stays, what was trained goes into weights or beside them."""

import json
import math

import peft
import pytest
import torch
from cases import CASES, effective_weights, mostly_slow
from folders import label_rows, model_folder, refused, saved, tezo, tiny_model, tokenizer_for, train, write_rows
from kills import contents
from short_runs import stopped
from tiny import lm_loss, tiny_gpt2, tiny_opt, tokens
from torch import Tensor, nn

from tezo import NonFiniteLossError, RequestError
from tezo.directions.random import DrawKey
from tezo.directions.spaces import CP, FixedCoefficient, LowRank, TransposedLowRank
from tezo.forward.beside_weight import InForward, compress
from tezo.methods import METHODS
from tezo.models.loading import load_model
from tezo.models.saving import export_adapter
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.runs.folder import LOG
from tezo.system.digests import digest
from tezo.tasks.objectives.labelled_tensors import closure as tezo_closure
from tezo.training.loop import train as run_config
from tezo.training.resume import replay
from tezo.training.settings import parse_config

RANK, INTERVAL = 3, 4
REFRESHED = ("tezo", "tezo-m", "tezo-cadam", "lozo", "lozo-m", "head-feedback")


def built(model: nn.Module, name: str, **options) -> ZerothOrderOptimizer:
    given = {"rank": RANK, "lazy_update_interval": INTERVAL, "basis": "activation", "lr": 3e-2} | options
    optimizer = METHODS[name].build(model, seed=2, **given)
    optimizer.set_passes(lambda refresh_step: model(input_ids=tokens(batch=4, length=12, seed=70 + refresh_step)))
    return optimizer


def steps(optimizer: ZerothOrderOptimizer, start: int, stop: int) -> list[float]:
    return [optimizer.step(lm_loss(optimizer.model, tokens(seed=seed))) for seed in range(start, stop)]


def test_a_rank_of_what_is_kept_is_refused_where_nothing_is_refreshed():
    for name, options in (("mezo", {}), ("es", {}), ("tezo", {"rank": RANK})):
        with pytest.raises(RequestError, match="frozen_rank is 8, and factors are never refreshed"):
            METHODS[name].build(tiny_opt(), frozen_rank=8, **options)
    with pytest.raises(RequestError, match="frozen_rank is 8, and in place nothing is kept"):
        METHODS["lozo"].build(tiny_opt(), frozen_rank=8, in_forward=False)


def drawn(optimizer):
    """(each direction of the next step, as a tensor of the shape of its parameter)."""
    found = []
    for name, directions in optimizer.draw().directions.items():
        target = optimizer.parameters[name].target
        for direction in directions:
            z = torch.zeros(target.stored_shape, dtype=target.parameter.dtype)
            direction.add_to_(z, 1.0) if z.ndim == 2 else z.add_(next(direction.tiles())[1])
            found.append(z)
    return found


@pytest.mark.parametrize("name", [*CASES, "errors"])
@torch.no_grad()
def test_a_draw_changes_nothing_and_runs_no_pass_and_comes_out_the_same_again(name):
    ids, model = tokens(), tiny_opt()
    closure = tezo_closure(model, {"input_ids": ids, "labels": ids})
    if name == "errors":
        optimizer = METHODS["tezo-m"].build(model, basis="errors", rank=RANK, lazy_update_interval=INTERVAL, lr=1e-3)
    else:
        optimizer = CASES[name].build(model, lr=1e-3, targets=["all"])
    calls = []
    for step in range(INTERVAL + 2):  # a refresh of the factors among them
        with pytest.raises(RequestError, match=r"call refresh\(\)"):
            optimizer.draw()
        optimizer.refresh(closure)
        with model.register_forward_pre_hook(lambda *_: calls.append(1)):
            state = {key: value.clone() for key, value in (optimizer.resumable_state() | model.state_dict()).items()}
            first, again = drawn(optimizer), drawn(optimizer)
            after = optimizer.resumable_state() | model.state_dict()
        assert calls == [] and optimizer.num_steps == step
        assert state.keys() == after.keys() and all(torch.equal(after[key], state[key]) for key in state)
        assert all(map(torch.equal, first, again)) and len(first) >= len(optimizer.targets)
        optimizer.refresh(closure)
        assert all(map(torch.equal, first, drawn(optimizer)))  # to refresh twice is to refresh once
        optimizer.step(closure)


@pytest.mark.parametrize(("name", "options"), [("lozo", {"frozen_rank": 7}), ("lozo", {"frozen_rank": 50}),
                                              ("tezo", {"lazy_update_interval": None})])  # fmt: skip
def test_the_largest_rank_of_a_change_is_known_before_the_first_step(name, options):
    optimizer = built(tiny_opt(), name, **options)
    most, seen = optimizer.largest_rank(4 * INTERVAL), 0

    def loss():
        nonlocal seen
        for moving in optimizer.parameters.values():
            seen = max(seen, *(0 if own is None else own[0].shape[1] for own in moving.changes()))
        return lm_loss(optimizer.model, tokens(seed=3))()

    for _ in range(4 * INTERVAL):
        optimizer.step(loss)
    assert seen == most == RANK + (min(options["frozen_rank"], 3 * RANK) if name == "lozo" else 0)


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(seed=99)).logits


@pytest.mark.thinned
@pytest.mark.parametrize("make", [tiny_opt, tiny_gpt2])
@pytest.mark.parametrize("frozen_rank", [None, 64])
@pytest.mark.parametrize("name", REFRESHED)
def test_a_refresh_changes_the_factors_and_not_the_function(make, name, frozen_rank):
    model = make()
    base = {key: value.clone() for key, value in model.named_parameters()}
    optimizer = built(model, name, frozen_rank=frozen_rank)
    steps(optimizer, 0, INTERVAL)
    before, factors = outputs(model), {n: m.change.v_NR for n, m in optimizer.parameters.items()}
    optimizer.refresh()  # that of the step at which factors change
    assert all(not torch.equal(m.change.v_NR, factors[n]) for n, m in optimizer.parameters.items())
    torch.testing.assert_close(outputs(model), before, rtol=0, atol=1e-12)
    written = any(not torch.equal(value, base[key]) for key, value in model.named_parameters())
    assert written == (frozen_rank is None)
    assert (optimizer.why_no_adapter() is None) == (frozen_rank is not None)


@pytest.mark.parametrize("name", REFRESHED)
def test_folding_into_the_weights_and_beside_them_are_the_same_run(name):
    runs = [built(tiny_opt(), name, frozen_rank=rank) for rank in (None, 64)]
    losses = [steps(optimizer, 0, 3 * INTERVAL) for optimizer in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)
    first, second = (effective_weights(optimizer) for optimizer in runs)
    for key, weight in first.items():
        torch.testing.assert_close(second[key], weight, rtol=0, atol=1e-8)


def test_compression_is_the_nearest_matrix_of_the_rank_and_says_what_it_lost():
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, 9, generator=draw, dtype=torch.float64) for size in (14, 11))
    near_left, near_right, lost = compress(left, right, 4)
    assert near_left.shape == (14, 4) and near_right.shape == (11, 4)
    whole = left @ right.T
    u, s, vh = torch.linalg.svd(whole)
    torch.testing.assert_close(near_left @ near_right.T, u[:, :4] * s[:4] @ vh[:4])
    assert lost == pytest.approx(float((whole - near_left @ near_right.T).norm() / whole.norm()), rel=1e-9)
    assert compress(left, right, 9) == (left, right, 0.0)


def test_what_lies_beside_the_base_keeps_to_its_rank_and_the_run_says_what_that_cost():
    optimizer = built(tiny_opt(), "head-feedback", frozen_rank=RANK + 1)
    steps(optimizer, 0, 2 * INTERVAL)
    assert optimizer.compression_error == 0.0  # the first fold fits
    before = effective_weights(optimizer)
    optimizer.refresh()
    after = effective_weights(optimizer)
    base = effective_weights(built(tiny_opt(), "head-feedback"))
    shares = []
    for name, moving in optimizer.parameters.items():
        assert isinstance(moving, InForward)
        assert moving.frozen.coefficient.shape[1] == RANK + 1
        share = float((after[name] - before[name]).norm() / (before[name] - base[name]).norm())
        assert moving.compression_error == pytest.approx(share, rel=1e-6)
        shares.append(share)
    assert 0 < optimizer.compression_error == pytest.approx(max(shares), rel=1e-6)


def test_a_momentum_goes_over_to_new_factors_by_projection():
    draw = torch.Generator().manual_seed(1)
    u, v, new_u, new_v = (torch.randn(size, RANK, generator=draw, dtype=torch.float64) for size in (8, 7, 8, 7))
    tau = torch.randn(RANK, generator=draw, dtype=torch.float64)
    point = CP(draw=FixedCoefficient(tau), u_MR=new_u, v_NR=new_v, refresh_step=4, before=lambda: {"u": u, "v": v})
    momentum = (u * tau) @ v.T
    for s, value in enumerate(point.carry_over(tau)):
        term = torch.outer(new_u[:, s], new_v[:, s])
        assert float(value) == pytest.approx(float((momentum * term).sum() / term.square().sum()))
    turned, _ = torch.linalg.qr(new_v)
    old, coefficient = torch.linalg.qr(v)[0], torch.randn(8, RANK, generator=draw, dtype=torch.float64)
    for kind in (LowRank, TransposedLowRank):
        scaled = turned * torch.tensor([1.0, 2.0, 3.0])  # orthogonal columns, of several lengths
        gram = scaled.square().sum(0)
        low = kind(
            draw=FixedCoefficient(coefficient), v_NR=scaled, refresh_step=4, before=lambda: {"v": old}, gram=gram
        )
        projected = coefficient @ old.T @ turned @ turned.T
        torch.testing.assert_close(low.carry_over(coefficient) @ scaled.T, projected)


def test_a_transposed_point_is_the_transpose_of_a_point():
    draw = torch.Generator().manual_seed(1)
    u, v, x, y = (
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((5, 2), (4, 2), (1, 6, 5), (1, 6, 4))
    )
    point = TransposedLowRank(draw=FixedCoefficient(u), v_NR=v, refresh_step=0, gram=1.0)
    left, right = point.factors()
    z = left @ right.T
    assert z.shape == (4, 5)
    for add_, inputs, expected in ((point.add_linear_, x, x @ z.T), (point.add_transposed_, y, y @ z)):
        out = torch.zeros_like(expected)
        add_(out, inputs)
        torch.testing.assert_close(out, expected)


@pytest.mark.thinned
@pytest.mark.parametrize("frozen_rank", [None, RANK + 2])
@pytest.mark.parametrize("name", ["tezo-cadam", "head-feedback"])
def test_state_after_a_refresh_goes_to_a_new_optimizer(name, frozen_rank):
    model, other = tiny_opt(), tiny_opt()
    optimizer = built(model, name, frozen_rank=frozen_rank)
    steps(optimizer, 0, 2 * INTERVAL + 1)
    fresh = built(other, name, frozen_rank=frozen_rank)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    assert steps(fresh, 20, 20 + INTERVAL) == steps(optimizer, 20, 20 + INTERVAL)
    assert fresh.compression_error == optimizer.compression_error


@pytest.mark.parametrize("frozen_rank", [None, RANK + 2])
@pytest.mark.parametrize("name", ["tezo-cadam", "head-feedback"])
def test_an_earlier_step_that_came_back_is_saved_with_its_own_factors(name, frozen_rank):
    model, other = tiny_opt(), tiny_opt()
    optimizer = built(model, name, frozen_rank=frozen_rank)
    steps(optimizer, 0, INTERVAL - 1)
    best, there = optimizer.tuned_state(), effective_weights(optimizer)
    steps(optimizer, 0, 3)
    optimizer.load_tuned_state(best, INTERVAL - 1)
    fresh = built(other, name, frozen_rank=frozen_rank)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(effective_weights(fresh), there, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["tezo-m", "head-feedback"])
def test_state_after_a_refresh_that_failed_has_the_factors_before_it_too(name):
    model, other = tiny_opt(), tiny_opt()
    optimizer, fresh = built(model, name, frozen_rank=64), built(other, name, frozen_rank=64)
    steps(optimizer, 0, INTERVAL)
    with pytest.raises(NonFiniteLossError):
        optimizer.step(lambda: math.nan)
    other.load_state_dict(model.state_dict())
    fresh.set_passes(lambda _: pytest.fail("what was seen is in the state"))
    fresh.load_state_dict(optimizer.state_dict())
    assert steps(fresh, 20, 22) == steps(optimizer, 20, 22)


def test_a_momentum_is_carried_over_from_the_factors_that_were_used():
    model = tiny_opt()
    optimizer = METHODS["tezo-m"].build(model, rank=RANK, lr=1e-3, lazy_update_interval=INTERVAL)
    target = optimizer.targets[0]
    used = optimizer.perturbation.direction(target, DrawKey(optimizer.seed, 0), {})
    before = optimizer.perturbation.direction(target, DrawKey(optimizer.seed, INTERVAL), {}).before()
    assert torch.equal(before["u"], used.u_MR) and torch.equal(before["v"], used.v_NR)


@pytest.mark.thinned
@pytest.mark.parametrize("make", [tiny_opt, tiny_gpt2])
@pytest.mark.parametrize("name", ["tezo-cadam", "head-feedback"])
def test_peft_loads_what_several_intervals_trained(make, name, tmp_path):
    model = make()
    optimizer = built(model, name, frozen_rank=64)
    steps(optimizer, 0, 2 * INTERVAL + 2)
    assert export_adapter(optimizer, tmp_path).rank == 3 * RANK
    tuned = outputs(model)
    loaded = peft.PeftModel.from_pretrained(make(), str(tmp_path))
    torch.testing.assert_close(outputs(loaded), tuned, rtol=0, atol=1e-4)  # the file is float32
    assert (outputs(make()) - tuned).abs().max() > 1e-2
    optimizer.merge()
    torch.testing.assert_close(outputs(model), tuned, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    tokenizer = tokenizer_for("opt")
    wide = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    saved(tiny_model("opt", len(tokenizer), **wide), tokenizer, root / "wide")
    model_folder(root, "opt")
    for number, part in enumerate(("train", "dev", "test")):
        write_rows(root / f"{part}.jsonl", label_rows(10, seed=number))
    return root


@pytest.mark.parametrize("form", mostly_slow(["nf4", "int8", "int8wo"], "nf4"))
@torch.no_grad()
def test_a_packed_base_is_seen_refreshed_and_not_written(home, form, tmp_path):
    model = load_model(str(home / "wide"), quantization=form).model
    before = digest(dict(model.named_parameters()))
    optimizer = built(model, "head-feedback", frozen_rank=2 * RANK)
    ids = tokens(batch=4, length=12, seed=1) % 60
    losses = [optimizer.step(lambda: model(input_ids=ids, labels=ids).loss) for _ in range(3 * INTERVAL + 1)]
    assert digest(dict(model.named_parameters())) == before
    assert len(set(losses)) == len(losses)
    assert optimizer.compression_error > 0
    tuned = model(input_ids=ids).logits
    assert export_adapter(optimizer, tmp_path).rank == 3 * RANK
    optimizer.close()
    loaded = peft.PeftModel.from_pretrained(load_model(str(home / "wide"), quantization=form).model, str(tmp_path))
    again = loaded(input_ids=ids).logits
    # int8 rounds the inputs of a layer, so a last bit there may move a whole step of its grid
    assert (again - tuned).abs().max() < (0.1 if form == "int8" else 1e-3) * tuned.abs().max()


def config(home, **method):
    options = {"name": "head-feedback", "lr": 3e-3, "rank": RANK, "lazy_update_interval": INTERVAL} | method
    return parse_config(
        {
            "model": {"name": str(home / "opt"), "device": "cpu"},
            "data": {part: str(home / f"{part}.jsonl") for part in ("train", "dev", "test")},
            "method": options,
            "train": {"steps": 10, "batch_size": 4, "eval_every": 2, "log_every": 2, "checkpoint_every": 3},
        }
    )


@pytest.mark.parametrize(
    "method",
    [
        {},
        pytest.param({"frozen_rank": RANK + 1}, marks=pytest.mark.slow),
        {"name": "tezo-cadam", "basis": "activation", "frozen_rank": 8},
    ],
)
def test_a_run_that_stops_anywhere_goes_on_to_the_bit(home, tmp_path, method):
    made = config(home, **method)
    run_config(made, tmp_path / "whole")
    assert {path.name for path in (tmp_path / "whole").glob("basis-*")} == {f"basis-{b}.safetensors" for b in (0, 4, 8)}
    for step in (0, 3, 5, 9):  # before a checkpoint, at both sides of a refresh, after the last step
        stopped(made, tmp_path / "run", step)
    run_config(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_replay_needs_what_was_seen_and_no_data(home, tmp_path):
    made = config(home, frozen_rank=RANK + 1)
    summary = run_config(made, tmp_path / "run")
    assert summary["result"]["kind"] == "adapter" and summary["basis_passes"] == 3
    hidden = home / "train.jsonl"
    away = hidden.rename(tmp_path / "elsewhere.jsonl")
    try:
        replay(tmp_path / "run", tmp_path / "again")
    finally:
        away.rename(hidden)
    files = [tmp_path / name / "adapter/adapter_model.safetensors" for name in ("run", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    (tmp_path / "run/basis-4.safetensors").unlink()
    replay(tmp_path / "run", tmp_path / "four", step=4)
    again = tezo("replay", tmp_path / "run", "--output", tmp_path / "all", "--step", 9)
    refused(again, "basis-4.safetensors is missing", "--step 4")


def test_the_best_step_comes_back_with_the_factors_of_its_time(home, tmp_path):
    made = config(home, lr=1.0, frozen_rank=8)  # far too large: the dev loss is best before the first refreshes
    summary = run_config(made, tmp_path / "run")
    assert summary["kept_step"] < 8 <= summary["steps"], "the kept factors are not the last ones"
    found = tezo("eval", tmp_path / "run", "--data", home / "dev.jsonl", "--json")
    assert json.loads(found.out)["loss"] == pytest.approx(summary["dev_loss"], rel=1e-5)


def test_the_command_line_takes_a_basis_and_says_what_is_wrong_with_one(home, tmp_path):
    options = {"method__basis": "activation", "method__rank": 2, "steps": 3}
    done = train(home / "opt", home / "train.jsonl", tmp_path / "run", "--method", "tezo", **options)
    assert done.code == 0, done.err
    assert (tmp_path / "run" / LOG).is_file() and (tmp_path / "run/basis-0.safetensors").is_file()
    wrong = train(home / "opt", home / "train.jsonl", tmp_path / "other", "--method", "tezo", method__basis="pca")
    refused(wrong, "method.basis", "pca")
    assert not (tmp_path / "other").exists()
