"""MeZO along dense noise, with its steps by sign, by norm, with momentum, Adam and comparison; and Sparse-MeZO."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbation import DenseGaussian, SmallEntries
from tezo.optim.estimators.two_point import Conservative
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import SGD, Adam, Momentum, NormalizedSGD, SignSGD


@with_settings
def mezo(model: nn.Module, *, lr: float = 1e-6, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO: plain zeroth-order steps along dense Gaussian noise.

        z ~ N(0, I_MN),   W <- W - lr kappa z.

    The paper's baseline (Sec. 3, Eq. 2; Malladi et al. 2023). State: none.

    Deviations: W + rho z is computed tile by tile in the forward pass, and W is written once per step, so that it does
    not drift. Weight decay applies to matrices only.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), SGD(), lr=lr, **common)


@with_settings
def mezo_norm(
    model: nn.Module, *, lr: float = 1e-5, beta: float = 0.99, eps: float = 1e-8, **common: Unpack[Common]
) -> ZerothOrderOptimizer:
    """MeZO-norm: MeZO with steps divided by a running root mean square of kappa. Ours, not the paper's.

        v <- beta v + (1 - beta) kappa^2,   W <- W - lr (kappa / (sqrt(v / (1 - beta^t)) + eps)) z.

    This is Adam with z^2 replaced by its mean, 1: a baseline for adaptive methods. State: one number per run. `lr` and
    `beta` are those of the paper's Adam methods.

    Deviations: as in `mezo`.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), NormalizedSGD(beta, eps), lr=lr, **common)


@with_settings
def mezo_sign(model: nn.Module, *, lr: float = 1e-6, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO-sign: steps along the sign of MeZO's estimate, which are of size lr in every entry.

        W <- W - lr sign(kappa z).

    A baseline of Zhang et al. 2024 (ZO-SignSGD, Liu et al. 2019); not in the paper. State: none. `lr`: MeZO's; a rate
    that is right for another method is not for this one, since steps do not depend on the size of the gradient.

    Deviations: as in `mezo`.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), SignSGD(), lr=lr, **common)


@with_settings
def mezo_conservative(model: nn.Module, *, lr: float = 1e-6, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO-conservative: MeZO's step, or its opposite, or none, by the loss of the batch at each of the three points.

        W <- W - s lr kappa z,   s = argmin over s in {0, 1, -1} of f(W - s lr kappa z).

    A baseline of Zhang et al. 2024 (ZO-SGD-Cons); not in the paper. Five forward passes a step instead of two. State:
    none. Only one direction per step is possible. `lr`: MeZO's.

    Deviations: as in `mezo`. The losses are compared without weight decay, which every step has.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), SGD(), lr=lr, estimator=Conservative, **common)


@with_settings
def mezo_m(model: nn.Module, *, lr: float = 1e-6, beta: float = 0.9, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO-m: MeZO with momentum.

        m <- beta m + (1 - beta) kappa z,   W <- W - lr m.

    State: m, in the shape of the weights, in float32. `beta` is the paper's beta_1 (Algorithm 1).

    Deviations: m is an exponential moving average that starts at zero, as the paper defines it for TeZO-m; MeZO's code
    has an option for momentum but does not use it.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), Momentum(beta), lr=lr, **common)


@with_settings
def mezo_adam(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """MeZO-Adam: Adam on the dense estimate.

        m <- b1 m + (1 - b1) kappa z,   v <- b2 v + (1 - b2) kappa^2 z^2,
        W <- W - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).

    State: m and v, in the shape of the weights, in float32. `betas`, `eps` and the equations are those of torch's Adam,
    which MeZO's code uses.
    """
    update = Adam(betas, eps, eps_in_sqrt=False, bias_correction=True)
    return ZerothOrderOptimizer(model, DenseGaussian(), update, lr=lr, **common)


@with_settings
def sparse_mezo(
    model: nn.Module, *, lr: float = 1e-6, sparsity: float = 0.75, **common: Unpack[Common]
) -> ZerothOrderOptimizer:
    """Sparse-MeZO: MeZO on the entries of each parameter that are small in magnitude.

        z ~ N(0, I),   m_ij = 1 where |w_ij| <= h, else 0,   W <- W - lr kappa (m * z).

    A baseline of Liu et al. 2024; not in the paper. h is set for each parameter before the first step, so that a part
    `sparsity` of its entries is above it; the mask is that of the weights at each step. State: h, one number for each
    parameter, and during a step one bit for each entry. `lr` is MeZO's and `sparsity` ours; their paper searches both.

    Deviations: the mask is kept in bits for the length of a step, instead of being computed in each pass.
    """
    return ZerothOrderOptimizer(model, SmallEntries(sparsity), SGD(), lr=lr, **common)
