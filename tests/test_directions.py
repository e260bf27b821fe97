"""The direction a step takes is the one that was measured; and what a direction is."""

import random
from dataclasses import replace

import pytest
import torch
from cases import CASES, INTERVAL, ONE_OF_EACH_KIND, choose, every_method
from hypothesis import given
from hypothesis import strategies as st
from tiny import lm_loss, tiny_opt, tokens
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tezo.directions.random import DrawKey
from tezo.directions.spaces import CP, Core, Dense, Direction, FixedCoefficient, LowRank, TransposedLowRank
from tezo.directions.targets import select_targets
from tezo.optim.optimizer import ZerothOrderOptimizer

STEPS = 2 * INTERVAL + 2
RHO = 1e-3


def shown(optimizer: ZerothOrderOptimizer) -> dict[str, Tensor]:
    """Every tuned parameter as the model's own forward pass has it now, hooks included."""
    seen = {}
    for target in optimizer.targets:
        module, parameter = target.sites[0].module, target.parameter
        eye = torch.eye(max(parameter.shape), dtype=parameter.dtype)
        if type(module) is nn.Linear and parameter.ndim == 2:
            seen[target.name] = affine(module, eye[: parameter.shape[1], : parameter.shape[1]]).T
        elif type(module) is Conv1D and parameter.ndim == 2:
            seen[target.name] = affine(module, eye[: parameter.shape[0], : parameter.shape[0]])
        elif type(module) is nn.Embedding:
            seen[target.name] = module(torch.arange(parameter.shape[0]))
        elif type(module) is nn.LayerNorm:
            seen[target.name] = shown_norm(module)[target.name.rpartition(".")[2]]
        elif isinstance(module, nn.Linear) and parameter.ndim == 1:
            seen[target.name] = module(torch.zeros(1, module.in_features, dtype=parameter.dtype))[0]
        elif target.name.endswith("embed_positions.weight"):
            ids = torch.arange(parameter.shape[0]).unsqueeze(0)
            seen[target.name] = module(torch.ones_like(ids), position_ids=ids - module.offset)[0]
        else:
            seen[target.name] = parameter.detach().clone()
    return seen


def shown_norm(norm: nn.LayerNorm) -> dict[str, Tensor]:
    """The weight and bias that a LayerNorm of even width answers with, from two inputs of variance 1."""
    x = torch.ones(1, norm.normalized_shape[0], dtype=norm.weight.dtype)
    x[:, ::2] = -1
    plus, minus = norm(x)[0], norm(-x)[0]
    normalized = nn.functional.layer_norm(x, x.shape[1:], eps=norm.eps)[0]
    return {"bias": (plus + minus) / 2, "weight": (plus - minus) / 2 / normalized}


def affine(module: nn.Module, x: Tensor) -> Tensor:
    """What the module adds to its answer to zero."""
    return module(x) - module(torch.zeros_like(x))


class Observer:
    """Takes steps and records what the model computed with: before, at +rho, at -rho, after."""

    def __init__(self, optimizer: ZerothOrderOptimizer) -> None:
        self.optimizer = optimizer
        self.loss = lm_loss(optimizer.model, tokens())

    @torch.no_grad()
    def step(self) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
        """(Z as it was shown, change of the weights, kappa), and the three agree with one another."""
        observed: list[dict[str, Tensor]] = []

        def closure() -> Tensor:
            observed.append(shown(self.optimizer))
            return self.loss()

        before = shown(self.optimizer)
        self.optimizer.step(closure)
        after = shown(self.optimizer)
        plus, minus = observed
        z = {name: (plus[name] - before[name]) / RHO for name in before}
        for name in before:
            torch.testing.assert_close((before[name] - minus[name]) / RHO, z[name], rtol=1e-9, atol=1e-9)
        change = {name: after[name] - before[name] for name in before}
        return z, change, self.optimizer.last_step.probes[0].projected_grad


def shuffle(optimizer: ZerothOrderOptimizer, step: int) -> None:
    items = list(optimizer.parameters.items())
    random.Random(step).shuffle(items)
    optimizer.parameters.clear()
    optimizer.parameters.update(items)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.mark.thinned
