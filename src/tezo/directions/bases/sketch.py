"""The leading eigenvectors of the second moments of a stream of vectors, in memory independent of their number."""

import torch
from torch import Tensor

from tezo.numerics.random import normal

EXACT = 512
"""Largest vector size whose second moments are kept in full: 1 MB in float32."""


def width(size: int, rank: int) -> int:
    """Columns of the sketch of `size`-vectors whose `rank` leading eigenvectors are wanted."""
    return size if size <= EXACT else min(size, max(64, 8 * rank))


def sketch_bytes(size: int, rank: int, dtype: torch.dtype) -> int:
    """Bytes that a sketch takes on the vectors' device."""
    columns = width(size, rank)
    return size * columns * dtype.itemsize * (1 if columns == size else 2)


class Sketch:
    """The I x K sketch Y = C Omega of the second moments C = sum_t x_t x_t^T, and the Nystrom approximation

        C ~ Y (Omega^T Y)^-1 Y^T,

    with the inverse restricted to eigenvalues above the rounding error of the sums. Omega is I x K and orthonormal, up
    to rounding; for K = I it is the identity, and C is exact.

    Args:
        size: I, of the vectors.
        columns: K.
        device: of the vectors.
        dtype: of the sums.
        name: key of Omega's random draw.
    """

    def __init__(self, size: int, columns: int, device: torch.device, dtype: torch.dtype, name: str) -> None:
        self._omega_IK = None
        if columns < size:
            omega_IK, _ = torch.linalg.qr(normal((size, columns), seed=0, step=0, name=name, role="sketch"))
            self._omega_IK = omega_IK.to(device, dtype)
        self._sum_IK = torch.zeros(size, columns, device=device, dtype=dtype)
        self.count = 0

    def add(self, x_TI: Tensor) -> None:
        """Adds T vectors."""
        x_TI = x_TI.to(self._sum_IK.dtype)
        self._sum_IK.addmm_(x_TI.T, x_TI if self._omega_IK is None else x_TI @ self._omega_IK)
        self.count += len(x_TI)

    def leading(self, rank: int) -> Tensor:
        """The (I, rank) eigenvectors of C with the largest eigenvalues, in descending order: float64, on the CPU.

        Columns are orthonormal. Where the vectors span fewer than `rank` dimensions, the remaining columns complete
        the basis arbitrarily.

        Raises:
            FloatingPointError: a vector had a NaN or infinite entry, or one too large to square.
        """
        y_IK = self._sum_IK.double().cpu()
        if not torch.isfinite(y_IK).all():
            raise FloatingPointError
        gram_KK = y_IK if self._omega_IK is None else self._omega_IK.double().cpu().T @ y_IK
        core_K, turns_KK = torch.linalg.eigh((gram_KK + gram_KK.T) / 2)
        leading_IK = turns_KK.flip(1)
        if self._omega_IK is not None:
            # eigenvalues below the rounding error of the sums are noise, which their inverse would amplify
            floor = 10 * torch.finfo(self._sum_IK.dtype).eps * float(torch.linalg.matrix_norm(y_IK))
            inverse_K = torch.where(core_K > floor, core_K, torch.inf).rsqrt()
            leading_IK, _, _ = torch.linalg.svd(y_IK @ turns_KK * inverse_K, full_matrices=False)
        # contiguous, as a file returns it: a product rounds differently with another memory layout
        leading_IR: Tensor = leading_IK[:, :rank].contiguous()
        return leading_IR * _signs(leading_IR)


def _signs(directions_IR: Tensor) -> Tensor:
    """The sign that makes the largest entry of each column positive: a decomposition leaves it open."""
    largest = directions_IR.abs().argmax(0, keepdim=True)
    return torch.sign(torch.gather(directions_IR, 0, largest))
