"""MeZO (Malladi et al. 2023, Algorithm 1), with momentum and with Adam, in float64 on explicit weights.

MeZO-m is an exponential average from zero, the form that the TeZO paper writes for TeZO-m. MeZO-Adam is
torch's Adam, which MeZO's code uses: bias correction, eps outside the root. With q directions the step is
along the mean of their estimates (MeZO's n-SPSA). Weight decay is decoupled and for matrices only.
"""

from collections.abc import Iterator

import torch
from reference.draws import Loss, Weights, dense


def mezo(
    weights: Weights,
    loss: Loss,
    *,
    steps: int,
    lr: float,
    rho: float,
    seed: int,
    variant: str = "sgd",
    beta: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    num_directions: int = 1,
) -> Iterator[Weights]:
    W = {name: weight.clone() for name, weight in weights.items()}
    m = {name: torch.zeros_like(weight) for name, weight in W.items()}
    v = {name: torch.zeros_like(weight) for name, weight in W.items()}

    kappa_sq = 0.0

    def perturb(scale: float, t: int, i: int) -> None:  # Algorithm 1, PerturbParameters
        for name in W:  # for theta_i in theta
            z = dense(W[name], seed, t, name, f"z.{i}")  # z ~ N(0, 1), from the reset seed
            W[name] = W[name] + scale * z  # theta_i <- theta_i + eps z

    for t in range(steps):  # for t = 1, ..., T
        kappa = []
        for i in range(num_directions):
            perturb(rho, t, i)
            loss_plus = loss(W, t)  # l+ <- L(theta; B)
            perturb(-2 * rho, t, i)
            loss_minus = loss(W, t)  # l- <- L(theta; B)
            perturb(rho, t, i)  # reset parameters
            kappa.append((loss_plus - loss_minus) / (2 * rho))  # projected_grad <- (l+ - l-) / (2 eps)
        kappa_sq = beta * kappa_sq + (1 - beta) * sum(k**2 for k in kappa) / num_directions
        rms = (kappa_sq / (1 - beta ** (t + 1))) ** 0.5
        for name in W:  # reset the generator with seed s; for theta_i in theta
            z = [dense(W[name], seed, t, name, f"z.{i}") for i in range(num_directions)]  # z ~ N(0, 1)
            g = sum(k * z_i for k, z_i in zip(kappa, z, strict=True)) / num_directions
            if W[name].ndim >= 2:
                W[name] = (1 - lr * weight_decay) * W[name]
            if variant == "sgd":
                W[name] = W[name] - lr * g  # theta_i <- theta_i - eta_t projected_grad z
            if variant == "norm":  # Adam with the second moment of kappa in the place of kappa z's
                W[name] = W[name] - lr * g / (rms + eps)
            if variant == "m":
                m[name] = beta * m[name] + (1 - beta) * g
                W[name] = W[name] - lr * m[name]
            if variant == "adam":  # Kingma and Ba, Algorithm 1
                m[name] = betas[0] * m[name] + (1 - betas[0]) * g
                v[name] = betas[1] * v[name] + (1 - betas[1]) * g**2
                m_hat = m[name] / (1 - betas[0] ** (t + 1))
                v_hat = v[name] / (1 - betas[1] ** (t + 1))
                W[name] = W[name] - lr * m_hat / (torch.sqrt(v_hat) + eps)
        yield dict(W)