@pytest.mark.parametrize("targets", ["all-linear", "all"])
@pytest.mark.parametrize("in_forward", [True, False], ids=["in_forward", "in_place"])
@choose("mezo", "lozo", "subzo", "tezo")
def test_every_plain_step_is_along_the_direction_measured(case, targets, in_forward):
    lr = 1e-2
    optimizer = case.build(tiny_opt(), lr=lr, rho=RHO, targets=(targets,), in_forward=in_forward)
    observer = Observer(optimizer)
    for step in range(STEPS):
        shuffle(optimizer, step)  # nothing may hang on the order of the parameters
        z, change, kappa = observer.step()
        for name in z:
            assert z[name].norm() > 0.1
            assert cosine(change[name], z[name]) * (-1 if kappa > 0 else 1) > 1 - 1e-9, (name, step)
            torch.testing.assert_close(change[name], -lr * kappa * z[name], rtol=1e-8, atol=1e-10)


@choose("mezo-m", "tezo-m", "lozo-m")
def test_momentum_averages_the_directions_measured(case):
    lr, beta = 1e-2, 0.7
    optimizer = case.build(tiny_opt(), lr=lr, rho=RHO, targets=("all",), beta=beta)
    observer = Observer(optimizer)
    average: dict[str, Tensor] = {}
    for step in range(INTERVAL if case.name == "lozo-m" else STEPS):  # lozo-m projects it at a refresh
        shuffle(optimizer, step)
        z, change, kappa = observer.step()
        for name in z:
            old = average.get(name, torch.zeros_like(z[name]))
            average[name] = beta * old + (1 - beta) * kappa * z[name]
            torch.testing.assert_close(change[name], -lr * average[name], rtol=1e-8, atol=1e-10)


def test_at_a_refresh_momentum_is_projected_and_the_new_direction_is_the_one_measured():
    # M V_old^T V_new / E[V^T V], then V_new^T: between two bases, the change before mapped by V_new V_new^T.
    lr, beta, rank = 1e-2, 0.7, 3
    optimizer = CASES["lozo-m"].build(tiny_opt(), lr=lr, rho=RHO, beta=beta, rank=rank, scale="unit")
    observer = Observer(optimizer)
    for _ in range(INTERVAL):
        _, before, _ = observer.step()
    z, change, kappa = observer.step()
    for name, moving in optimizer.parameters.items():
        v_NR = moving.change.v_NR
        onto_new = v_NR @ v_NR.T / (v_NR.shape[0] / rank)
        expected = beta * before[name] @ onto_new - lr * (1 - beta) * kappa * z[name]
        torch.testing.assert_close(change[name], expected, rtol=1e-8, atol=1e-10)


def test_dense_adam_averages_the_directions_measured():
    lr, (b1, b2), eps = 1e-2, (0.9, 0.999), 1e-8
    optimizer = CASES["mezo-adam"].build(tiny_opt(), lr=lr, rho=RHO, targets=("all",))
    observer = Observer(optimizer)
    m: dict[str, Tensor] = {}
    v: dict[str, Tensor] = {}
    for t in range(1, 6):
        shuffle(optimizer, t)
        z, change, kappa = observer.step()
        for name in z:
            g = kappa * z[name]
            m[name] = b1 * m.get(name, 0 * g) + (1 - b1) * g
            v[name] = b2 * v.get(name, 0 * g) + (1 - b2) * g.square()
            expected = -lr * (m[name] / (1 - b1**t)) / ((v[name] / (1 - b2**t)).sqrt() + eps)
            torch.testing.assert_close(change[name], expected, rtol=1e-6, atol=1e-9)


