"""Each method against its published algorithm in float64, and what is particular about the published algorithms.

`algorithms.ALGORITHMS` has what ours deviates in on purpose. Fifty steps for every method, and fifteen, which pass two
refreshes, for each further setting.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithms import ALGORITHMS, KeyedDraws
from cases import (
    CASES,
    INTERVAL,
    OF_A_LOSS,
    RANK,
    Case,
    effective_weights,
    every_method_fast_for_kinds,
    mostly_slow,
)
from tezo_studies.bench.published import PUBLISHED, TorchDraws
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.workload import Work
from tiny import lm_loss, tiny_gpt2, tiny_llama, tiny_opt, tokens
from torch import Tensor, nn

from tezo.directions.targets import select_targets
from tezo.methods import METHODS

LONG, SHORT = 50, 15
RHO, SEED, DECAY = 1e-3, 11, 0.5
LRS = dict.fromkeys(("mezo-adam", "head-feedback", "mezo-norm", "tezo-adam", "tezo-cadam", "fzoo"), 1e-3) | {
    "zo-adamu": 1e-5
}


def kept_beside(case: Case, names: list[str]) -> set[str]:
    """Matrices whose change the library keeps beside the base."""
    return set() if not case.low_rank or case.name == "tezo-adam" else set(names)


def compare(case: Case, make: Callable[[], nn.Module], targets: tuple[str, ...], steps: int, **options: Any) -> None:
    lr, model, other = LRS.get(case.name, 1e-4), make(), make()
    optimizer = case.build(model, lr=lr, rho=RHO, seed=SEED, targets=targets, weight_decay=DECAY, **options)
    start = effective_weights(optimizer)
    algorithm = ALGORITHMS[case.name](
        [(target.name, target.parameter) for target in select_targets(other, targets)],
        lr=lr, rho=RHO, rank=RANK, interval=case.options.get("lazy_update_interval", steps),
        draws=KeyedDraws(SEED, unit=({**METHODS[case.name].defaults(), **options}).get("scale") != "raw"),
    )  # fmt: skip
    algorithm.decay, algorithm.num_directions = DECAY, (case.options | options).get("num_directions", 1)
    algorithm.beside = kept_beside(case, list(start)) if options.get("in_forward", True) else ()
    for step in range(steps):
        optimizer.step(lm_loss(model, tokens(seed=step)))
        algorithm.step(lm_loss(other, tokens(seed=step)))
        assert algorithm.kappas == pytest.approx(optimizer.last_step.projected_grads, rel=1e-6, abs=1e-9)
        if step % 10 == 9 or step == steps - 1:
            expected = {name: weight.data.view(start[name].shape) for name, weight in algorithm.parameters}
            assert_equal_weights(effective_weights(optimizer), expected, start, f"{case.name} at step {step}")


def assert_equal_weights(
    actual: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor], what: str
) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        moved = (weight - start[name]).norm()
        assert moved > 1e-6 * weight.norm(), f"{what}: the algorithm left {name} where it was; this shows nothing"
        assert (actual[name] - weight).norm() <= 1e-9 * weight.norm(), f"{what}: {name}"
        # Of the distance moved, too: it is a small part of the weight.
        assert (actual[name] - weight).norm() <= 1e-6 * moved, f"{what}: {name}, of the distance moved"


def test_there_is_an_algorithm_for_every_method():
    assert ALGORITHMS.keys() == OF_A_LOSS
    assert PUBLISHED.keys() == {name for name, method in METHODS.items() if method.in_paper}


@pytest.mark.parametrize("targets", ["all-linear", pytest.param("all", marks=pytest.mark.slow)])
@every_method_fast_for_kinds
def test_the_trajectory_is_the_published_algorithms(case, targets):
    compare(case, tiny_opt, (targets,), LONG)


@pytest.mark.parametrize("name", ["tezo-adam", "lozo-m"])
def test_the_trajectory_is_the_published_algorithms_on_a_llama_with_tied_embeddings(name):
    compare(CASES[name], lambda: tiny_llama(tied=True), ("all",), LONG)


@pytest.mark.parametrize("name", ["tezo-m", "subzo"])
def test_the_trajectory_is_the_published_algorithms_on_transposed_layers(name):
    compare(CASES[name], lambda: tiny_gpt2(tied=True), ("all",), LONG)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.low_rank])
def test_the_raw_scale_is_the_algorithm_to_the_letter(name):
    compare(CASES[name], tiny_opt, ("all-linear",), SHORT, scale="raw")


@pytest.mark.parametrize(
    "name", mostly_slow(["mezo-adam", "mezo-norm", "lozo-m", "subzo", "tezo-adam"], "mezo-norm", "tezo-adam")
)
def test_two_directions_a_step_are_averaged(name):
    compare(CASES[name], tiny_opt, ("all",), SHORT, num_directions=2)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.low_rank])
def test_the_trajectory_in_place_is_the_published_algorithms(name):
    compare(CASES[name], tiny_opt, ("all-linear",), SHORT, in_forward=False)


def test_lozo_m_begins_at_kappa_u_as_in_the_public_code():
    model, other = tiny_opt(), tiny_opt()
    optimizer = CASES["lozo-m"].build(model, lr=1e-4, rho=RHO, seed=SEED, scale="raw")
    start = effective_weights(optimizer)
    parameters = [(target.name, target.parameter) for target in select_targets(other)]
    options = {"lr": 1e-4, "rho": RHO, "rank": RANK, "interval": INTERVAL}
    algorithm = PUBLISHED["lozo-m"](parameters, draws=KeyedDraws(SEED, unit=False), **options)
    optimizer.step(lm_loss(model, tokens()))
    algorithm.step(lm_loss(other, tokens()))
    ours = effective_weights(optimizer)
    for name, parameter in parameters:  # ours is (1 - beta) kappa U
        torch.testing.assert_close((parameter.data - start[name]) * (1 - algorithm.beta), ours[name] - start[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_pass_draws_what_the_pass_before_it_drew(name):
    # Only then do +1, -2, +1 cancel; torch's global stream is reset by seed.
    model = Work(Settings(model="tiny", dtype="float64", batch=1, length="8")).model
    parameters = [(t.name, t.parameter) for t in select_targets(model, ("all",))]
    algorithm = PUBLISHED[name](parameters, lr=0.0, rank=RANK, interval=INTERVAL)
    before = [parameter.data.clone() for _, parameter in parameters]
    for _ in range(2):
        algorithm.step(lambda: next(model.parameters()).sum())
    for (key, parameter), old in zip(parameters, before, strict=True):
        assert (parameter.data - old).abs().max() < 1e-12, key


def test_the_default_draws_are_torchs_own():
    draws, like = TorchDraws(), torch.empty(0, dtype=torch.float64)
    draws.reset(3)
    first = draws.normal("a", "z", (2, 5), like)
    torch.manual_seed(3)
    assert torch.equal(first, torch.normal(0, 1, (2, 5), dtype=torch.float64))
    basis = draws.basis("a", "u", (7, 3), like)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=torch.float64), atol=1e-5, rtol=0)


def test_lozos_update_at_a_refresh_sees_another_u_as_in_the_public_code():
    parameter = torch.nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    algorithm = PUBLISHED["lozo"]([("w", parameter)], lr=1.0, rho=1.0, rank=2, interval=3)
    towards = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for step in range(4):
        old = parameter.data.clone()
        algorithm.draws.reset(step)
        algorithm.refresh("w", parameter)
        measured = algorithm.direction("w", parameter)
        kappa = algorithm.step(lambda: (towards * parameter.data).sum())
        along = torch.allclose(parameter.data - old, -kappa * measured)
        assert along == (step % 3 != 0)
