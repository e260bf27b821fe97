"""LOZO's perturbation: one factor fresh every step, the other kept over an interval."""

from functools import partial

import torch
from torch import Tensor

from tezo.bases import Draw, Role
from tezo.directions import LowRank, TransposedLowRank
from tezo.params import Target
from tezo.perturbations.base import LowRankPerturbation, Moment
from tezo.random import fill_normal_


class Lazy(LowRankPerturbation):
    """Z_t = U_t V_k^T: u_MR drawn every step, v_NR once an interval, or a run.

    Unit scale: V carries r^(-1/2). V is on the side of the columns, as published; a basis that sees the data has it on
    the side of the inputs, which in GPT-2's layers is that of the rows.
    """

    draws = LowRank

    def matrix_direction(self, target: Target, moment: Moment) -> LowRank:
        born = self.born(moment.step)
        v_IR = self.factors(target, moment.seed, born)["v"]
        return (LowRank if self._role(target) == "v" else TransposedLowRank)(
            draw=partial(self._u, target, moment),
            v_NR=v_IR,
            born=born,
            before=self.before(target, moment),
            gram=self._gram(target, v_IR),
        )

    def fixed(self, target: Target) -> tuple[Role, ...]:
        return (self._role(target),)

    def _role(self, target: Target) -> Role:
        return (target.input_role or "v") if self.basis.sees_data else "v"

    def _gram(self, target: Target, v_IR: Tensor) -> float | Tensor:
        if self.basis.sees_data:  # columns are orthogonal, and may be of several lengths
            return v_IR.to(target.state_dtype).square().sum(0)
        return len(v_IR) * self._factor(self._ranks[target.name]) ** 2

    def _u(self, target: Target, moment: Moment) -> Tensor:
        # M x r numbers every step are too many for the CPU: like dense noise they come from the weight's device
        rows = target.matrix_shape[0 if self._role(target) == "v" else 1]
        u_MR = torch.empty((rows, self._ranks[target.name]), dtype=target.state_dtype, device=target.device)
        return fill_normal_(u_MR, seed=moment.seed, step=moment.step, name=target.name, role=f"u.{moment.index}")

    def draw_factors(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        rank = self._ranks[target.name]
        v_IR = self.basis.factor(self._role(target), target, rank, Draw(owner, seed, born))
        return {"v": v_IR * self._factor(rank)}

    def _factor(self, rank: int) -> float:
        return 1.0 if self.scale == "raw" else float(rank**-0.5)
