"""TeZO's perturbation: low-rank over the model and over time (Eq. 3, Algorithm 1)."""

from torch import Tensor

from tezo.bases import Draw
from tezo.directions import CP, Kept
from tezo.params import Target
from tezo.perturbations.base import LowRankPerturbation, Moment


class Temporal(LowRankPerturbation):
    """Z_t = U diag(tau_t) V^T: u_MR and v_NR once a run, or an interval; tau_R ~ N(0, I_r) drawn every step.

    Unit scale: V carries r^(-1/2).
    """

    draws = CP

    def matrix_direction(self, target: Target, moment: Moment) -> CP:
        born = self.born(moment.step)
        factors = self.factors(target, moment.seed, born)
        tau_R = self.coefficient((self._ranks[target.name],), target, moment, "tau")
        before = self.before(target, moment)
        return CP(draw=Kept(tau_R), u_MR=factors["u"], v_NR=factors["v"], born=born, before=before)

    def draw_factors(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        rank, draw = self._ranks[target.name], Draw(owner, seed, born)
        u_MR = self.basis.factor("u", target, rank, draw)
        v_NR = self.basis.factor("v", target, rank, draw)
        return {"u": u_MR, "v": v_NR if self.scale == "raw" else v_NR * rank**-0.5}
