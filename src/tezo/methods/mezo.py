"""MeZO along dense noise: plain, with momentum, and with Adam."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbation import DenseGaussian
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import SGD, Adam, Momentum


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
