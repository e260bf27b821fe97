"""TeZO's perturbation: low-rank over the model and over time (Eq. 3, Algorithm 1)."""

from torch import Tensor

from tezo.directions.bases import ROLES
from tezo.directions.perturbations.perturbation import DrawKey, LowRankPerturbation
from tezo.directions.spaces import CP
from tezo.directions.targets import Target


class Temporal(LowRankPerturbation):
    """Z_t = U diag(tau_t) V^T: u_MR and v_NR are drawn once per run or interval; tau_R ~ N(0, I_r) every step.

    Unit scale: V includes the factor r^(-1/2).
    """

    draws = CP

    def matrix_direction(self, target: Target, key: DrawKey) -> CP:
        refresh_step = self.refresh_step(key.step)
        factors = self.factors(target, key.seed, refresh_step)
        return CP(
            draw=self.numbers((self._ranks[target.name],), target, key, "tau"),
            u_MR=factors["u"],
            v_NR=factors["v"],
            refresh_step=refresh_step,
            before=self.before(target, key),
        )

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        u_MR, v_NR = (self.basis.factor(role, target, rank, seed, refresh_step) for role in ROLES)
        return {"u": u_MR, "v": v_NR if self.scale == "raw" else v_NR * rank**-0.5}
