"""The change trained in earlier intervals, stored as low-rank factors beside a base that is not written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tezo.directions.coefficients import FixedCoefficient
from tezo.directions.spaces import LowRank

MOST_RANK = 64
"""Default rank of the factors stored beside a base that cannot be written."""


def low_rank(left_MK: Tensor, right_NK: Tensor) -> LowRank:
    """The fixed matrix left @ right^T as a `LowRank` point."""
    return LowRank(draw=FixedCoefficient(left_MK), v_NR=right_NK, refresh_step=-1, gram=1.0)


def join(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(left, right) of the sum of low-rank matrices: their factors concatenated along the rank."""
    left, right = (torch.cat([part[side].to(dtype) for part in parts], dim=1) for side in (0, 1))
    return left, right


def compress(left_MK: Tensor, right_NK: Tensor, most: int) -> tuple[Tensor, Tensor, float]:
    """(left, right, error): the factors of F, the best rank-`most` approximation of D = left @ right^T.

    error = |D - F| / |D| in the Frobenius norm. Computed by QR of both factors and an SVD of the K x K core, in float64
    on the CPU; each side gets the square roots of the singular values. If K <= `most`, D is returned unchanged.
    """
    if left_MK.shape[1] <= most:
        return left_MK, right_NK, 0.0
    q_MK, a_KK = torch.linalg.qr(left_MK.double().cpu())
    p_NK, b_KK = torch.linalg.qr(right_NK.double().cpu())
    u_KK, singular_K, vh_KK = torch.linalg.svd(a_KK @ b_KK.T)
    root = singular_K[:most].sqrt()
    left, right = q_MK @ u_KK[:, :most] * root, p_NK @ vh_KK[:most].T * root
    norm = float(torch.linalg.vector_norm(singular_K))
    lost = float(torch.linalg.vector_norm(singular_K[most:])) / norm if norm else 0.0
    return left.to(left_MK), right.to(right_NK), lost
