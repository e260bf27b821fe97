"""Directions of their own for the examples of a batch: the literal estimate, row by row, at the price of one pass."""

import copy
import math
import statistics

import pytest
import torch
from cases import CASES, choose, mostly_slow
from folders import label_rows, model_and_rows, model_folder, saved, tiny_model, tokenizer_for, write_rows
from forks import forked
from kills import contents
from questions import free_text, labelled, masked_examples
from short_runs import STEPS, config, result, same, stopped
from test_objectives_copies import CASES as FAMILIES
from test_objectives_copies import objective_case
from tezo_methods.grzo import DenseSigned, grzo
from tiny import Regression, lm_loss, tiny_gpt2, tiny_llama, tiny_moe, tiny_opt, tokens
from torch import nn
from torch.nn import functional

import tezo
from tezo.directions import spaces
from tezo.directions.random import DrawKey
from tezo.directions.spaces import Dense, SignedDense
from tezo.directions.targets import select_targets
from tezo.forward import blocks as block_points
from tezo.forward.blocks import Blocks, NotInBlocksError
from tezo.methods import METHODS
from tezo.models.loading import load_model
from tezo.runs.folder import LOG
from tezo.runs.step_log import read_log
from tezo.system.errors import RequestError
from tezo.training.job import prepare
from tezo.training.loop import train
from tezo.training.resume import replay
from tezo.training.settings import dump_config, overlay, parse_config, to_tree

LOW_RANK = [name for name, case in CASES.items() if case.low_rank]
RHO = 1e-3


def row_losses(model, ids_BL):
    """A user's closure: the loss of each row."""

    def closure():
        logits = model(input_ids=ids_BL).logits
        nll_BL = functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids_BL[:, 1:], reduction="none")
        return nll_BL.mean(1)

    return closure


def written(direction):
    return torch.cat([z.clone() for _, z in direction.tiles()])


