"""Sparse-MeZO: MeZO on the small entries of each parameter."""

from typing import Unpack

from torch import nn

from tezo.directions.perturbations import SmallEntries
from tezo.optim.methods.common_options import Common
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import SGD


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
