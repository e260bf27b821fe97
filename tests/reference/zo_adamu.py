"""ZO-AdaMU (Jiang et al. 2024, Eq. 4-7 and Algorithm 1) in float64 on explicit weights.

Its public code cannot take a step (and multiplies m by sign(kappa), which the paper does not), so this is
the paper's. The exponent of its annealing, Eq. 7, cannot be read with certainty, and text and equation
disagree on the final values: `anneal` is the library's documented reading. One direction a step. Weight
decay is decoupled, on W, and for matrices only.
"""

import math
from collections.abc import Iterator

import torch
from reference.draws import Loss, Weights, dense
from torch import Tensor


def anneal(t: int, start: int, stop: int, final: float, exponent: float) -> float:
    """1 on [0, start), a cosine down to `final` on [start, stop), `final` after it (Eq. 7)."""
    if t < start:
        return 1.0
    if t >= stop:
        return final
    cosine = math.cos(math.pi * ((t - start) / (stop - start)) ** exponent)
    return final + (1 - final) * (0.5 + 0.5 * cosine)


def zo_adamu(
    weights: Weights,
    loss: Loss,
    *,
    steps: int,
    lr: float,
    rho: float,
    seed: int,
    anneal_start: int,
    anneal_stop: int,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Iterator[Weights]:
    W = {name: weight.clone() for name, weight in weights.items()}
    m = {name: torch.zeros_like(weight) for name, weight in W.items()}

    def sample(name: str, t: int, alpha: float) -> tuple[Tensor, Tensor]:
        z_dot = dense(W[name], seed, t, name, "z.0") * alpha**0.5  # Eq. 4: N(0, alpha)
        z_ddot = m[name] + dense(W[name], seed, t, name, "z.0.history") * (1 - alpha) ** 0.5  # Eq. 4: N(m, 1 - alpha)
        return z_dot, z_ddot

    def perturbation(scale: float, t: int, alpha: float, beta1: float) -> None:
        for name in W:
            z_dot, z_ddot = sample(name, t, alpha)
            W[name] = W[name] + scale * (beta1 * z_dot + (1 - beta1) * z_ddot)  # Eq. 5

    for t in range(steps):
        alpha = anneal(t, anneal_start, anneal_stop, 0.5, 1.0)
        beta1 = anneal(t, anneal_start, anneal_stop, 0.9, 0.1)
        beta2 = anneal(t, anneal_start, anneal_stop, 0.01, 1.5)
        perturbation(rho, t, alpha, beta1)
        loss_plus = loss(W, t)
        perturbation(-2 * rho, t, alpha, beta1)
        loss_minus = loss(W, t)
        perturbation(rho, t, alpha, beta1)
        kappa = (loss_plus - loss_minus) / (2 * rho)
        for name in W:
            z_dot, z_ddot = sample(name, t, alpha)
            if W[name].ndim >= 2:
                W[name] = (1 - lr * weight_decay) * W[name]
            m[name] = beta1 * z_dot + (1 - beta1) * z_ddot  # Eq. 6
            v = beta2 * z_dot**2 + (1 - beta2) * z_ddot**2  # Eq. 6
            W[name] = W[name] - lr * kappa * m[name] / torch.sqrt(v + eps)  # Algorithm 1
        yield dict(W)
