"""LOZO and LOZO-m (Chen et al. 2024), and our LOZO-Adam, in float64 on explicit weights.

Where the published code differs, the library and this listing follow the published formula:
- the update uses the U of the perturbation at every step; the public code draws another one whenever V is
  renewed;
- M starts at zero; the public code starts it at kappa U.
`unit` divides Z by sqrt(r), carried by V; the published form (scale="raw") does not.
1-D parameters take dense noise. Weight decay is decoupled and spares them; it shrinks what has been trained
since V was drawn of the matrices in `beside`, which the library keeps beside the base, and W elsewhere.
`nu=None` keeps the first V. LOZO-Adam, which is ours, takes Adam's quotient on kappa U, its eps in the root.
"""

from collections.abc import Collection, Iterator

import torch
from reference.draws import Loss, Weights, dense, fresh, keyed
from torch import Tensor


def lozo(
    weights: Weights,
    loss: Loss,
    *,
    steps: int,
    lr: float,
    rho: float,
    seed: int,
    rank: int,
    nu: int | None,
    variant: str = "sgd",
    beta: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    unit: bool = True,
    weight_decay: float = 0.0,
    beside: Collection[str] = (),
    num_directions: int = 1,
) -> Iterator[Weights]:
    W = {name: weight.clone() for name, weight in weights.items()}
    base = {name: torch.zeros_like(W[name]) for name in W}
    M = {name: torch.zeros(W[name].shape[0], rank, dtype=torch.float64) for name in W}
    M |= {name: torch.zeros_like(W[name]) for name in W if W[name].ndim == 1}
    M_sq = {name: torch.zeros_like(M[name]) for name in W}
    V: dict[str, Tensor] = {}
    s = rank**-0.5 if unit else 1.0

    def sample(name: str, t: int, i: int) -> Tensor:
        if W[name].ndim == 1:
            return dense(W[name], seed, t, name, f"z.{i}")
        return fresh((W[name].shape[0], rank), seed, t, name, f"u.{i}")  # U ~ N(0, I), m x r

    def point(name: str, left: Tensor) -> Tensor:
        return left if W[name].ndim == 1 else left @ V[name].T  # Z = U V^T

    def perturbation(scale: float, t: int, i: int) -> None:
        for name in W:
            W[name] = W[name] + scale * point(name, sample(name, t, i))  # X + eps U V^T

    for t in range(steps):
        V_old = dict(V)
        if t % (nu or steps) == 0:  # lazy sampling: V ~ N(0, I), n x r, every nu steps
            for name in W:
                if W[name].ndim >= 2:
                    V[name] = s * keyed((W[name].shape[1], rank), seed, t, name, "v")
                    base[name] = W[name] if name in beside else base[name]
        kappa = []
        for i in range(num_directions):
            perturbation(rho, t, i)
            loss_plus = loss(W, t)  # F+ = F(X + eps U V^T)
            perturbation(-2 * rho, t, i)
            loss_minus = loss(W, t)  # F- = F(X - eps U V^T)
            perturbation(rho, t, i)
            kappa.append((loss_plus - loss_minus) / (2 * rho))  # c = (F+ - F-) / (2 eps)
        for name in W:
            U = [sample(name, t, i) for i in range(num_directions)]
            kappa_U = sum(k * x for k, x in zip(kappa, U, strict=True)) / num_directions
            if W[name].ndim >= 2:
                W[name] = base[name] + (1 - lr * weight_decay) * (W[name] - base[name])
            if variant == "sgd":
                W[name] = W[name] - lr * point(name, kappa_U)  # X <- X - alpha c U V^T
                continue
            if variant == "adam":
                M[name] = betas[0] * M[name] + (1 - betas[0]) * kappa_U
                M_sq[name] = betas[1] * M_sq[name] + (1 - betas[1]) * kappa_U**2
                W[name] = W[name] - lr * point(name, M[name] / torch.sqrt(M_sq[name] + eps))
                continue
            assert nu is not None
            if t % nu == 0 and t > 0 and W[name].ndim >= 2:  # M <- M V_old^T V_new / n; V^T V is n s^2 I on average
                M[name] = M[name] @ V_old[name].T @ V[name] / (W[name].shape[1] * s**2)
            M[name] = beta * M[name] + (1 - beta) * kappa_U  # M <- beta M + (1 - beta) c U
            W[name] = W[name] - lr * point(name, M[name])  # X <- X - alpha M V^T
        yield dict(W)
