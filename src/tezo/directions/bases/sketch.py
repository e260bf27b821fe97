"""The leading directions of vectors that pass by, in memory that does not grow with their number."""

import torch
from torch import Tensor

from tezo.numerics.random import normal

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

    with the inverse on the directions that stand out from the sums' rounding. Omega is I x K, orthonormal; for K = I it
    is the identity, and C exact.

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

        Where the vectors span fewer directions, the others are any that are orthogonal to them, of moment 0.

        Args:
            rank: how many.
            centred: of C - sum x sum x^T / T: about the mean, not about zero.

        Raises:
            FloatingPointError: a vector held NaN or infinite numbers, or some too large to square.
        """
        y_IK, omega_IK = self._sum_IK.double().cpu(), self.omega_IK
        if not torch.isfinite(y_IK).all():
            raise FloatingPointError
        # what is smaller than the sums' own rounding is no direction: its inverse would drown the others
        floor = 10 * torch.finfo(self._sum_IK.dtype).eps * float(torch.linalg.matrix_norm(y_IK))
        if centred:
            sum_I = self._sum_I.double().cpu()
            y_IK = y_IK - torch.outer(sum_I, sum_I @ omega_IK) / max(1, self.count)
        gram_KK = omega_IK.T @ y_IK
        core_K, turns_KK = torch.linalg.eigh((gram_KK + gram_KK.T) / 2)
        leading_IK, moments_K = turns_KK.flip(1), core_K.flip(0)
        if self._test_IK is not None:
            inverse_K = torch.where(core_K > floor, core_K, torch.inf).rsqrt()
            leading_IK, roots_K, _ = torch.linalg.svd(y_IK @ turns_KK * inverse_K, full_matrices=False)
            moments_K = roots_K.square()
        # laid out as a file gives it back: a product with another layout rounds otherwise
        leading_IR, moments_R = leading_IK[:, :rank].contiguous(), moments_K[:rank]
        return leading_IR * _signs(leading_IR), torch.where(moments_R > floor, moments_R, 0.0)


def _signs(directions_IR: Tensor) -> Tensor:
    """The sign that makes the largest entry of each direction positive: a decomposition leaves it open."""
    largest = directions_IR.abs().argmax(0, keepdim=True)
    return torch.sign(torch.gather(directions_IR, 0, largest))
