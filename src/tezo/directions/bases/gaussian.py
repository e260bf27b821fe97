"""The paper's basis: independent standard normal numbers."""

import torch
from torch import Tensor

from tezo.directions.bases.basis import Basis, Draw, Role
from tezo.directions.targets import Target
from tezo.numerics.random import normal


class GaussianBasis(Basis):
    """Entries ~ N(0, 1), of u and of v, as a function of (seed, refresh step, owner, role)."""

    def factor(self, role: Role, target: Target, rank: int, draw: Draw) -> Tensor:
        size = target.matrix_shape["uv".index(role)]
        return normal((size, rank), seed=draw.seed, step=draw.refresh_step, name=draw.owner, role=role)


def orthonormal(gaussian: Tensor) -> Tensor:
    """The Q of a QR decomposition with R's diagonal positive, so that it does not depend on the library."""
    q, r = torch.linalg.qr(gaussian)
    signed: Tensor = q * torch.sign(torch.diagonal(r))
    return signed
