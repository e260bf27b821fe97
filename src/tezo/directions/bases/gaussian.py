"""The paper's basis: independent standard normal factors, which do not depend on the data."""

import torch
from torch import Tensor

from tezo.directions.bases.basis import Basis, Draw, Role
from tezo.directions.targets import Target
from tezo.numerics.random import normal


class GaussianBasis(Basis):
    """u_MR and v_NR with independent N(0, 1) entries, drawn from (seed, refresh step, owner, role)."""

    def factor(self, role: Role, target: Target, rank: int, draw: Draw) -> Tensor:
        size = target.matrix_shape["uv".index(role)]
        return normal((size, rank), seed=draw.seed, step=draw.refresh_step, name=draw.owner, role=role)


def orthonormal(gaussian: Tensor) -> Tensor:
    """Q of the QR decomposition with a positive diagonal of R; this sign convention makes Q unique."""
    q, r = torch.linalg.qr(gaussian)
    signed: Tensor = q * torch.sign(torch.diagonal(r))
    return signed