@choose("tezo-adam", "tezo-cadam", "zo-adamu")
def test_the_first_adaptive_step_is_the_closed_form_of_the_direction_measured(case):
    # With rank 1, V = tau_V u^2 v^2 is the average of (kappa Z)^2 itself.
    lr, eps = 1e-2, 1e-8 if case.name == "zo-adamu" else 1e-5
    optimizer = case.build(tiny_opt(), lr=lr, rho=RHO, eps=eps, **({"rank": 1} if case.low_rank else {}))
    z, change, kappa = Observer(optimizer).step()
    for name in z:
        g = kappa * z[name]
        if case.name == "tezo-adam":
            expected = -lr * 0.1 * g / torch.sqrt(0.01 * g.square() + eps)
            torch.testing.assert_close(change[name], expected, rtol=1e-7, atol=1e-10)
        elif case.name == "zo-adamu":  # the annealed coefficients start at 1: z is fresh noise, v its square
            torch.testing.assert_close(
                change[name], -lr * g / torch.sqrt(z[name].square() + eps), rtol=1e-7, atol=1e-10
            )
        else:  # the quotient is of numbers, so the step keeps the direction and loses the size
            assert cosine(change[name], g) < -1 + 1e-9


@choose("tezo-adam", "mezo-adam", "zo-adamu")
def test_the_first_adaptive_step_goes_against_the_measured_direction_in_every_entry(case):
    z, change, kappa = Observer(case.build(tiny_opt(), rho=RHO)).step()
    for name in z:
        clear = z[name].abs() > 1e-6
        assert torch.equal(torch.sign(change[name])[clear], -torch.sign(kappa * z[name])[clear])