def moved(model, draw, i, scale, j=0):
    """The model with W + scale Z written into each weight, Z the j-th direction of example i."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in draw.directions:
                direction = draw.directions[name][j]
                if isinstance(direction, SignedDense) and parameter.ndim == 2:
                    left_M, right_N = (signs[0] for signs in direction.signs([i]))
                    parameter += scale * left_M.unsqueeze(1) * written(direction) * right_N
                elif isinstance(direction, Dense):
                    parameter += scale * direction.vectors([i])[0]
                else:
                    direction.with_coefficient(direction.draw([i])[0]).add_to_(parameter, scale)
    return model


@torch.no_grad()
def literal_kappas(model, draw, losses_of, examples, q=1, rho=RHO):
    """kappa_ij by perturbing the weights for one example at a time; `losses_of(model)` are those of all examples."""
    found = []
    for i in range(examples):
        for j in range(q):
            plus, minus = (float(losses_of(moved(copy.deepcopy(model), draw, i, s, j))[i]) for s in (rho, -rho))
            found.append((plus - minus) / (2 * rho))
    return found


@pytest.mark.thinned
@choose(*LOW_RANK)
@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize("build", [tiny_opt, tiny_gpt2])
def test_each_row_is_measured_along_its_own_direction(case, q, build):
    model, ids = build(), tokens(batch=5, seed=1)
    plain = copy.deepcopy(model)
    optimizer = case.build(model, lr=0.0, rho=RHO, directions="per-example", num_directions=q)
    optimizer.refresh()
    draw = optimizer.draw()
    loss = optimizer.step(row_losses(model, ids))
    expected = literal_kappas(plain, draw, lambda other: row_losses(other, ids)(), 5, q)
    assert optimizer.last_step.projected_grads == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert optimizer.last_step.forward_passes == 2 * q + 2, "two passes of the first step check that rows are apart"
    assert loss == pytest.approx(row_losses(plain, ids)().mean().item(), rel=1e-4)
    assert len(set(expected)) == 5 * q


@pytest.mark.parametrize("name", ["tezo", "lozo"])
def test_a_step_is_along_the_mean_of_the_rows_estimates(name):
    case, lr = CASES[name], 0.1
    model, ids = tiny_opt(), tokens(batch=4, seed=1)
    plain = copy.deepcopy(model)
    optimizer = case.build(model, lr=lr, rho=RHO, directions="per-example")
    optimizer.refresh()
    draw = optimizer.draw()
    kappas = literal_kappas(plain, draw, lambda other: row_losses(other, ids)(), 4)
    optimizer.step(row_losses(model, ids))
    for i, kappa in enumerate(kappas):
        moved(plain, draw, i, -lr * kappa / 4)
    optimizer.merge()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("family", "shape"), FAMILIES)
def test_each_example_of_a_run_is_measured_along_its_own_direction(family, shape):
    model, objective, _ = objective_case(family, shape)
    examples = objective_examples(family, shape, objective)
    plain = copy.deepcopy(model)
    optimizer = METHODS["tezo"].build(model, rank=3, lr=0.0, rho=RHO, scale="unit", directions="per-example")
    optimizer.refresh()
    draw = optimizer.draw()
    optimizer.step(objective.closure(model, objective.batches(examples)))

    def losses_of(other):
        whole = objective.closure(other, objective.batches(examples))
        with torch.no_grad():
            return whole.example_losses(1)[0]

    expected = literal_kappas(plain, draw, losses_of, len(examples))
    assert optimizer.last_step.projected_grads == pytest.approx(expected, rel=1e-4, abs=1e-7)
    whole = objective.closure(plain, objective.batches(examples)).losses(1)[0].detach()
    assert optimizer.last_step.loss == pytest.approx(float(whole), rel=1e-4)  # up to terms in rho^2


@pytest.mark.thinned
@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize(("family", "shape"), FAMILIES)
def test_a_measurement_is_that_of_the_next_step(family, shape, q):
    model, objective, _ = objective_case(family, shape)
    closure = objective.closure(model, objective.batches(objective_examples(family, shape, objective)))
    optimizer = METHODS["tezo"].build(model, rank=3, lr=0.0, rho=RHO, directions="per-example", num_directions=q)
    assert optimizer.per_example and len(measured := optimizer.measure(closure)) == q * closure.examples
    optimizer.step(closure)
    assert optimizer.last_step.probes == measured


def objective_examples(family, shape, objective):
    made = masked_examples() if family == "roberta" else free_text(7) if shape == "text" else labelled()
    return [objective.encode(example) for example in made]


@pytest.mark.parametrize("name", ["tezo-cadam", "lozo-m", "grzo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_rows_that_read_each_other(name, dtype):
    model, ids = tiny_opt(dtype), tokens(batch=8, seed=1)
    options = CASES[name].options if name in CASES else {}
    optimizer = METHODS[name].build(model, directions="per-example", lr=1e-3, **options)

    def losses():
        logits = model(input_ids=ids).logits.float()
        return functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)

    for _ in range(3):
        assert math.isfinite(optimizer.step(losses))
    assert len(set(optimizer.last_step.projected_grads)) > 4


@choose(*LOW_RANK)
def test_one_row_has_the_shared_direction_to_the_bit(case):
    records = []
    for directions in ("shared", "per-example"):
        model, ids = tiny_opt(), tokens(batch=1, seed=1)
        optimizer = case.build(model, directions=directions)
        losses = row_losses(model, ids)
        for _ in range(4):
            optimizer.step(losses if directions == "per-example" else lambda losses=losses: losses()[0])
        records.append((optimizer.last_step.probes, optimizer.tuned_state()))
    (probes, state), (own_probes, own_state) = records
    assert probes == own_probes
    assert all(torch.equal(state[key], own_state[key]) for key in state)


def test_passes_of_some_rows_each_are_one_pass_of_all():
    found = []
    for sizes in ([6], [2, 4], [1] * 6):
        model, parts = tiny_llama(), tokens(batch=6, seed=1).split(sizes)
        optimizer = tezo.tezo_cadam(model, lr=1e-2, rank=4, directions="per-example")

        def losses(model=model, parts=parts):
            return torch.cat([row_losses(model, part)() for part in parts])

        for _ in range(3):
            optimizer.step(losses)
        found.append(optimizer.last_step.projected_grads)
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[2] == pytest.approx(found[0], rel=1e-6)


def test_examples_keep_their_directions_in_any_padding_and_order_of_passes():
    model, objective, _ = objective_case("opt", "text")
    examples = objective_examples("opt", "text", objective)
    found = []
    for parts in ([examples], [examples[:2], examples[2:]], [[example] for example in examples]):
        optimizer = tezo.tezo(model, rank=3, lr=0.0, directions="per-example")
        batches, start = [], 0
        for part in parts:  # padded to the longest of each part
            batch = objective.collate(part)
            batches.append(batch.__class__(**vars(batch) | {"places": tuple(range(start, start + len(part)))}))
            start += len(part)
        optimizer.step(objective.closure(model, batches[::-1]))
        found.append(optimizer.last_step.projected_grads)
        optimizer.close()
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[2] == pytest.approx(found[0], rel=1e-6)


class Linear(nn.Module):
    """f_i = <a_i, W x_i>: linear in W, so that kappa has no error of finite differences."""

    def __init__(self, a_BM, x_BN):
        super().__init__()
        self.layer = nn.Linear(x_BN.shape[1], a_BM.shape[1], bias=False, dtype=torch.float64)
        self.a_BM, self.x_BN = a_BM, x_BN

    def forward(self, x_BN):
        return self.layer(x_BN)

    def losses(self):
        return (self(self.x_BN) * self.a_BM).sum(1)


@pytest.mark.parametrize("part", [1, 3])
@pytest.mark.parametrize("name", ["head-feedback", "tezo-cadam"])
def test_a_stack_computed_in_parts_is_the_stack_computed_whole(monkeypatch, name, part):
    found = []
    for whole in (True, False):
        model, ids = tiny_opt(), tokens(batch=8, seed=1)
        optimizer = METHODS[name].build(model, lr=1e-2, rank=4, directions="per-example")
        if not whole:
            size = max(moving.target.shape[0] for moving in optimizer.parameters.values()) * 4
            monkeypatch.setattr(block_points, "STACK", part * size if "lozo" in name else 4 * part)
        for _ in range(3):
            optimizer.step(row_losses(model, ids))
        found.append(optimizer.last_step.projected_grads)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.thinned
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("directions", ["shared", "per-example"])
def test_mean_and_variance_are_the_closed_forms(rows, directions):
    # In the space of TeZO's coefficients, with c_i the gradient of f_i there: E = c, the mean over rows, and
    # E|kappa tau|^2 = (r + 2) |c_i|^2 for tau ~ N(0, I_r), so that
    #   shared:      tr Var = (r + 1) |c|^2
    #   per-example: tr Var = (r + 1) (|c|^2 + sigma^2) / B,   sigma^2 = mean |c_i - c|^2
    rank, steps = 4, 1500
    draw = torch.Generator().manual_seed(rows)
    a_BM, x_BN = (torch.randn(rows, width, generator=draw, dtype=torch.float64) for width in (7, 5))
    model = Linear(a_BM, x_BN)
    optimizer = tezo.tezo(model, rank=rank, lr=0.0, rho=1.0, directions=directions)
    found = []
    for _ in range(steps):
        optimizer.refresh()
        drawn = optimizer.draw()
        optimizer.step(model.losses if directions == "per-example" else lambda: model.losses().mean())
        (direction,) = drawn.directions["layer.weight"]
        tau = direction.draw(range(rows if directions == "per-example" else 1))
        kappa = torch.tensor(optimizer.last_step.projected_grads, dtype=torch.float64)
        found.append(kappa @ tau / len(kappa))
    optimizer.refresh()
    (direction,) = optimizer.draw().directions["layer.weight"]
    c_BR = (a_BM @ direction.u_MR.double()) * (x_BN @ direction.v_NR.double())
    mean, spread = c_BR.mean(0), c_BR.var(0, correction=0).sum()
    norm = mean.square().sum()
    per_example = (rank + 1) * (norm + spread) / rows
    variance = per_example if directions == "per-example" else (rank + 1) * norm
    estimates = torch.stack(found)
    deviations = (estimates - mean).square().sum(1)
    # five standard errors: one false alarm in a million
    assert float((estimates.mean(0) - mean).square().sum()) < float(variance) / steps * (1 + 5 * math.sqrt(2))
    error = 5 * float(deviations.std()) / math.sqrt(steps)
    assert float(deviations.mean()) == pytest.approx(float(variance), abs=error)
    assert rows == 1 or float(per_example) < 0.9 * (rank + 1) * float(norm + spread)


@pytest.mark.parametrize("rows", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_signs_of_one_factor_vary_little_more_than_factors_of_their_own(rows):
    # LOZO's U_i = diag(s_i) U: with c_i the gradient in U's space (M x r), c their mean, d = M r
    #   tr Var = (d - r) (|c|^2 + sigma^2) / B + (r + 1) |c|^2,
    # where factors drawn for each example have (d + 1) (|c|^2 + sigma^2) / B
    rank, steps, out_features = 2, 1500, 24
    draw = torch.Generator().manual_seed(rows)
    a_BM, x_BN = (torch.randn(rows, width, generator=draw, dtype=torch.float64) for width in (out_features, 5))
    model = Linear(a_BM, x_BN)
    optimizer = tezo.lozo(model, rank=rank, lr=0.0, rho=1.0, lazy_update_interval=None, directions="per-example")
    found = []
    for _ in range(steps):
        optimizer.refresh()
        (direction,) = optimizer.draw().directions["layer.weight"]
        u_BMR = direction.draw(range(rows))
        optimizer.step(model.losses)
        kappa = torch.tensor(optimizer.last_step.projected_grads, dtype=torch.float64)
        found.append(torch.einsum("b,bmr->mr", kappa, u_BMR.double()) / rows)
    c_BMR = torch.einsum("bm,bn,nr->bmr", a_BM, x_BN, direction.v_NR.double())
    mean, spread = c_BMR.mean(0), c_BMR.var(0, correction=0).sum()
    norm = mean.square().sum()
    variance = (out_features * rank - rank) * (norm + spread) / rows + (rank + 1) * norm
    estimates = torch.stack(found)
    deviations = (estimates - mean).square().sum((1, 2))
    assert float((estimates.mean(0) - mean).square().sum()) < float(variance) / steps * (1 + 5 * math.sqrt(2))
    error = 5 * float(deviations.std()) / math.sqrt(steps)  # one false alarm in a million
    assert float(deviations.mean()) == pytest.approx(float(variance), abs=error)


@pytest.mark.parametrize("form", ["nf4", "int8wo", "int8"])
@pytest.mark.parametrize("name", ["tezo-cadam", "head-feedback"])
def test_rows_of_a_packed_model_are_measured_as_one_by_one(home, form, name):
    model, ids = load_model(str(home / "wide"), quantization=form).model, tokens(batch=3, seed=1)
    optimizer = METHODS[name].build(model, rank=4, lr=0.0, rho=0.1, basis="gaussian", directions="per-example")
    optimizer.refresh()
    draw = optimizer.draw()
    optimizer.step(row_losses(model, ids))
    kappas = optimizer.last_step.projected_grads
    optimizer.close()

    def alone(i, scale):
        handles = []
        for target in optimizer.targets:
            (direction,) = draw.directions[target.name]
            left, right = direction.with_coefficient(direction.draw([i])[0]).factors()
            handles.append(target.sites[0].module.register_forward_hook(
                lambda _, args, out, left=left, right=right: out + scale * args[0] @ right @ left.T))  # fmt: skip
        with torch.no_grad():
            loss = float(row_losses(model, ids[i : i + 1])())
        for handle in handles:
            handle.remove()
        return loss

    expected = [(alone(i, 0.1) - alone(i, -0.1)) / 0.2 for i in range(3)]
    # int8 rounds the inputs of a layer, so a last bit there may move a whole step of its grid
    assert kappas == pytest.approx(expected, rel=1e-3, abs=0.05 * max(map(abs, expected)) if form == "int8" else 1e-4)


@pytest.mark.parametrize("name", ["tezo-cadam", "lozo"])
def test_decay_and_frozen_factors_take_them_too(name):
    model, ids = tiny_opt(), tokens(batch=4, seed=1)
    options = {"rank": 3, "lr": 1e-2, "weight_decay": 0.1, "lazy_update_interval": 3, "frozen_rank": 4}
    optimizer = METHODS[name].build(model, directions="per-example", **options)
    base = {key: value.clone() for key, value in model.named_parameters()}
    for _ in range(7):
        optimizer.refresh()
        draw = optimizer.draw()  # at a refresh the change so far moves into the frozen factors
        plain = copy.deepcopy(tiny_opt())
        plain.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        expected = literal_kappas(plain, draw, lambda other: row_losses(other, ids)(), 4)
        optimizer.step(row_losses(model, ids))
        assert optimizer.last_step.projected_grads == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert all(torch.equal(base[key], value) for key, value in model.named_parameters())


def test_rows_that_read_each_other_are_refused_at_the_first_step():
    model, ids = tiny_opt(), tokens(batch=4, seed=1)
    optimizer = tezo.tezo(model, rank=4, lr=1e-2, directions="per-example")

    def centred():
        losses = row_losses(model, ids)()
        return losses - losses.mean()

    with pytest.raises(RequestError, match="depends on other rows of the batch"):
        optimizer.step(centred)
    assert optimizer.num_steps == 0 and not any(moving.state() for moving in optimizer.parameters.values())


class Sideways(nn.Module):
    """Has the tokens of a batch before its rows, so that with as many rows as tokens the shapes don't tell."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 8, dtype=torch.float64)
        self.layer = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, input_ids):
        return self.layer(self.embed(input_ids).transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(("rows", "reason"), [(4, "does not see one row for each example"), (6, "in another order")])
def test_rows_that_a_layer_has_in_another_order_are_refused(rows, reason):
    model, ids = Sideways(), tokens(batch=rows, length=6, seed=1)
    optimizer = tezo.tezo(model, rank=4, lr=1e-2, targets=["layer"], directions="per-example")
    with pytest.raises(RequestError, match=reason):
        optimizer.step(lambda: model(ids).square().mean((1, 2)))


def test_experts_are_left_to_their_rows_or_refused():
    model, ids = tiny_moe(), tokens(batch=3, seed=1)
    plain = copy.deepcopy(model)
    optimizer = tezo.tezo(model, rank=3, lr=0.0, rho=RHO, directions="per-example")
    optimizer.refresh()
    draw = optimizer.draw()
    optimizer.step(row_losses(model, ids))
    expected = literal_kappas(plain, draw, lambda other: row_losses(other, ids)(), 3)
    assert optimizer.last_step.projected_grads == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", [name for name in CASES if name not in LOW_RANK])
def test_dense_noise_is_refused(name):
    has = "directions" in METHODS[name].options()
    said = r"per-example, which .* cannot have at bounded memory" if has else r"directions: .* no such option"
    with pytest.raises(RequestError, match=said):
        METHODS[name].build(tiny_opt(), directions="per-example", **CASES[name].options)


def test_wrong_requests_are_sentences():
    model, ids = tiny_opt(), tokens(batch=4, seed=1)
    with pytest.raises(RequestError, match=r"method\.directions is 'rows'"):
        tezo.tezo(model, rank=4, directions="rows")
    with pytest.raises(RequestError, match="cannot have at bounded memory"):
        tezo.tezo(model, rank=4, directions="per-example", in_forward=False)
    optimizer = tezo.tezo(model, rank=4, directions="per-example")
    with pytest.raises(RequestError, match="did not return the loss of each row"):
        optimizer.step(lm_loss(model, ids))
    with pytest.raises(RequestError, match="returned 3 losses of 4 rows"):
        optimizer.step(lambda: row_losses(model, ids)()[:3])
    optimizer.close()
    shared = tezo.tezo(model, rank=4)
    with pytest.raises(RequestError, match=r"the closure returned 4 losses.*directions='per-example'"):
        shared.step(row_losses(model, ids))
    regression = Regression()
    tezo.tezo(regression, rank=2, lr=1e-3).step(regression.loss)


# --- noise with signs of each example


@pytest.mark.parametrize(("build", "targets"), [(tiny_opt, ("all",)), (tiny_gpt2, ("all", "!*wpe*"))])
def test_a_matrix_of_noise_is_measured_with_the_signs_of_each_row(monkeypatch, build, targets):
    monkeypatch.setattr(spaces, "TILE", 500)  # several tiles a matrix
    model, ids = build(), tokens(batch=5, seed=1)
    plain, lr = copy.deepcopy(model), 0.1
    optimizer = grzo(model, lr=lr, rho=RHO, targets=targets)
    optimizer.refresh()
    draw = optimizer.draw()
    kappas = literal_kappas(plain, draw, lambda other: row_losses(other, ids)(), 5)
    expected = [kappa / statistics.pstdev(kappas) for kappa in kappas]
    optimizer.step(row_losses(model, ids))
    assert optimizer.last_step.projected_grads == pytest.approx(expected, rel=1e-4)
    assert optimizer.last_step.forward_passes == 2 + 2
    for i, kappa in enumerate(expected):
        moved(plain, draw, i, -lr * kappa / 5)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_noise_with_signs_is_standard_normal_and_uncorrelated_between_examples():
    count, (target,) = 4000, select_targets(Linear(torch.zeros(1, 4), torch.zeros(1, 3)), ("all",))
    drawn = []
    for step in range(count):
        direction = DenseSigned().direction(target, DrawKey(7, step), {})
        signs = direction.signs(range(3))
        drawn.append(signs[0].unsqueeze(2) * written(direction) * signs[1].unsqueeze(1))
    z_N3D = torch.stack(drawn).flatten(2)
    assert torch.equal(z_N3D[:, 0].unflatten(1, (4, 3))[-1], written(direction))
    products_NXX = torch.einsum("nid,nje->nidje", z_N3D, z_N3D).flatten(1, 2).flatten(2) - torch.eye(36)
    errors = products_NXX.mean(0) / (products_NXX.std(0) / math.sqrt(count))
    assert float(errors.abs().max()) < 5.2, "666 products, in all 1.3e-4"
    factors = torch.randn(3, generator=torch.Generator().manual_seed(0)).tolist()
    whole = torch.cat([values.clone() for _, values in direction.tiles(factors)])
    parts = sum(factor * z for factor, z in zip(factors, drawn[-1], strict=True))
    torch.testing.assert_close(whole, parts)


def test_rows_without_a_spread_take_no_step():
    model, ids = tiny_opt(), tokens(batch=1, seed=1)
    before = copy.deepcopy(model)
    optimizer = grzo(model, lr=0.1)
    optimizer.step(row_losses(model, ids))
    assert optimizer.last_step.projected_grads == (0.0,)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    with pytest.raises(RequestError, match=r"method\.directions is shared; grzo is defined for per-example only"):
        grzo(tiny_opt(), directions="shared")


# --- runs


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = model_and_rows(tmp_path_factory.mktemp("home"), 10)
    tokenizer = tokenizer_for("opt")
    wide = tiny_model("opt", len(tokenizer), hidden_size=64, word_embed_proj_dim=64, ffn_dim=128)
    saved(wide, tokenizer, home / "wide")
    return home


def run_of(home, method="tezo-cadam", **settings):
    tree = to_tree(config(home, method, **settings))
    return parse_config(tree | {"method": tree["method"] | {"directions": "per-example"}})


@pytest.mark.parametrize(
    "name", mostly_slow([*(name for name in LOW_RANK if "tezo" in name or "lozo" in name), "grzo"], "lozo-m", "grzo")
)
def test_a_run_goes_on_to_the_bit_and_is_replayed(home, tmp_path, name):
    made = run_of(home, name)
    train(made, tmp_path / "whole")
    steps = read_log(tmp_path / "whole" / LOG).steps
    assert all(len(record.probes) == 4 for record in steps), "one for each row of a batch"
    for step in (0, 4, STEPS - 1):
        stopped(made, tmp_path / "run", step)
    train(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    replay(tmp_path / "run", tmp_path / "again")
    assert same(result(tmp_path / "again"), result(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_take_the_steps_of_one_process(home, tmp_path):
    made = run_of(home, batch_size=5, keep_best=False)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_config(made))
    done = forked("ranked", path, tmp_path / "run", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    train(made, tmp_path / "alone")
    runs = [read_log(tmp_path / name / LOG).steps for name in ("run", "alone")]
    for one, other in zip(*runs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5) and len(one.probes) == 5
        assert one.projected_grads == pytest.approx(other.projected_grads, abs=5e-3)


def auto(home, method="head-feedback", **settings):
    return config(home, method, **settings)


def test_a_run_of_ours_gives_each_example_its_own_unless_told_otherwise(home):
    for name in (name for name, each in METHODS.items() if not each.takes_answers):
        chosen = prepare(config(home, name)).config.method.options.get("directions", "shared")
        assert chosen == ("per-example" if name in ("head-feedback", "grzo") else "shared"), name
    told = auto(home)
    tree = to_tree(told)
    told = parse_config(tree | {"method": tree["method"] | {"directions": "shared"}})
    assert prepare(told).config == prepare(prepare(told).config).config
    assert prepare(told).config.method.options["directions"] == "shared"


@pytest.mark.parametrize("setting", [{"objective": "accuracy"}, {"parallel": "directions"}])
def test_a_run_shares_directions_where_rows_have_no_losses_of_their_own(home, setting):
    job = prepare(auto(home, **setting))
    assert job.config.method.options["directions"] == "shared" and not any(
        n.startswith("directions") for n in job.notices
    )


def test_a_run_shares_directions_where_each_row_would_need_the_labels_again(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", label_rows(12))
    for family, chosen in (("bert", "shared"), ("opt", "per-example")):
        settings = [("model.name", str(model_folder(tmp_path, family))), ("data.train", str(rows))]
        settings.append(("method.name", "head-feedback"))
        assert prepare(parse_config(overlay({}, settings))).config.method.options["directions"] == chosen


def test_a_run_shares_directions_where_a_trial_is_refused_and_says_why(home, tmp_path, monkeypatch):
    def refuse(*_):
        raise NotInBlocksError

    monkeypatch.setattr(Blocks, "split", refuse)
    job = prepare(auto(home).with_options(rho=1e-3))
    monkeypatch.undo()
    assert job.config.method.options["directions"] == "shared"
    (notice,) = [notice for notice in job.notices if "directions" in notice]
    assert notice.startswith("directions are shared by the rows of a batch: ") and "experts" in notice
    assert job.optimizer.num_steps == 0
    for _ in range(2):
        job.optimizer.step(job.objective.closure(job.model, job.batches([0, 1])))


def test_what_has_no_loss_for_each_row_is_refused(home, tmp_path):
    with pytest.raises(RequestError, match=r"method\.directions is per-example, and train\.objective is accuracy"):
        train(run_of(home, objective="accuracy"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
