"""The leading directions of vectors that pass by, in memory that does not grow with their number."""

import torch
from torch import Tensor

from tezo.random import normal

EXACT = 1024
"""Up to so many entries a vector's second moments are kept whole: 4 MB in float32."""


def width(size: int, rank: int) -> int:
    """Columns of the sketch of `size`-vectors whose `rank` leading directions are wanted."""
    return size if size <= EXACT else min(size, max(64, 8 * rank))


def sketch_bytes(size: int, rank: int, dtype: torch.dtype) -> int:
    """What a sketch keeps on the vectors' device."""
    columns = width(size, rank)
    return size * columns * dtype.itemsize * (1 if columns == size else 2)


class Sketch:
    """Y = C Omega of the second moments C = sum_t x_t x_t^T: I x K numbers, of which C is made again by Nystrom's

        C ~ Y (Omega^T Y)^-1 Y^T,

    in the stable form of Tropp et al. (2017). Omega is I x K, orthonormal; for K = I it is the identity, and C exact.

    Args:
        size: I, of the vectors.
        columns: K.
        device: of the vectors.
        dtype: to add up in.
        name: that Omega is drawn by.
    """

    def __init__(self, size: int, columns: int, device: torch.device, dtype: torch.dtype, name: str) -> None:
        self.omega_IK = torch.eye(size, dtype=torch.float64)
        if columns < size:
            self.omega_IK, _ = torch.linalg.qr(normal((size, columns), seed=0, step=0, name=name, role="sketch"))
        self._test_IK = self.omega_IK.to(device, dtype) if columns < size else None
        self._sum_IK = torch.zeros(size, columns, device=device, dtype=dtype)
        self._sum_I = torch.zeros(size, device=device, dtype=dtype)
        self.count = 0

    def add(self, x_TI: Tensor) -> None:
        """Takes vectors in."""
        x_TI = x_TI.to(self._sum_IK.dtype)
        self._sum_IK.addmm_(x_TI.T, x_TI if self._test_IK is None else x_TI @ self._test_IK)
        self._sum_I += x_TI.sum(0)
        self.count += len(x_TI)

    def leading(self, rank: int, *, centred: bool) -> tuple[Tensor, Tensor]:
        """(directions (I, rank), orthonormal, the largest first; second moments along them (rank,)): float64, CPU.

        Args:
            rank: how many.
            centred: of C - sum x sum x^T / T: about the mean, not about zero.

        Raises:
            FloatingPointError: a vector held NaN or infinite numbers, or some too large to square.
        """
        y_IK, omega_IK = self._sum_IK.double().cpu(), self.omega_IK
        if not torch.isfinite(y_IK).all():
            raise FloatingPointError
        if centred:
            sum_I = self._sum_I.double().cpu()
            y_IK = y_IK - torch.outer(sum_I, sum_I @ omega_IK) / max(1, self.count)
        shift = 1e-12 * float(torch.linalg.matrix_norm(y_IK)) + 1e-30
        y_IK = y_IK + shift * omega_IK
        gram_KK = omega_IK.T @ y_IK
        root_KK, _ = torch.linalg.cholesky_ex((gram_KK + gram_KK.T) / 2 + shift * torch.eye(len(gram_KK)).double())
        factor_IK = torch.linalg.solve_triangular(root_KK, y_IK.T, upper=False).T
        moments_K, turns_KK = torch.linalg.eigh(factor_IK.T @ factor_IK)
        moments_R = moments_K.flip(0)[:rank].clamp_min(shift)
        leading_IR = factor_IK @ turns_KK.flip(1)[:, :rank] / moments_R.sqrt()
        return leading_IR * _signs(leading_IR), moments_R


def _signs(directions_IR: Tensor) -> Tensor:
    """The sign that makes the largest entry of each direction positive: a decomposition leaves it open."""
    largest = directions_IR.abs().argmax(0, keepdim=True)
    return torch.sign(torch.gather(directions_IR, 0, largest))
