"""The two moments of TeZO-Adam in factored form."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamFactors:
    """The factors of both moments, and the form of the division.

        m = U diag(tau_m) V^T,   v = U^2 diag(tau_v) (V^2)^T,   squares entry by entry,
        step = m / sqrt(v + eps), or m / (sqrt(v) + eps).

    Attributes:
        u_MR: factor U, in any floating dtype.
        v_NR: factor V, in any floating dtype.
        tau_m_R: temporal coefficients of the first moment, float32 or float64; the step is computed in this dtype.
        tau_v_R: temporal coefficients of the second moment, not negative, in the dtype of `tau_m_R`.
        eps: smoothing term.
        eps_in_sqrt: True: step = m / sqrt(v + eps); False: step = m / (sqrt(v) + eps).
    """

    u_MR: Tensor
    v_NR: Tensor
    tau_m_R: Tensor
    tau_v_R: Tensor
    eps: float
    eps_in_sqrt: bool

    @property
    def transposed(self) -> "AdamFactors":
        """The factors of the step for W^T."""
        return AdamFactors(self.v_NR, self.u_MR, self.tau_m_R, self.tau_v_R, self.eps, self.eps_in_sqrt)
