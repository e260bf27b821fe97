"""MeZO: dense DenseGaussian noise, with plain, normalised, momentum and Adam steps."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbations import DenseGaussian
from tezo.optim.methods.common_options import Common
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import SGD, Adam, Momentum, NormalizedSGD


def mezo(model: nn.Module, *, lr: float = 1e-6, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO: plain zeroth-order steps along dense DenseGaussian noise.

        z ~ N(0, I_MN),   W <- W - lr kappa z.

    The baseline of the paper (Sec. 3, Eq. 2; Malladi et al. 2023). State: none.

    Deviations: W + rho z is made a tile at a time where it is used, and W is written once a step, so that it does
    not drift; weight decay, when set, applies to matrices only.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), SGD(), lr=lr, **common)


def mezo_norm(
    model: nn.Module, *, lr: float = 1e-5, beta: float = 0.99, eps: float = 1e-8, **common: Unpack[Common]
) -> ZerothOrderOptimizer:
    """MeZO-norm: MeZO with steps over a running root mean square of kappa. Ours, not the paper's.

        v <- beta v + (1 - beta) kappa^2,   W <- W - lr (kappa / (sqrt(v / (1 - beta^t)) + eps)) z.

    What is left of Adam when z^2 is replaced by its mean, 1: the comparison that an adaptive method has to stand.
    State: one number a run. `lr`, `beta`: as the paper's Adam methods have theirs.

    Deviations: as `mezo`.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), NormalizedSGD(beta, eps), lr=lr, **common)


def mezo_m(model: nn.Module, *, lr: float = 1e-6, beta: float = 0.9, **common: Unpack[Common]) -> ZerothOrderOptimizer:
    """MeZO-m: MeZO with momentum.

        m <- beta m + (1 - beta) kappa z,   W <- W - lr m.

    State: m, of the weights' shape, in float32. `beta`: the paper's beta_1 (Algorithm 1).

    Deviations: an exponential average from zero, the form that the paper gives for TeZO-m; MeZO's code
    offers momentum but never passes it on.
    """
    return ZerothOrderOptimizer(model, DenseGaussian(), Momentum(beta), lr=lr, **common)


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

    State: m and v, of the weights' shape, in float32. `betas`, `eps` and the form are torch's, which
    MeZO's code uses.
    """
    update = Adam(betas, eps, eps_in_sqrt=False, bias_correction=True)
    return ZerothOrderOptimizer(model, DenseGaussian(), update, lr=lr, **common)
