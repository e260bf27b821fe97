"""TeZO's perturbation: low-rank over the model and over time (Eq. 3, Algorithm 1)."""

from torch import Tensor

from tezo.directions import CP, Kept
from tezo.params import Target
from tezo.perturbations.base import LowRankPerturbation, Moment
from tezo.random import normal


class Temporal(LowRankPerturbation):
    """Z_t = U diag(tau_t) V^T: u_MR and v_NR drawn once a run, tau_R ~ N(0, I_r) drawn every step.

    Unit scale: V carries r^(-1/2).
    """

    def matrix_direction(self, target: Target, moment: Moment) -> CP:
        factors = self.factors(target, moment.seed, born=0)
        tau_R = self.coefficient((self._ranks[target.name],), target, moment, "tau")
        return CP(draw=Kept(tau_R), u_MR=factors["u"], v_NR=factors["v"], born=0)

    def draw_factors(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        rows, columns = target.matrix_shape
        rank = self._ranks[target.name]
        u_MR = normal((rows, rank), seed=seed, step=born, name=owner, role="u")
        v_NR = normal((columns, rank), seed=seed, step=born, name=owner, role="v")
        return {"u": u_MR, "v": v_NR if self.scale == "raw" else v_NR * rank**-0.5}
