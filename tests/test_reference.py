"""Each method against a literal transcription of its published algorithm, in float64.

Fifty steps for every method, and fifteen, which pass two refreshes, for each further setting.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import CASES, INTERVAL, RANK, Case, effective_weights, every_method
from reference.draws import Loss, Weights
from reference.lozo import lozo
from reference.mezo import mezo
from reference.subzo import subzo
from reference.tezo import tezo
from reference.zo_adamu import zo_adamu
from tiny import lm_loss, tiny_gpt2, tiny_llama, tiny_opt, tokens
from torch import nn

from tezo.optim.methods import METHODS

LONG = 50
SHORT = 15
SEED = 11
RHO = 1e-3
DECAY = 0.5
TEZO = {"rank": RANK}

REFERENCES: dict[str, tuple[Callable[..., Iterator[Weights]], dict[str, Any]]] = {
    "mezo": (mezo, {"variant": "sgd"}),
    "mezo-m": (mezo, {"variant": "m"}),
    "mezo-adam": (mezo, {"variant": "adam"}),
    "mezo-norm": (mezo, {"variant": "norm", "beta": 0.99}),
    "lozo": (lozo, {"rank": RANK, "nu": INTERVAL}),
    "lozo-m": (lozo, {"rank": RANK, "nu": INTERVAL, "variant": "m"}),
    "lozo-adam": (lozo, {"rank": RANK, "nu": None, "variant": "adam"}),
    "subzo": (subzo, {"rank": RANK, "interval": INTERVAL}),
    "zo-adamu": (zo_adamu, {"anneal_start": 3, "anneal_stop": 12}),
    "tezo": (tezo, {"variant": "tezo", **TEZO}),
    "tezo-m": (tezo, {"variant": "tezo-m", **TEZO}),
    "tezo-adam": (tezo, {"variant": "tezo-adam", **TEZO}),
    "tezo-cadam": (tezo, {"variant": "tezo-cadam", **TEZO}),
}
LRS = {"mezo-adam": 1e-3, "lozo-adam": 1e-3, "mezo-norm": 1e-3, "tezo-adam": 1e-3, "tezo-cadam": 1e-3, "zo-adamu": 1e-5}


def batch(step: int) -> torch.Tensor:
    return tokens(seed=step)


def loss_of_weights(model: nn.Module) -> Loss:
    """The model's loss as a function of explicit weights, tied ones given once."""

    def loss(weights: Weights, step: int) -> float:
        shaped = {name: weight.view_as(model.get_parameter(name)) for name, weight in weights.items()}
        with torch.no_grad():
            ids = batch(step)
            logits = torch.func.functional_call(model, shaped, (), {"input_ids": ids}).logits
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()

    return loss


def kept_beside(case: Case, names: list[str]) -> set[str]:
    """Matrices whose change the library keeps beside the base."""
    return set() if not case.low_rank or case.name == "tezo-adam" else set(names)


def compare(case: Case, make: Callable[[], nn.Module], targets: tuple[str, ...], steps: int, **options: Any) -> None:
    lr = LRS.get(case.name, 1e-4)
    model = make()
    optimizer = case.build(model, lr=lr, rho=RHO, seed=SEED, targets=targets, weight_decay=DECAY, **options)
    start = effective_weights(optimizer)
    reference, settings = REFERENCES[case.name]
    if "scale" in options:
        settings = settings | {"unit": options["scale"] == "unit"}
    if "num_directions" in options:
        settings = settings | {"num_directions": options["num_directions"]}
    if case.low_rank and options.get("in_forward", True):
        settings = settings | {"beside": kept_beside(case, list(start))}
    expected = reference(
        start, loss_of_weights(make()), steps=steps, lr=lr, rho=RHO, seed=SEED, weight_decay=DECAY, **settings
    )
    for step, weights in enumerate(expected):
        optimizer.step(lm_loss(model, batch(step)))
        if step % 10 == 9 or step == steps - 1:
            assert_equal_weights(effective_weights(optimizer), weights, start, f"{case.name} at step {step}")


def assert_equal_weights(actual: Weights, expected: Weights, start: Weights, what: str) -> None:
    for name, weight in expected.items():
        moved = (weight - start[name]).norm()
        assert moved > 1e-6 * weight.norm(), f"{what}: the reference left {name} where it was; this shows nothing"
        assert (actual[name] - weight).norm() <= 1e-9 * weight.norm(), f"{what}: {name}"
        # Of the distance moved, too: it is a small part of the weight.
        assert (actual[name] - weight).norm() <= 1e-6 * moved, f"{what}: {name}, of the distance moved"


def test_there_is_a_reference_for_every_method():
    assert REFERENCES.keys() == METHODS.keys()


@pytest.mark.parametrize("targets", ["all-linear", "all"])
@every_method
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


@pytest.mark.parametrize("name", ["mezo-adam", "mezo-norm", "lozo-m", "subzo", "tezo-adam"])
def test_two_directions_a_step_are_averaged(name):
    compare(CASES[name], tiny_opt, ("all",), SHORT, num_directions=2)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.low_rank])
def test_the_trajectory_in_place_is_the_published_algorithms(name):
    compare(CASES[name], tiny_opt, ("all-linear",), SHORT, in_forward=False)
