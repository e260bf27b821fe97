"""The random numbers of the library's documented draw, by their keys; everything else here is arithmetic.

A draw is a function of (seed, step, parameter name, role). Roles of fresh draws end in the index of the
direction within its step. All of them are called again wherever a listing resets its seed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tezo.numerics import random

Weights = dict[str, Tensor]
Loss = Callable[[Weights, int], float]
"""f(W, xi_t): the objective as a function of explicit weights and of the step's batch."""


def keyed(shape: tuple[int, ...], seed: int, step: int, name: str, role: str) -> Tensor:
    """Standard normal numbers for factors, temporal factors and cores."""
    return random.normal(shape, seed=seed, step=step, name=name, role=role)


def dense(weight: Tensor, seed: int, step: int, name: str, role: str) -> Tensor:
    """Standard normal noise of the shape of a matrix or a vector."""
    # one tile, which starts at row 0: no weight of these tests is larger
    return fresh(tuple(weight.shape), seed, step, name, f"{role}.0")


def fresh(shape: tuple[int, ...], seed: int, step: int, name: str, role: str) -> Tensor:
    """Standard normal numbers for a factor that is drawn every step."""
    out = torch.empty(shape, dtype=torch.float64)
    return random.fill_normal_(out, seed=seed, step=step, name=name, role=role)
