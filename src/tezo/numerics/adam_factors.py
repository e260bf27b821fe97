"""The two moments of TeZO-Adam's step, as factors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamFactors:
    """The step's two moments, and how they are divided.

        M = U diag(tau_m) V^T,   V = U^2 diag(tau_v) (V^2)^T,   squares entry by entry,
        step = M / sqrt(V + eps), or M / (sqrt(V) + eps).

    Attributes:
        u_MR: any floating dtype.
        v_NR: likewise.
        tau_m_R: first moment, float32 or float64: the dtype of the arithmetic.
        tau_v_R: second moment, likewise; not negative.
        eps: smoothing term.
        eps_in_sqrt: the first form of the step, or the second.
    """

    u_MR: Tensor
    v_NR: Tensor
    tau_m_R: Tensor
    tau_v_R: Tensor
    eps: float
    eps_in_sqrt: bool

    @property
    def transposed(self) -> "AdamFactors":
        """The same for W^T."""
        return AdamFactors(self.v_NR, self.u_MR, self.tau_m_R, self.tau_v_R, self.eps, self.eps_in_sqrt)
