"""What was trained with factors that are no longer drawn from, kept beside a base that is not to be written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tezo.directions.spaces import FixedCoefficient, LowRank

MOST_RANK = 64
"""Of what lies beside a base that cannot be written, unless the run says otherwise."""


def low_rank(left_MK: Tensor, right_NK: Tensor) -> LowRank:
    """The fixed matrix left @ right^T."""
    return LowRank(draw=FixedCoefficient(left_MK), v_NR=right_NK, refresh_step=-1, gram=1.0)


def join(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(left, right) of the sum of low-rank matrices: their factors side by side."""
    left, right = (torch.cat([part[side].to(dtype) for part in parts], dim=1) for side in (0, 1))
    return left, right


def compress(left_MK: Tensor, right_NK: Tensor, most: int) -> tuple[Tensor, Tensor, float]:
    """(left, right, error): the nearest matrix F of rank `most` to D = left @ right^T, and |D - F| / |D| (Frobenius).

    By QR of both factors and an SVD of the K x K core between, in float64 on the CPU; singular values are shared out
    between the sides. A D of `most` columns or fewer is left as it is.
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
