"""The low-rank perturbations of TeZO, LOZO and SubZO."""

import torch
from torch import Tensor

from tezo.directions.bases.basis import ROLES, Role
from tezo.directions.perturbation import DrawKey, LowRankPerturbation
from tezo.directions.random import Signs, fill_normal_
from tezo.directions.spaces import CP, Core, LowRank, SignedNumbers, TransposedLowRank
from tezo.directions.targets import Target


class Lazy(LowRankPerturbation):
    """LOZO's Z_t = U_t V_k^T: u_MR is drawn every step, v_NR once per interval, or once per run.

    Unit scale: V includes the factor r^(-1/2). V belongs to the columns of W, as published. With a data-dependent basis
    V belongs to the input side of the layer; in GPT-2's Conv1D layers these are the rows of W.
    """

    draws = LowRank

    def matrix_direction(self, target: Target, key: DrawKey) -> LowRank:
        refresh_step, (role,), rank = self.refresh_step(key.step), self.fixed(target), self._ranks[target.name]
        v_IR = self.factors(target, key.seed, refresh_step)["v"]
        if self.basis.data_dependent:  # columns are orthogonal; their lengths may differ
            gram: float | Tensor = v_IR.to(target.state_dtype).square().sum(0)
        else:
            gram = len(v_IR) * self._factor(rank) ** 2
        rows, device, dtype = target.matrix_shape[0 if role == "v" else 1], target.device, target.state_dtype

        def draw() -> Tensor:
            # M x r numbers every step are too many for the CPU; like dense noise they are drawn on the weight's device
            u_MR = torch.empty(rows, rank, dtype=dtype, device=device)
            return fill_normal_(u_MR, seed=key.seed, step=key.step, name=target.name, role=f"u.{key.index}")

        signs = Signs(rows, key.seed, key.step, target.name, f"u.{key.index}.signs")
        return (LowRank if role == "v" else TransposedLowRank)(
            draw=SignedNumbers(draw, signs),
            v_NR=v_IR,
            refresh_step=refresh_step,
            before=self.before(target, key),
            gram=gram,
        )

    def fixed(self, target: Target) -> tuple[Role, ...]:
        return ((target.input_role or "v") if self.basis.data_dependent else "v",)

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank, (role,) = self._ranks[target.name], self.fixed(target)
        return {"v": self.basis.factor(role, target, rank, seed, refresh_step) * self._factor(rank)}

    def _factor(self, rank: int) -> float:
        return 1.0 if self.scale == "raw" else float(rank**-0.5)


class Subspace(LowRankPerturbation):
    """SubZO's Z_t = U_k S_t V_k^T: core_RR is standard normal and drawn every step; U and V once per interval.

    The basis is orthonormal. Unit scale: U includes the factor (M/r)^(1/2) and V (N/r)^(1/2); their product is the
    published sqrt(M N) / r.
    """

    draws = Core

    def matrix_direction(self, target: Target, key: DrawKey) -> Core:
        refresh_step, rank = self.refresh_step(key.step), self._ranks[target.name]
        factors = self.factors(target, key.seed, refresh_step)
        draw = self.numbers((rank, rank), target, key, "core")
        return Core(draw=draw, u_MR=factors["u"], v_NR=factors["v"], refresh_step=refresh_step)

    def draw_factors(self, target: Target, seed: int, refresh_step: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        drawn = ((role, self.basis.factor(role, target, rank, seed, refresh_step)) for role in ROLES)
        return {role: factor / (rank if self.scale == "unit" else len(factor)) ** 0.5 for role, factor in drawn}


class Temporal(LowRankPerturbation):
    """TeZO's Z_t = U diag(tau_t) V^T, low-rank over the model and over time (Eq. 3, Algorithm 1).

    u_MR and v_NR are drawn once per run or interval, tau_R ~ N(0, I_r) every step. Unit scale: V includes the factor
    r^(-1/2).
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