@every_method
def test_a_direction_is_a_function_of_seed_step_and_index(case):
    def draws(order: list[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
        model = nn.Sequential(nn.Linear(4, 5, bias=False, dtype=torch.float64))
        model.load_state_dict({"0.weight": weight})
        optimizer = case.build(model, seed=order[0][0])
        (target,) = optimizer.targets
        return {key: dense_z(optimizer.perturbation.direction(target, DrawKey(*key), {}), 5, 4) for key in order}

    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = [(seed, step) for seed in (0, 1) for step in (0, 1, INTERVAL, 2 * INTERVAL + 1)]
    forwards, backwards = draws(keys), draws(keys[::-1])
    alone = {key: draws([key])[key] for key in keys}
    for key in keys:
        assert torch.equal(forwards[key], alone[key]), f"(seed, step) {key} depends on what was drawn before it"
        assert torch.equal(backwards[key], alone[key]), f"(seed, step) {key} depends on what was drawn before it"
    assert len({tuple(z.flatten().tolist()) for z in alone.values()}) == len(keys)


def dense_z(direction: Direction, rows: int, columns: int) -> Tensor:
    z = torch.zeros(rows, columns, dtype=torch.float64)
    direction.add_to_(z, 1.0)
    return z


@pytest.mark.parametrize(
    ("name", "options", "variance"),
    [
        pytest.param(
            name, {"scale": "unit"} if case.low_rank else {}, 1.0,
            marks=() if name in ONE_OF_EACH_KIND else pytest.mark.slow,
        )
        for name, case in CASES.items()
    ]
    + [("tezo", {"scale": "raw"}, 3.0), ("lozo", {"scale": "raw"}, 3.0), ("subzo", {"scale": "raw"}, 9 / 20)],
)  # fmt: skip
def test_every_entry_of_z_has_the_stated_mean_and_variance(name, options, variance):
    # Per entry, the mean of K draws lies within 5.5 standard errors (two-sided 4e-8 for a normal; 20 entries).
    model = nn.Sequential(nn.Linear(4, 5, bias=False, dtype=torch.float64))
    optimizer = CASES[name].build(model, rank=3, **options) if CASES[name].low_rank else CASES[name].build(model)
    (target,) = optimizer.targets
    draws = torch.stack(
        [dense_z(optimizer.perturbation.direction(target, DrawKey(seed, 0), {}), 5, 4) for seed in range(2000)]
    )
    perturbed = draws.ne(0).any(dim=0)  # a sparse method leaves the others alone
    assert perturbed.sum() == 20 * (1 - CASES[name].options.get("sparsity", 0))
    draws = draws[:, perturbed]
    for samples, expected in ((draws, 0.0), (draws.square(), variance)):
        standard_error = samples.std(dim=0) / len(samples) ** 0.5
        assert (standard_error < 0.1 * variance).all(), "too few samples to show anything"
        assert ((samples.mean(dim=0) - expected).abs() <= 5.5 * standard_error).all()  # signs: the square is 1


sizes = st.integers(1, 9)


@given(kind=st.sampled_from(["cp", "low-rank", "core"]), m=sizes, n=sizes, r=st.integers(1, 4), seed=sizes)
def test_the_four_ways_to_use_a_direction_agree_with_its_dense_form(kind, m, n, r, seed):
    draw = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    u, v = new(m, r), new(n, r)
    coefficient = {"cp": new(r), "low-rank": u, "core": new(r, r)}[kind]
    if kind == "cp":
        point, z = (
            CP(draw=FixedCoefficient(coefficient), v_NR=v, refresh_step=0, u_MR=u),
            torch.einsum("s,ms,ns->mn", coefficient, u, v),
        )
    elif kind == "core":
        point, z = Core(draw=FixedCoefficient(coefficient), v_NR=v, refresh_step=0, u_MR=u), u @ coefficient @ v.T
    else:
        point, z = LowRank(draw=FixedCoefficient(u), v_NR=v, refresh_step=0, gram=1.0), u @ v.T
    left, right = point.factors()
    x, x_transposed, ids = new(2, 3, n), new(2, 3, m), torch.randint(m, (2, 3), generator=draw)
    weight = new(m, n)
    moved = weight.clone()
    point.add_to_(moved, -0.3)
    torch.testing.assert_close(left @ right.T, z)
    left, right = point.split_factors()
    torch.testing.assert_close(left @ right.T, z)
    torch.testing.assert_close(moved, weight - 0.3 * z)
    # Linear in the coefficient: what momenta and accumulated changes rest on.
    for factor, used in ((1, point), (2, point.with_coefficient(2 * coefficient))):
        for add_, inputs, expected in (
            (used.add_linear_, x, x @ z.T),
            (used.add_transposed_, x_transposed, x_transposed @ z),
            (used.add_lookup_, ids, z[ids]),
        ):
            out = new(*expected.shape)
            before = out.clone()
            add_(out, inputs)
            torch.testing.assert_close(out, before + factor * expected)


def test_a_low_rank_method_gives_vectors_dense_noise_and_matrices_factors():
    optimizer = CASES["tezo"].build(tiny_opt(), targets=("all",))
    for target in select_targets(optimizer.model, ("all",)):
        direction = optimizer.perturbation.direction(target, DrawKey(0, 0), {})
        assert isinstance(direction, CP if target.parameter.ndim == 2 else Dense)


@pytest.mark.parametrize(
    ("kind", "product"),
    [(LowRank, "linear"), (LowRank, "transposed"), (LowRank, "lookup"), (TransposedLowRank, "linear"),
     (TransposedLowRank, "transposed")],
)  # fmt: skip
def test_a_term_beside_scaled_points_is_added_to_each_block_once(kind, product):
    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    draw = torch.Generator().manual_seed(0)
    u, beside, v, scales = numbers(6, 2), numbers(6, 2), numbers(5, 2), (0.5, -2.0)
    point = replace(kind(draw=FixedCoefficient(u), v_NR=v, refresh_step=0, gram=1.0).scaled(scales), beside=beside)
    exact_GMN = torch.stack([(beside + scale * u) @ v.T for scale in scales])
    if kind is TransposedLowRank:
        exact_GMN = exact_GMN.mT
    rows, columns = exact_GMN.shape[1:]
    if product == "linear":
        x = numbers(2, 3, columns)
        out, expected, add_ = numbers(2, 3, rows), x @ exact_GMN.mT, point.add_linear_
    elif product == "transposed":
        x = numbers(2, 3, rows)
        out, expected, add_ = numbers(2, 3, columns), x @ exact_GMN, point.add_transposed_
    else:
        x = torch.tensor([[0, 5, 3], [3, 1, 3]])
        out, expected, add_ = numbers(2, 3, columns), exact_GMN[torch.arange(2)[:, None], x], point.add_lookup_
    before = out.clone()
    add_(out, x)
    torch.testing.assert_close(out, before + expected)
