"""TeZO, TeZO-m and TeZO-Adam (Algorithm 1 of the paper) and our TeZO-cAdam, in float64 on explicit weights.

Numbers in the comments are Algorithm 1's lines. What it leaves open or the library does otherwise:
- `unit`: Z is divided by sqrt(r), Theorem 1's scale; the listing, and scale="raw", has no such factor.
  The factor is carried by v, so that V_t of TeZO-Adam has it too (squared).
- 1-D parameters: dense noise, and the variant's plain form on it.
- q directions a step: kappa_t tau is replaced by the mean of kappa_i tau_i.
- Weight decay, which the paper has not, is decoupled and spares 1-D parameters. It shrinks the change
  D = W - W_0 of the matrices named in `beside`, which the library keeps beside the base, and W elsewhere.
"""

from collections.abc import Collection, Iterator

import torch
from reference.draws import Loss, Weights, dense, keyed
from torch import Tensor


def tezo(
    weights: Weights,
    loss: Loss,
    *,
    variant: str,
    steps: int,
    lr: float,
    rho: float,
    seed: int,
    rank: int,
    unit: bool = True,
    beta: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    weight_decay: float = 0.0,
    beside: Collection[str] = (),
    num_directions: int = 1,
) -> Iterator[Weights]:
    W = {name: weight.clone() for name, weight in weights.items()}
    base = {name: W[name] if name in beside else torch.zeros_like(W[name]) for name in W}
    r = rank  # 1
    u = {name: keyed((W[name].shape[0], r), seed, 0, name, "u") for name in W if W[name].ndim >= 2}  # 2
    v = {name: keyed((W[name].shape[1], r), seed, 0, name, "v") for name in W if W[name].ndim >= 2}
    if unit:
        v = {name: v[name] / r**0.5 for name in v}
    tau_M: dict[str, Tensor] = {}
    tau_V: dict[str, Tensor] = {}

    def sample_tau(name: str, t: int, i: int) -> Tensor:
        if name not in u:
            return dense(W[name], seed, t, name, f"z.{i}")
        return keyed((r,), seed, t, name, f"tau.{i}")

    def expand(name: str, tau: Tensor, left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
        if name not in u:
            return tau
        return torch.einsum("s,ms,ns->mn", tau, left[name], right[name])  # sum_s tau_s (u_s o v_s)

    def perturbation(scale: float, t: int, i: int) -> None:  # 22
        for name in W:  # 23, 24
            tau = sample_tau(name, t, i)  # 25: tau ~ N(0, I_r)
            Z = expand(name, tau, u, v)  # 25: Z_t = sum_s tau_s (u_s o v_s)
            W[name] = W[name] + scale * Z  # 26: W_l = W_l + rho Z_t

    u_squared, v_squared = ({name: x[name] ** 2 for name in x} for x in (u, v))
    for t in range(steps):  # 3
        kappa = []  # 4: the minibatch and the seed are functions of t
        for i in range(num_directions):
            perturbation(rho, t, i)  # 5
            loss_plus = loss(W, t)  # 5: f+ = f(W, xi)
            perturbation(-2 * rho, t, i)  # 6
            loss_minus = loss(W, t)  # 6: f- = f(W, xi)
            perturbation(rho, t, i)  # 7
            kappa.append((loss_plus - loss_minus) / (2 * rho))  # 7: kappa_t = (f+ - f-) / 2 rho
        for name in W:  # 8, 9
            tau = [sample_tau(name, t, i) for i in range(num_directions)]  # 10: tau ~ N(0, I_r)
            kappa_tau = sum(k * x for k, x in zip(kappa, tau, strict=True)) / num_directions
            tau_M.setdefault(name, torch.zeros_like(kappa_tau))
            tau_V.setdefault(name, torch.zeros_like(kappa_tau))
            if W[name].ndim >= 2:
                W[name] = base[name] + (1 - lr * weight_decay) * (W[name] - base[name])
            if variant == "tezo":
                G = expand(name, kappa_tau, u, v)  # 11: G_t = sum_s kappa_t tau_s (u_s o v_s)
            if variant == "tezo-m":
                tau_M[name] = beta * tau_M[name] + (1 - beta) * kappa_tau  # 12
                G = expand(name, tau_M[name], u, v)  # 13: G_t = sum_s (tau_M)_s (u_s o v_s)
            if variant == "tezo-adam":
                tau_M[name] = betas[0] * tau_M[name] + (1 - betas[0]) * kappa_tau  # 14
                tau_V[name] = betas[1] * tau_V[name] + (1 - betas[1]) * kappa_tau**2  # 15
                M = expand(name, tau_M[name], u, v)  # 16: M_t = sum_s (tau_M)_s (u_s o v_s)
                V = expand(name, tau_V[name], u_squared, v_squared)  # 17: V_t = sum_s (tau_V)_s (u_s^2 o v_s^2)
                G = M / torch.sqrt(V + eps)  # 18: G_t = M_t / sqrt(V_t + eps)
            if variant == "tezo-cadam":  # not in the paper: the quotient is taken on tau
                tau_M[name] = betas[0] * tau_M[name] + (1 - betas[0]) * kappa_tau
                tau_V[name] = betas[1] * tau_V[name] + (1 - betas[1]) * kappa_tau**2
                G = expand(name, tau_M[name] / torch.sqrt(tau_V[name] + eps), u, v)
            W[name] = W[name] - lr * G  # 19: W_l = W_l - eta_l G_t
        yield dict(W)
