"""The bases that do not depend on the data: the paper's, and SubZO's."""

import torch
from torch import Tensor

from tezo.directions.bases.basis import Basis, Role
from tezo.directions.targets import Target
from tezo.numerics.random import normal


class GaussianBasis(Basis):
    """u_MR and v_NR with independent N(0, 1) entries, drawn from (seed, refresh step, parameter, role)."""

    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        size = target.matrix_shape["uv".index(role)]
        return normal((size, rank), seed=seed, step=refresh_step, name=target.name, role=role)


class OrthonormalBasis(GaussianBasis):
    """Q of the Gaussian factor's QR decomposition, times the square root of its rows: the mean square is 1.

    The diagonal of R is positive, which makes Q unique.
    """

    def factor(self, role: Role, target: Target, rank: int, seed: int, refresh_step: int) -> Tensor:
        q, r = torch.linalg.qr(super().factor(role, target, rank, seed, refresh_step))
        signed: Tensor = q * torch.sign(torch.diagonal(r))
        signed *= len(q) ** 0.5
        return signed
