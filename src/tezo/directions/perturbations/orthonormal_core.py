"""SubZO's perturbation: an r x r core between two orthonormal factors."""

from torch import Tensor

from tezo.directions.bases import ROLES
from tezo.directions.perturbations.perturbation import DrawKey, LowRankPerturbation
from tezo.directions.spaces import Core
from tezo.directions.targets import Target


class Subspace(LowRankPerturbation):
    """Z_t = U_k S_t V_k^T: core_RR is standard normal and drawn every step; U and V are orthonormal, once per interval.

    The basis is orthonormal. Unit scale: U includes the factor (M/r)^(1/2) and V (N/r)^(1/2); their product is the
    published sqrt(M N) / r.
    """

    draws = Core

    def matrix_direction(self, target: Target, key: DrawKey) -> Core:
        refresh_step = self.refresh_step(key.step)
        factors = self.factors(target, key.seed, refresh_step)
        rank = self._ranks[target.name]
        draw = self.numbers((rank, rank), target, key, "core")
        return Core(draw=draw, u_MR=factors["u"], v_NR=factors["v"], refresh_step=refresh_step)

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        drawn = ((role, self.basis.factor(role, target, rank, seed, refresh_step)) for role in ROLES)
        return {role: factor / (rank if self.scale == "unit" else len(factor)) ** 0.5 for role, factor in drawn}
