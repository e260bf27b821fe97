"""SubZO, published as SubZero (Yu et al. 2024), in float64 on explicit weights.

`unit` multiplies Z by sqrt(m n) / r, as the public code does; the TeZO paper's formula (scale="raw") has no
factor. U and V are orthonormal bases of Gaussian matrices, made here by Gram and Schmidt. 1-D parameters
take dense noise. Weight decay is decoupled and spares them; it shrinks what has been trained since U and V
were drawn of the matrices in `beside`, which the library keeps beside the base, and W elsewhere.
"""

from collections.abc import Collection, Iterator

import torch
from reference.draws import Loss, Weights, dense, keyed
from torch import Tensor


def gram_schmidt(gaussian: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for x in gaussian.T:
        for _ in range(2):  # twice is enough
            for q in columns:
                x = x - (q @ x) * q
        columns.append(x / x.norm())
    return torch.stack(columns, dim=1)


def subzo(
    weights: Weights,
    loss: Loss,
    *,
    steps: int,
    lr: float,
    rho: float,
    seed: int,
    rank: int,
    interval: int,
    unit: bool = True,
    weight_decay: float = 0.0,
    beside: Collection[str] = (),
    num_directions: int = 1,
) -> Iterator[Weights]:
    W = {name: weight.clone() for name, weight in weights.items()}
    base = {name: torch.zeros_like(W[name]) for name in W}
    U: dict[str, Tensor] = {}
    V: dict[str, Tensor] = {}

    def sample(name: str, t: int, i: int) -> Tensor:
        if W[name].ndim == 1:
            return dense(W[name], seed, t, name, f"z.{i}")
        m, n = W[name].shape
        S = keyed((rank, rank), seed, t, name, f"core.{i}")  # S ~ N(0, I), r x r
        return (U[name] @ S @ V[name].T) * ((m * n) ** 0.5 / rank if unit else 1.0)  # Z = U S V^T

    def perturbation(scale: float, t: int, i: int) -> None:
        for name in W:
            W[name] = W[name] + scale * sample(name, t, i)

    for t in range(steps):
        if t % interval == 0:  # new subspaces
            for name in W:
                if W[name].ndim >= 2:
                    m, n = W[name].shape
                    U[name] = gram_schmidt(keyed((m, rank), seed, t, name, "u"))
                    V[name] = gram_schmidt(keyed((n, rank), seed, t, name, "v"))
                    base[name] = W[name] if name in beside else base[name]
        kappa = []
        for i in range(num_directions):
            perturbation(rho, t, i)
            loss_plus = loss(W, t)
            perturbation(-2 * rho, t, i)
            loss_minus = loss(W, t)
            perturbation(rho, t, i)
            kappa.append((loss_plus - loss_minus) / (2 * rho))  # rho_t = (l+ - l-) / (2 eps)
        for name in W:
            if W[name].ndim >= 2:
                W[name] = base[name] + (1 - lr * weight_decay) * (W[name] - base[name])
            for i in range(num_directions):
                W[name] = W[name] - lr * kappa[i] * sample(name, t, i) / num_directions  # W <- W - eta rho_t Z
        yield dict(W)
