"""SubZO's perturbation: an r x r core between two orthonormal factors."""

from torch import Tensor

from tezo.bases.gaussian import orthonormal
from tezo.directions import Core, Kept
from tezo.params import Target
from tezo.perturbations.base import LowRankPerturbation, Moment
from tezo.random import normal


class Subspace(LowRankPerturbation):
    """Z_t = U_k S_t V_k^T: core_RR standard normal every step, U and V orthonormal for an interval.

    Unit scale: U carries (m/r)^(1/2) and V (n/r)^(1/2), together the published sqrt(m n)/r.
    """

    draws = Core

    def matrix_direction(self, target: Target, moment: Moment) -> Core:
        born = self.born(moment.step)
        factors = self.factors(target, moment.seed, born)
        rank = self._ranks[target.name]
        core_RR = self.coefficient((rank, rank), target, moment, "core")
        return Core(draw=Kept(core_RR), u_MR=factors["u"], v_NR=factors["v"], born=born)

    def draw_factors(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        drawn = {}
        for role, size in zip("uv", target.matrix_shape, strict=True):
            q = orthonormal(normal((size, rank), seed=seed, step=born, name=owner, role=role))
            drawn[role] = q if self.scale == "raw" else q * (size / rank) ** 0.5
        return drawn
